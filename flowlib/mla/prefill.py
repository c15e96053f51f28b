"""Prefill over a cached context that is up-projected chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowlib.core.errors import BatchError, FormatError, ShapeError
from flowlib.mla import attention as attend
from flowlib.mla.checks import check_impl, check_tensor, check_writable
from flowlib.mla.gather import check_cache, gather_latent
from flowlib.mla.merge import merge_attn_states
from flowlib.mla.projection import UpProjection
from flowlib.mla.schedule import ChunkedContext


@dataclass(frozen=True)
class PrefillOutput:
    """What :func:`chunked_prefill` computes.

    Attributes:
        o: ``[T, H, Dv]``.
        lse: fp32 ``[T, H]``, natural logarithm of Σ exp(score) over context and new tokens.
        attention: what computed the attention inside: ``"flashinfer"``, ``"triton"`` or ``"reference"``.
    """

    o: torch.Tensor
    lse: torch.Tensor
    attention: str


def chunked_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context: ChunkedContext,
    up_project: UpProjection,
    *,
    scale: float,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "reference",
    attention: str = "auto",
) -> PrefillOutput:
    """Attention of new tokens over their request's cached context and themselves, causal, as if it were one.

    The new tokens attend to themselves first, which seeds the result: its log-sum-exp is finite, so no merge meets two
    empty sides. Then each chunk of context is gathered, up-projected, attended to and merged in place, in fp32, into
    the rows of its requests alone.

    Args:
        q, k: ``[T, H, D]`` of the new tokens, one request after the other; v ``[T, H, Dv]``. One dtype, any strides.
        cache: ``[pages, page, kv_lora_rank + rope]``, the latent rows of the context; those of the new tokens need not
            be there and are not read.
        block_table: int32 ``[n, W]``, logical to physical pages; entries past a request's context are not read.
        context: from :func:`build_chunked_context`, with index tensors on q's device.
        up_project: latent rows ``[tokens, kv_lora_rank + rope]`` to keys ``[tokens, H, D]`` and values
            ``[tokens, H, Dv]``; :func:`up_projection` makes one.
        scale: factor of q . k; DeepSeek's holds ``mscale**2``.
        workspace: ``[at least context.max_token_num_over_chunk, kv_lora_rank + rope]`` of the cache's dtype, reused by
            every layer; ``None`` makes one.
        out: ``[T, H, Dv]`` of q's dtype, any strides; ``None`` makes one.
        impl: ``"reference"`` or ``"triton"``.
        attention: ``"auto"``, ``"flashinfer"``, ``"triton"`` or ``"reference"``; see :func:`resolve_attention`.

    Raises:
        ShapeError, FormatError, BatchError, OptionError, BackendError: before anything runs; wrong results of
            `up_project` when they come.
    """
    loop = _checked(q, k, v, cache, block_table, context, up_project, float(scale), workspace, out, impl, attention)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    chunks = [i for i, chunk in enumerate(context.chunks) if chunk.rows[0] < chunk.rows[1]]
    total = torch.empty_like(loop.out, dtype=wide) if chunks and loop.out.dtype is not wide else loop.out
    attend.run(loop.attention, q, k, v, context.queries, loop.scale, True, total, lse)
    if chunks:
        rows = max(context.chunks[i].rows[1] - context.chunks[i].rows[0] for i in chunks)
        partial = torch.empty(rows, *total.shape[1:], dtype=wide, device=q.device)
        partial_lse = torch.empty(rows, q.shape[1], dtype=wide, device=q.device)
        for i in chunks:
            loop.add(i, total, lse, partial, partial_lse)
    if total is not loop.out:
        loop.out.copy_(total)
    return PrefillOutput(loop.out, lse, loop.attention)


@dataclass(frozen=True)
class _Loop:
    """Checked arguments of one call."""

    q: torch.Tensor
    v_head_dim: int
    cache: torch.Tensor
    block_table: torch.Tensor
    context: ChunkedContext
    up_project: UpProjection
    scale: float
    workspace: torch.Tensor
    out: torch.Tensor
    impl: str
    attention: str

    def add(
        self, i: int, total: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor
    ) -> None:
        """Merges chunk i into `total` and `lse`."""
        context, chunk = self.context, self.context.chunks[i]
        gather_latent(
            self.cache, self.block_table, context.cu_seq_lens[i], context.token_to_seq[i], chunk.tokens,
            self.workspace, context.starts[i], self.impl,
        )  # fmt: skip
        k, v = self._projected(self.workspace[: chunk.tokens])
        first, end = chunk.rows
        o, o_lse = partial[: end - first], partial_lse[: end - first]
        attend.run(self.attention, self.q[first:end], k, v, chunk.batch, self.scale, False, o, o_lse)
        merge_attn_states(
            o, o_lse, total[first:end], lse[first:end], out=total[first:end], out_lse=lse[first:end], impl=self.impl
        )

    def _projected(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        what = "chunked_prefill: up_project's result"
        both = self.up_project(latent)
        if not isinstance(both, tuple) or len(both) != 2:
            raise FormatError(f"{what} is {type(both).__name__}, expected a pair (k, v)")
        k, v = both
        heads, size = self.q.shape[1:]
        check_tensor(what, "k", k, "tokens H D", (len(latent), heads, size), self.q.dtype, self.q.device)
        check_tensor(what, "v", v, "tokens H Dv", (len(latent), heads, self.v_head_dim), self.q.dtype, self.q.device)
        return k, v


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor,
    context: ChunkedContext, up_project: UpProjection, scale: float, workspace: torch.Tensor | None,
    out: torch.Tensor | None, impl: str, attention: str,
) -> _Loop:  # fmt: skip
    what = "chunked_prefill"
    if not isinstance(context, ChunkedContext):
        raise FormatError(f"{what}: context is {type(context).__name__}, expected one of build_chunked_context(...)")
    if not callable(up_project):
        raise FormatError(f"{what}: up_project is {type(up_project).__name__}, expected a function of latent rows")
    _check_rows(what, q, context)
    attend.check_qkv(what, q, k, v, context.num_tokens, context.num_tokens)
    _check_context(what, cache, block_table, context, q.device)
    check_impl(what, impl, q.device)
    if impl == "triton" and q.dtype is torch.float64:
        raise FormatError(f"{what}: float64 inputs are for impl='reference'; impl='triton' computes in fp32")
    name = attend.resolve_attention(attention, impl, q.dtype, (q.shape[2], v.shape[2]), q.device)
    shape = (*q.shape[:2], v.shape[2])
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    check_tensor(what, "out", out, "T H Dv", shape, q.dtype, q.device)
    check_writable(what, "out", out)
    rows = context.max_token_num_over_chunk
    if workspace is None:
        workspace = torch.empty(max(rows, 1), cache.shape[2], dtype=cache.dtype, device=q.device)
    check_tensor(what, "workspace", workspace, "rows D", (None, cache.shape[2]), cache.dtype, q.device)
    check_writable(what, "workspace", workspace)
    if workspace.shape[0] < rows:
        raise ShapeError(f"{what}: workspace has {workspace.shape[0]} rows, the largest chunk has {rows}")
    return _Loop(q, v.shape[2], cache, block_table, context, up_project, scale, workspace, out, impl, name)


def _check_rows(what: str, q: torch.Tensor, context: ChunkedContext) -> None:
    if isinstance(q, torch.Tensor) and q.dim() == 3 and q.shape[0] != context.num_tokens:
        raise ShapeError(
            f"{what}: q has {q.shape[0]} rows, expected {context.num_tokens}, the end of query_start_loc of the context"
        )


def _check_context(
    what: str, cache: torch.Tensor, block_table: torch.Tensor, context: ChunkedContext, device: torch.device
) -> None:
    check_cache(what, cache)
    check_tensor(what, "block_table", block_table, "n W", (context.num_prefills, None), torch.int32, device)
    for name, where in (("cache", cache.device), ("context", context.query_start_loc.device)):
        if where != device:
            raise BatchError(f"{what}: {name} is on {where}, expected {device} as q")
    if context.num_chunks and cache.shape[1] != context.page_size:
        raise ShapeError(
            f"{what}: cache has pages of {cache.shape[1]} tokens, the context was cut for pages of {context.page_size}"
        )
    longest = max(range(context.num_prefills), key=lambda b: context.context_lens[b], default=None)
    if longest is not None:
        pages = -(-context.context_lens[longest] // context.page_size)
        if pages > block_table.shape[1]:
            raise BatchError(
                f"{what}: block_table has {block_table.shape[1]} columns, request {longest} has "
                f"{context.context_lens[longest]} context tokens = {pages} pages"
            )
