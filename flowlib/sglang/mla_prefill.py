"""Prefill of MLA models over a cached prefix in chunks (:mod:`flowlib.mla`), where stock SGLang attends absorbed.

SGLang asks a handler, by the name of the prefill backend, how the layers of a forward pass attend. For the backend
``triton`` it says "absorbed" as soon as a request has a prefix. While a flow over latents is served it says "chunked
prefix" there from the threshold on that SGLang has for its other backends, and the loop over chunks is flowlib's:
packed chunks, a log-sum-exp of known base, results in fp32, nothing for requests without a prefix. The same loop serves
the backends of :data:`UNPLANNED`, and every prefill with the backend ``flowlib``.
"""

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowlib import mla
from flowlib.core.errors import BackendError
from flowlib.sglang import PLUGIN_NAME
from flowlib.sglang.mla_pool import LatentFields
from flowlib.sglang.setup import FlowSetup
from flowlib.sglang.versions import adapter

logger = logging.getLogger("flowlib.sglang")

UNPLANNED = ("flashinfer", "flashmla", "cutlass_mla")
"""Backends for which SGLang has chunks, which it plans (``init_mha_chunk_metadata``) on the backend of the whole model:
not on theirs, where another one decodes. They also merge log-sum-exps to base 2 as if they were natural."""
BACKENDS = (PLUGIN_NAME, "triton", *UNPLANNED)
"""Prefill backends whose prefix is attended in flowlib's chunks."""

_KEPT = "_flowlib_prefix"


@dataclass
class Prefix:
    """What the layers of one forward pass share.

    Args:
        context: the cached prefixes of its requests, cut into chunks.
        block_table: int32 ``[n, W]``, their pages.
        workspace: ``[rows of the largest chunk, latent]``.
    """

    context: mla.ChunkedContext
    block_table: torch.Tensor
    workspace: torch.Tensor


def keep_prefix_cache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``maybe_disable_chunked_prefix_cache``, which turns chunks off for backends that SGLang has none for."""
    server_args = kwargs["server_args"]
    if getattr(server_args, "flow", None) is not None and kwargs["use_mla_backend"]:
        prefill = adapter().in_effect(server_args).get_attention_backends()[0]
        if prefill in BACKENDS:
            return None
    return original(*args, **kwargs)


def get_handler(original: Callable[..., Any], cls: type, backend_name: str) -> Callable[..., Any]:
    """AROUND ``AttentionBackendRegistry.get_handler``: the handler of a backend of :data:`BACKENDS` knows chunks."""
    handler = original(cls, backend_name)
    return functools.partial(_method, handler, backend_name) if backend_name in BACKENDS else handler


def _method(handler: Callable[..., Any], backend_name: str, attn: Any, forward_batch: Any) -> Any:
    """How a layer attends: what SGLang's handler says, or in chunks."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod as Method

    said, pool = handler(attn, forward_batch), get_token_to_kv_pool()
    if not forward_batch.forward_mode.is_extend_without_speculative() or not isinstance(pool, LatentFields):
        return said
    if backend_name == PLUGIN_NAME:
        return Method.MHA_CHUNKED_KV
    plain = pool.dtype.itemsize > 1
    if backend_name == "triton":
        return Method.MHA_CHUNKED_KV if plain and _passes_gate(attn, forward_batch) else said
    if said in (Method.MHA_ONE_SHOT, Method.MHA_CHUNKED_KV) and any(forward_batch.extend_prefix_lens_cpu):
        return Method.MHA_CHUNKED_KV if plain else Method.MLA
    return said


def _passes_gate(attn: Any, forward_batch: Any) -> bool:
    """Whether a plain extend may take chunks: SGLang's gate of its other backends, for its triton backend."""
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
    from sglang.srt.runtime_context import get_server_args

    if is_in_tc_piecewise_cuda_graph() or get_server_args().enable_deterministic_inference:
        return False
    cached = sum(forward_batch.extend_prefix_lens_cpu)
    return cached > 0 and cached >= attn.chunked_prefix_cache_threshold and not attn.disable_chunked_prefix_cache


