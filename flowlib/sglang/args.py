"""What the server arguments ``flow``, ``flow_config`` and ``flow_served`` mean, and the checks of those they go with.

Each version's adapter adds the fields to its ``ServerArgs``, annotated the way SGLang annotates its own, so that the
flags, ``--help``, ``--config`` files, ``Engine`` keywords and ``/server_info`` come from SGLang's own machinery.
"""

import dataclasses
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse
from sglang.srt.utils import get_device

from flowlib import vFlowMLA
from flowlib.core.errors import BackendError, OptionError
from flowlib.sglang import PLUGIN_NAME, ledger, mla_prefill, refusals
from flowlib.sglang.facts import facts_from_args, is_mla
from flowlib.sglang.leave import leaving_with_reason
from flowlib.sglang.options import FlowConfig
from flowlib.sglang.setup import FlowSetup, build_flow
from flowlib.sglang.versions import ADAPTERS, adapter, check_version

logger = logging.getLogger("flowlib.sglang")

_BACKEND_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

FLOW_HELP = "Decode with this flowlib flow (sparse attention). `flowlib list` prints them."
FLOW_CONFIG_HELP = (
    "JSON object for --flow with the keys "
    + ", ".join(f.name for f in dataclasses.fields(FlowConfig))
    + ". Example: '{\"top_k\": 16}'."
)


def resolve(args: Any, stock: Callable[[], None]) -> dict[str, Any] | None:
    """Resolves the server arguments as SGLang does, with a check before and a check behind.

    Args:
        args: the arguments with the fields ``flow`` and ``flow_config``, not resolved yet.
        stock: SGLang's own way to resolve them.

    Returns:
        What ``flow_served`` is to say; ``None`` without a flow.

    Raises:
        SystemExit: the flow can't be served with them; the message says why.
    """
    if args.flow is None:
        _refuse_without_flow(args)
        stock()
        return None
    with leaving_with_reason(args.flow):
        page_size = choose_defaults(args)
    stock()
    with leaving_with_reason(args.flow):
        return check_resolved(adapter().in_effect(args), page_size)


def choose_defaults(args: Any) -> int:
    """Checks what the user said and sets the decode backend and the page size, before SGLang resolves its defaults.

    An argument is "not given" when it still is ``None``: that is SGLang's default for both, on the command line, in a
    ``--config`` file and as a keyword alike.

    Returns:
        The page size.

    Raises:
        FlowlibError: a flag can't be used with a flow, a hook did not take, or the flow or its configuration is wrong.
    """
    check_version()
    ledger.check_hooks()
    config = FlowConfig.parse(args.flow_config)
    flow = build_flow(args.flow, config)
    refusals.refuse_normaliser(args.flow, flow)
    args.flow_config = config.to_json()
    _choose_backend(args, isinstance(flow, vFlowMLA))
    refusals.refuse_flags(args, adapter().FLAGS)
    if args.page_size is None:
        args.page_size = flow.default_page_size
        logger.info("flowlib: --page-size is not given, --flow %s sets it to %d", args.flow, args.page_size)
    refusals.refuse_chunks(args.chunked_prefill_size, args.page_size)
    return args.page_size


def check_resolved(args: Any, page_size: int) -> dict[str, Any] | None:
    """Checks the arguments as SGLang resolved them, and the flow for the model's numbers.

    Args:
        args: the arguments in effect.
        page_size: the page size before they were resolved; some of SGLang's backends change it.

    Returns:
        The summary of what is served; ``None`` for the arguments that SGLang makes without a model.

    Raises:
        FlowlibError: SGLang changed what a flow needs, or the flow can't run for this model.
    """
    if args.model_path.lower() in ("none", "dummy"):
        return None
    _refuse_changes(args, page_size)
    refusals.refuse_flags(args, adapter().FLAGS)
    model = args.get_model_config()
    refusals.refuse_model(model)
    refusals.refuse_hybrid(model, mambaish_config(model) is not None, has_own_sparse(model.hf_config))
    config = FlowConfig.parse(args.flow_config)
    flow = build_flow(args.flow, config)
    refusals.refuse_other_attention(args.flow, flow, model, adapter().LATENTS)
    if is_mla(model):
        _refuse_latents()
        refusals.refuse_latent_prefill(args, PLUGIN_NAME, mla_prefill.BACKENDS)
    refusals.refuse_chunks(args.chunked_prefill_size, args.page_size)
    setup = FlowSetup(args.flow, config, facts_from_args(args))
    refusals.refuse_prefill(args.get_attention_backends()[0], setup.facts.kv_dtype is torch.float8_e4m3fn)
    refusals.refuse_state(args.flow, setup.plan.state_fields, args.disable_radix_cache)
    _refuse_trace(args, config)
    _refuse_graphs(args, setup)
    return setup.summary()


