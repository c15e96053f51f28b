"""Latent rows of a chunk of context, copied from the pages of a pool into a workspace, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK_TOKENS = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(
    do_not_specialize=["n_tokens", "s_table"],
    do_not_specialize_on_alignment=["p_table", "p_cu", "p_request", "p_start"],
)
def gather_latent_kernel(
    p_cache, p_table, p_cu, p_request, p_start, p_out, n_tokens,
    s_cache_p, s_cache_t, s_cache_d, s_table, s_out_t, s_out_d,
    PAGE: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < n_tokens
    # [BT]
    b_request = tl.load(p_request + o_t, mask=m_t, other=0).to(tl.int64)
    # [BT]
    b_pos = o_t - tl.load(p_cu + b_request, mask=m_t, other=0)
    if p_start is not None:
        # [BT]
        b_pos += tl.load(p_start + b_request, mask=m_t, other=0)
    # [BT]
    b_page = tl.load(p_table + b_request * s_table + b_pos // PAGE, mask=m_t, other=0).to(tl.int64)
    p_from = p_cache + b_page[:, None] * s_cache_p + (b_pos % PAGE).to(tl.int64)[:, None] * s_cache_t
    p_to = p_out + o_t.to(tl.int64)[:, None] * s_out_t
    o_d0, o_d1 = tl.arange(0, D0).to(tl.int64)[None, :], D0 + tl.arange(0, max(D1, 1)).to(tl.int64)[None, :]
    m_0 = m_t[:, None] & (o_d0 < D)
    # [BT, D0]
    b_0 = tl.load(p_from + o_d0 * s_cache_d, mask=m_0, other=0)
    tl.store(p_to + o_d0 * s_out_d, b_0, mask=m_0)
    if D1 > 0:
        m_1 = m_t[:, None] & (o_d1 < D)
        # [BT, D1]
        b_1 = tl.load(p_from + o_d1 * s_cache_d, mask=m_1, other=0)
        tl.store(p_to + o_d1 * s_out_d, b_1, mask=m_1)


def launch_gather(
    cache: Any, table: Any, cu_seq_lens: Any, token_to_seq: Any, out: Any, n_tokens: int, starts: Any = None
) -> None:
    """``out[t] = cache[table[b, p // page], p % page]``: ``b = token_to_seq[t]``, ``p = t - cu_seq_lens[b] + start[b]``

    Args:
        cache: ``[pages, page, D]``, any strides and dtype; out ``[rows, D]`` of the same dtype, any strides.
        table: int32 ``[n, W]``, columns adjacent; cu_seq_lens int32 ``[n + 1]``; token_to_seq int32 ``[>= n_tokens]``;
            starts int32 ``[n]`` or None for 0; contiguous.
        n_tokens: rows written, at least 1; the others are left alone.
    """
    bits = _BITS[cache.element_size()]
    cache, out = cache.view(bits), out.view(bits)
    size = cache.shape[-1]
    first = triton.next_power_of_2(size)
    if first > size:
        first //= 2
    rest = triton.next_power_of_2(size - first) if size > first else 0
    gather_latent_kernel[(triton.cdiv(n_tokens, _BLOCK_TOKENS),)](
        cache, table, cu_seq_lens, token_to_seq, starts, out, n_tokens, *cache.stride(), table.stride(0), *out.stride(),
        PAGE=cache.shape[1], D=size, D0=first, D1=rest, BT=_BLOCK_TOKENS, num_warps=8,
    )  # fmt: skip