def chunked_core(
    original: Callable[..., Any], self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """AROUND ``forward_normal_chunked_kv_core``: new tokens over their request's prefix and themselves.

    Args:
        self: SGLang's ``DeepseekV2AttentionMLA``.
        q, k: ``[T, H, D]`` of the new tokens, whose latents are in the pool; v ``[T, H, Dv]``.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool, backend = get_token_to_kv_pool(), self.current_attention_backend
    ours = backend == PLUGIN_NAME or (backend in BACKENDS and any(forward_batch.extend_prefix_lens_cpu))
    if not ours or not isinstance(pool, LatentFields):
        return original(self, q, k, v, forward_batch)
    prefix = _prefix_of(forward_batch, pool)
    tokens = prefix.context.num_tokens
    heads = self.num_local_heads
    out = q.new_empty(q.shape[0], heads, self.v_head_dim)
    out[tokens:] = 0.0  # rows that pad the batch to another rank's
    mla.chunked_prefill(
        q.view(-1, heads, self.qk_head_dim)[:tokens],
        k[:tokens],
        v[:tokens],
        pool.flow_pages(self.layer_id),
        prefix.block_table,
        prefix.context,
        functools.partial(_up_project, self),
        scale=self.attn_mha.scaling,
        workspace=prefix.workspace,
        out=out[:tokens],
        impl=pool.flow_setup.impl,
    )
    return self.o_proj(out.view(-1, heads * self.v_head_dim))[0]


def _up_project(attn: Any, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[tokens, H, D]`` and values ``[tokens, H, Dv]`` of latent rows, through the model's own projection."""
    rank, nope = attn.kv_lora_rank, attn.qk_nope_head_dim
    both = attn.kv_b_proj(latent[:, :rank].contiguous())[0].view(len(latent), attn.num_local_heads, -1)
    k = both.new_empty(len(latent), attn.num_local_heads, attn.qk_head_dim)
    k[..., :nope] = both[..., :nope]
    k[..., nope:] = latent[:, None, rank:]
    return k, both[..., nope:]


def _prefix_of(forward_batch: Any, pool: LatentFields) -> Prefix:
    """The prefixes of a batch; made by the first layer of a forward pass from lengths the host has, for all of them."""
    kept = getattr(forward_batch, _KEPT, None)
    if kept is None:
        kept = _prefix(forward_batch, pool)
        setattr(forward_batch, _KEPT, kept)
    return kept


def _prefix(forward_batch: Any, pool: LatentFields) -> Prefix:
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    facts, table = pool.flow_setup.facts, get_req_to_token_pool().req_to_token
    size = facts.page_size
    rows = mla.workspace_rows(facts.context_len, 1, size)  # packed chunks need a page, not a page of every request
    rows = max(size, min(rows, forward_batch.get_max_chunk_capacity()))
    lens = list(forward_batch.extend_prefix_lens_cpu)
    offsets = [0, *itertools.accumulate(forward_batch.extend_seq_lens_cpu)]
    context = mla.build_chunked_context(lens, offsets, rows, size, device=table.device)
    slots = table[:, : max(lens) : size][forward_batch.req_pool_indices]
    pages = torch.div(slots, size, rounding_mode="floor")
    latent = facts.head_dim
    workspace = torch.empty(context.max_token_num_over_chunk, latent, dtype=pool.dtype, device=table.device)
    return Prefix(context, pages, workspace)


def check_prefill(prefill: str | None, setup: FlowSetup, model: torch.nn.Module, layers: list[Any]) -> None:
    """The start-up check of prefill in chunks: the hooks reach the layers, the log-sum-exp has a known base.

    Args:
        prefill: name of the prefill backend.
        setup: the flow, made ready.
        model: the model.
        layers: its attention layers.

    Raises:
        BackendError: they do not, and no other backend was asked for; or it has not.
    """
    facts = setup.facts
    if prefill not in BACKENDS or facts.kv_lora_rank is None or facts.kv_dtype.itemsize == 1:
        return
    reached = _reached(model)
    others = [x.layer_id for x in layers if x not in reached]
    if others and prefill == PLUGIN_NAME:
        raise BackendError(
            f"layer {others[0]} of {type(model).__name__} does not belong to a DeepseekV2AttentionMLA, and "
            f"--prefill-attention-backend {PLUGIN_NAME} prefills no other class of MLA layers: choose another one"
        )
    sizes = {(x.qk_head_dim, x.v_head_dim) for x in layers if x in reached} - {(facts.head_dim, facts.v_head_dim)}
    device = torch.empty(0, device=facts.device).device  # with its index, as tensors will have it
    for dims in sizes:
        name = mla.resolve_attention("auto", setup.impl, facts.model_dtype, dims, device)
        mla.check_lse_base(name, setup.impl, facts.model_dtype, dims, device)
        logger.info("flowlib: prefill over a cached prefix goes in chunks, with %s attention of heads %s", name, dims)


def _reached(model: torch.nn.Module) -> set[torch.nn.Module]:
    """What lies in layers of the class whose prefill is hooked; some MLA models (Sarvam) attend in their own."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    owners = (module for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA))
    return {part for owner in owners for part in owner.modules()}
