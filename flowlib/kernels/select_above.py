"""Selection without a budget: every page whose score is above -inf, and the reserved pages, ascending.

Several programs share a list. Each counts what the ones before it keep from the scores themselves, so the result is
exact and the same on every run, without a word between programs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.pdl import begin, options

_BLOCKS = ((16384, 2048, 8), (2**31, 8192, 16))
"""(widest row, pages a program, warps): many programs that read long rows would be bound by the L2."""


@triton.jit
def _kept(p_scores, o_w, s_page, n_pages, first, last):
    """1 for the pages that are kept: reserved ones, and those with a score above -inf, which NaN is not."""
    m_scored = (o_w >= first) & (o_w < last)
    # [BW]
    b_s = tl.load(p_scores + o_w.to(tl.int64) * s_page, mask=m_scored, other=float("-inf"))
    return ((o_w < n_pages) & (~m_scored | (b_s > float("-inf")))).to(tl.int32)


@triton.jit
def _count(p_scores, start, end, s_page, n_pages, first, last, BW: tl.constexpr):
    """How many pages of [start, end) are kept."""
    b_count = tl.zeros((BW,), tl.int32)
    for o in tl.range(start, end, BW, loop_unroll_factor=2):
        b_count += _kept(p_scores, o + tl.arange(0, BW), s_page, n_pages, first, last)
    return tl.sum(b_count)


@triton.jit(do_not_specialize=["W", "M", "bos", "eos", "full_pages", "dense_below", "s_row", "s_lane", "s_table"])
def select_above_kernel(
    p_scores, p_seq_lens, p_table, p_pages, p_physical, p_lengths, s_row, s_lane, s_page, s_table,
    W, M, bos, eos, full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, PHYSICAL: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_list // LANES
    seq_len = tl.load(p_seq_lens + i_row // H)  # the kernel that wrote the scores began after what wrote the lengths
    begin(PDL)
    n_pages = tl.maximum(tl.minimum((seq_len + PAGE - 1) // PAGE, W), 0)
    first, last, start = bos, n_pages - eos, i_part * BW
    if (first >= last) | (n_pages <= full_pages) | (seq_len <= dense_below):
        last = first  # none is scored: all are kept
    p_scores += i_row * s_row + (i_list % LANES) * s_lane
    before = _count(p_scores, 0, tl.minimum(start, n_pages), s_page, n_pages, first, last, BW)
    o_w = start + tl.arange(0, BW)
    b_kept = _kept(p_scores, o_w, s_page, n_pages, first, last)
    length = before + tl.sum(b_kept) + _count(p_scores, start + BW, n_pages, s_page, n_pages, first, last, BW)
    length = tl.minimum(length, M)
    b_slot = before + tl.cumsum(b_kept, 0) - b_kept
    m_put = (b_kept > 0) & (b_slot < M)
    p_pages += i_list * M
    tl.store(p_pages + b_slot, o_w, mask=m_put)
    if PHYSICAL:
        b_physical = tl.load(p_table + i_row // H * s_table + o_w, mask=m_put, other=0)
        tl.store(p_physical + i_list * M + b_slot, b_physical, mask=m_put)
    tl.store(p_pages + o_w, -1, mask=(o_w >= length) & (o_w < M))
    if i_part == 0:
        tl.store(p_lengths + i_list, length)


def launch_select_above(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, dense_below: int, full_pages: int, width: int,
    page_table: Any = None, physical: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The lists of :func:`flowlib.kernels.select.launch_select`, with its arguments, for a budget that covers rows."""
    capacity = pages.shape[-1]
    block, warps = next((block, warps) for widest, block, warps in _BLOCKS if width <= widest)
    grid = (lengths.numel(), triton.cdiv(max(width, capacity), block))
    select_above_kernel[grid](
        scores, seq_lens, page_table, pages, physical, lengths, *scores.stride(),
        0 if page_table is None else page_table.stride(0), width, capacity, bos, eos, full_pages, dense_below,
        H=num_kv_heads, LANES=lanes, PAGE=page_size, PHYSICAL=physical is not None, BW=block, num_warps=warps,
        num_stages=1, **options(pdl),
    )  # fmt: skip