def has_own_sparse(hf_config: Any) -> bool:
    """Whether the layers of a model choose tokens themselves."""
    return is_minimax_sparse(hf_config) or is_deepseek_dsa(hf_config) or is_deepseek_v4(hf_config)


def _refuse_changes(args: Any, page_size: int) -> None:
    decode = args.get_attention_backends()[1]
    if decode != PLUGIN_NAME:
        raise OptionError(
            f"SGLang chose the decode attention backend {decode!r} for this model, expected {PLUGIN_NAME!r}"
        )
    if args.page_size != page_size:
        raise OptionError(
            f"SGLang changed --page-size from {page_size} to {args.page_size} for the prefill attention backend "
            f"{args.get_attention_backends()[0]!r}: give that --page-size, or another --prefill-attention-backend"
        )


def _choose_backend(args: Any, latents: bool) -> None:
    for name in _BACKEND_FLAGS[:2]:
        if getattr(args, name) == PLUGIN_NAME and not latents:
            raise OptionError(f"--{name.replace('_', '-')} is {PLUGIN_NAME!r}, but a flow only decodes: leave it off")
    chosen = args.decode_attention_backend
    if chosen not in (None, PLUGIN_NAME):
        raise OptionError(
            f"--decode-attention-backend is {chosen!r}, but --flow decodes with {PLUGIN_NAME!r}: leave one of them off"
        )
    if chosen is None:
        args.decode_attention_backend = PLUGIN_NAME
        logger.info("flowlib: --flow %s sets --decode-attention-backend to %s", args.flow, PLUGIN_NAME)
    given = args.attention_backend or args.prefill_attention_backend
    if latents and not given and _device(args) == "cpu":
        args.prefill_attention_backend = PLUGIN_NAME
        logger.info("flowlib: --flow %s sets --prefill-attention-backend to %s", args.flow, PLUGIN_NAME)
    if args.prefill_attention_backend == PLUGIN_NAME:
        if args.attention_backend not in (None, PLUGIN_NAME):
            logger.info(
                "flowlib: prefill and decoding are %s's, --attention-backend %s is left out",
                PLUGIN_NAME,
                args.attention_backend,
            )
        args.attention_backend = PLUGIN_NAME  # what SGLang makes when both are the same


def _device(args: Any) -> str:
    """The device as SGLang will resolve it, which it does only later."""
    return str(args.device or get_device()).split(":")[0]


def _refuse_without_flow(args: Any) -> None:
    problem = None
    if args.flow_config is not None:
        problem = "--flow-config is given without --flow: name the flow"
    for name in _BACKEND_FLAGS:
        if getattr(args, name) == PLUGIN_NAME:
            problem = f"--{name.replace('_', '-')} is {PLUGIN_NAME!r} without --flow: name the flow with --flow"
    if problem:
        raise SystemExit(f"flowlib: {problem}")


def _refuse_latents() -> None:
    if not adapter().LATENTS:
        serving = [version for version, name in ADAPTERS.items() if import_module(name).LATENTS]
        raise BackendError(
            f"flows over MLA latents are served by SGLang {' and '.join(serving)}, found {check_version()}"
        )


def _refuse_trace(args: Any, config: FlowConfig) -> None:
    for name in adapter().SCHEDULERS:
        if config.trace is not None and getattr(args, name) > 1:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"--flow-config: trace follows one scheduler, and {flag} is {getattr(args, name)}")


def _refuse_graphs(args: Any, setup: FlowSetup) -> None:
    if setup.facts.device != "cuda" or args.cuda_graph_config.decode.backend == "disabled":
        return
    if setup.impl == "reference":
        raise OptionError(
            "--flow-config: impl is 'reference', which a CUDA graph can't capture: "
            "add --cuda-graph-backend-decode disabled"
        )
    if setup.config.trace is not None:
        raise OptionError(
            "--flow-config: trace copies to the host each step, which a CUDA graph can't capture: "
            "add --cuda-graph-backend-decode disabled"
        )
