"""A flow made ready for one served model: built, profiled for the model's numbers, with a plan for each layer.

Nothing here imports SGLang; SGLang's objects come in as plain numbers (:class:`ModelFacts`) and attention layers.
"""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import flowlib
from flowlib import ContextBase, SelectionHandle, vFlowMLA, vTensor
from flowlib.core.errors import BackendError, OptionError
from flowlib.ops import Reserved
from flowlib.sglang.options import AUTO, FlowConfig

FIELDLESS_FLOW = "streaming_attention"
"""What dense layers are planned with: a flow that keeps nothing beside K and V."""

CROSSOVER = 1.5
"""Budgets of tokens up to which attending to everything is the faster step with a flow over K and V: measured on an
H200 at batch 16 (``experiments/crossover.py``, docs/performance.md); at batch 1 it is 2.5. Not measured for latents."""


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a served model on one rank.

    Args:
        head_dim, v_head_dim: size of a key and of a value head.
        num_heads, num_kv_heads: query and kv heads of one layer on this rank.
        start_layer, num_layers: first layer id and number of layers on this rank.
        total_layers: layers of the whole model.
        page_size: tokens per page of SGLang's KV pool.
        context_len: most tokens of one request.
        kv_dtype: dtype of the KV pool.
        model_dtype: dtype the model computes in.
        device: ``cpu`` or ``cuda``.
        kv_lora_rank: content channels of an MLA latent; ``None`` for a model that keeps K and V. With it `head_dim` is
            the size of a latent, `v_head_dim` is this, and `num_kv_heads` 1.
    """

    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    start_layer: int
    num_layers: int
    total_layers: int
    page_size: int
    context_len: int
    kv_dtype: torch.dtype
    model_dtype: torch.dtype
    device: str
    kv_lora_rank: int | None = None

    @property
    def max_pages(self) -> int:
        """Pages of the longest request, its next token included."""
        return -(-(self.context_len + 1) // self.page_size)


class Latents(vFlowMLA):
    """What dense layers of an MLA model are planned with: keeps nothing beside the latents."""

    def __init__(self) -> None:
        self.reserved = Reserved()

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.reserved(o, ctx=ctx)


@dataclass
class FlowSetup:
    """A flow, its configuration and its plans for one model.

    Args:
        name: the name given to ``--flow``.
        config: the parsed ``--flow-config``.
        facts: the model's numbers.

    Raises:
        FlowlibError: the flow can't run for this model with these options; the message says why.
    """

    name: str
    config: FlowConfig
    facts: ModelFacts
    flow: Any = field(init=False)
    plan: Any = field(init=False)
    impl: str = field(init=False)
    dense_below: int = field(init=False)
    _plans: dict[tuple[bool, float, float, float], Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.impl = choose_impl(self.config.impl, self.facts.device)
        self._check_layers()
        self.flow = build_flow(self.name, self.config)
        self._no_fields = flowlib.build(FIELDLESS_FLOW) if self.facts.kv_lora_rank is None else Latents()
        self.dense_below = 0 if self.config.dense_below == AUTO else int(self.config.dense_below)
        self.plan = self._profile(self.flow, scale=None, k_scale=1.0, v_scale=1.0)
        if self.config.dense_below == AUTO and self.impl == "triton" and self.facts.kv_lora_rank is None:
            self.dense_below = int(CROSSOVER * self.plan.full_pages) * self.facts.page_size
            self.plan = self._profile(self.flow, scale=None, k_scale=1.0, v_scale=1.0)
        self._check_dtypes()

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Ids of this rank's layers that choose pages."""
        first = self.facts.start_layer
        return tuple(i for i in range(first, first + self.facts.num_layers) if i not in self.config.dense_layers)

    @property
    def field_bytes_per_token(self) -> int:
        """Bytes that the fields of all sparse layers add to one token of the KV pool, rounded up.

        A page's worth of tokens, times this, is at least what the page's fields take.
        """
        return -(-self.plan.field_bytes_per_page * len(self.sparse_layers) // self.facts.page_size)

    @property
    def short_pages(self) -> int:
        """Pages of requests that are attended in full without being scored; 0 where there are none, or no others."""
        return self.plan.short_pages if self.plan.short_pages < self.facts.max_pages else 0

    def plan_for(self, layer: Any) -> Any:
        """The plan for an attention layer, with its own softmax scale and fp8 scales; a dense layer's has no fields.

        Args:
            layer: SGLang's ``RadixAttention``; ``scaling``, ``k_scale_float`` and ``v_scale_float`` are read.
        """
        quantised = self.facts.kv_dtype is torch.float8_e4m3fn
        k_scale = (layer.k_scale_float or 1.0) if quantised else 1.0
        v_scale = (layer.v_scale_float or 1.0) if quantised else 1.0
        if self.facts.kv_lora_rank is not None:
            v_scale = k_scale
        key = (self.is_dense(layer), float(layer.scaling), float(k_scale), float(v_scale))
        if key not in self._plans:
            self._plans[key] = self._profile(self._no_fields if key[0] else self.flow, *key[1:])
        return self._plans[key]

    def is_dense(self, layer: Any) -> bool:
        """Whether an attention layer attends to everything."""
        return layer.layer_id in self.config.dense_layers

    @property
    def sparse_above(self) -> int:
        """Requests of more tokens than this leave pages out: budget, reserved pages and ``dense_below`` cover no more.

        Shorter ones attend to everything with a flow of a fixed budget, and may leave pages out with an adaptive one.
        """
        covered = self.plan.program.selection.op.covered_pages(self.plan.spec)
        return max(covered * self.plan.spec.page_size, self.dense_below)

    def summary(self) -> dict[str, Any]:
        """What is served, as plain values: flow, options, budget, layers and memory. ``/server_info`` shows it."""
        spec, first = self.plan.spec, self.facts.start_layer
        here = range(first, first + self.facts.num_layers)
        return {
            "flow": self.name,
            "options": options_of(self.flow, self.config),
            "impl": self.impl,
            "budget": {
                **self.config.budget_numbers(), "dense_below": self.dense_below, "page_size": spec.page_size
            },
            "sparse_above_tokens": self.sparse_above,
            "sparse_layers": len(self.sparse_layers),
            "dense_layers": [i for i in here if i in self.config.dense_layers],
            "fields": {f.name: [*f.shape, str(f.dtype).removeprefix("torch.")] for f in self.plan.fields.values()},
            "field_bytes_per_token": self.field_bytes_per_token,
        }

    def describe(self) -> tuple[str, str]:
        """Two lines for the log: flow, options, layers and memory; the budget and from which length on it is sparse."""
        said = self.summary()
        options = ", ".join(f"{name}={value}" for name, value in said["options"].items()) or "none"
        fields = ", ".join(f"{name} {value[-1]}" for name, value in said["fields"].items()) or "none"
        budget = ", ".join(f"{name} {said['budget'][name]:g}" for name in ("top_k", "top_k_ratio", "bos", "eos"))
        return (
            f"flow {self.name} (options {options}), impl {self.impl}, {said['sparse_layers']} sparse and "
            f"{len(said['dense_layers'])} dense layers, fields {fields} add {said['field_bytes_per_token']} "
            "bytes per token",
            f"budget {budget} (pages of {self.facts.page_size} tokens), dense_below {self.dense_below}: "
            + (
                "it covers every request, so that only the flow's own choice leaves pages out"
                if self.sparse_above >= self.facts.context_len
                else f"requests of more than {self.sparse_above} tokens leave pages out"
            ),
        )

    def _profile(self, flow: Any, scale: float | None, k_scale: float, v_scale: float) -> Any:
        facts = self.facts
        if facts.kv_lora_rank is not None and scale is None:
            scale = 1.0  # sizes do not depend on it, and every layer is planned with its own
        spec = flowlib.Spec(
            page_size=facts.page_size,
            head_dim=facts.head_dim,
            v_head_dim=facts.v_head_dim,
            group_size=facts.num_heads // facts.num_kv_heads,
            num_kv_heads=facts.num_kv_heads,
            kv_dtype=facts.kv_dtype,
            scale=scale,
            kv_lora_rank=facts.kv_lora_rank,
            max_pages=facts.max_pages,
            k_scale=k_scale,
            v_scale=v_scale,
            dense_below=self.dense_below,
            **self.config.budget_numbers(),
            **self.config.summary_numbers(),
        )
        return flowlib.profile(flow, spec)

    def _check_dtypes(self) -> None:
        expected = self.plan.spec.field_dtype
        if self.facts.model_dtype is not expected:
            raise OptionError(
                f"--kv-cache-dtype gives a KV pool of {self.facts.kv_dtype} and the model computes in "
                f"{self.facts.model_dtype}, expected {expected} beside such a pool: set --dtype or --kv-cache-dtype"
            )

    def _check_layers(self) -> None:
        facts = self.facts
        if facts.num_heads % facts.num_kv_heads:
            raise OptionError(
                f"the model has {facts.num_heads} query heads and {facts.num_kv_heads} kv heads on a rank, "
                f"expected a whole number of query heads per kv head"
            )
        beyond = [i for i in self.config.dense_layers if i >= facts.total_layers]
        if beyond:
            raise OptionError(
                f"--flow-config: dense_layers names layer {beyond[0]}, expected ids from 0 to {facts.total_layers - 1}"
            )
        if len(self.config.dense_layers) == facts.total_layers:
            raise OptionError(
                f"--flow-config: dense_layers names all {facts.total_layers} layers, so nothing would be sparse: "
                "leave at least one out, or leave --flow off"
            )


def build_flow(name: str, config: FlowConfig) -> Any:
    """The flow of that name with the configured options, from the user's file if one is given."""
    return flowlib.build(name, module_path=config.module_path, **config.options)


def options_of(flow: Any, config: FlowConfig) -> dict[str, Any]:
    """The flow's options: those that were given, and the defaults of the others that have a plain value."""
    init = type(flow).__init__
    known = {} if init is object.__init__ else inspect.signature(init).parameters
    plain = (bool, int, float, str, list, tuple, dict, type(None))
    defaults = {name: p.default for name, p in known.items() if name != "self" and isinstance(p.default, plain)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in (defaults | dict(config.options)).items()}


def choose_impl(asked: str | None, device: str) -> str:
    """``triton`` on a GPU and ``reference`` on a CPU unless asked otherwise.

    Raises:
        BackendError: Triton was asked for on a CPU and its interpreter is not switched on.
    """
    impl = asked or ("triton" if device == "cuda" else "reference")
    if impl == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendError(
            f"--flow-config: impl is 'triton' and the device is {device!r}: Triton's interpreter is needed, "
            "set TRITON_INTERPRET=1 before the server starts, or leave impl out"
        )
    return impl
