"""Selection without a budget: every page whose score is above -inf, and the reserved pages, ascending.

Several programs share a list. For long rows a kernel counts what each block of a row keeps, and the next one adds up
the counts of the blocks before its own. Rows of few blocks need one launch: each program counts what the others keep
from the scores themselves. Either way the result is exact and the same on every run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.ordered import range_of
from flowlib.kernels.pdl import begin, options

_SHORT_WIDTH = 4096  # rows of at most so many pages are read by each of their programs: one launch less
_BLOCK, _WARPS = 1024, 4  # pages that are counted at once; many small programs, since each waits for its loads once
_FEWEST_COUNTS = 64  # loaded in a program: tables of up to 65,536 pages share a kernel
_UNCOUNTED = ((16384, 2048, 8), (2**31, 8192, 16))
"""(widest row, pages a program, warps): many programs that read long rows would be bound by the L2."""


@triton.jit
def _decided_range(seq_len, W, bos, eos, full_pages, dense_below, PAGE: tl.constexpr):
    """Pages of a row, and the range of those that their scores decide on: an empty one where all are kept."""
    n_pages, first, last, whole = range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    return n_pages, first, tl.where(whole, first, last)


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


@triton.jit(do_not_specialize=["W", "bos", "eos", "full_pages", "dense_below", "s_row", "s_lane", "s_counts"])
def count_kept_kernel(
    p_scores, p_seq_lens, p_counts, s_row, s_lane, s_page, s_counts, W, bos, eos, full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_list // LANES
    seq_len = tl.load(p_seq_lens + i_row // H)  # the kernel that wrote the scores began after what wrote the lengths
    begin(PDL)
    n_pages, first, last = _decided_range(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    p_scores += i_row * s_row + (i_list % LANES) * s_lane
    b_kept = _kept(p_scores, i_part * BW + tl.arange(0, BW), s_page, n_pages, first, last)
    tl.store(p_counts + i_list * s_counts + i_part, tl.sum(b_kept))


@triton.jit(do_not_specialize=[
    "W", "M", "bos", "eos", "full_pages", "dense_below", "s_row", "s_lane", "s_table", "s_counts",
])  # fmt: skip
def select_above_kernel(
    p_scores, p_seq_lens, p_table, p_counts, p_pages, p_physical, p_lengths, s_row, s_lane, s_page, s_table, s_counts,
    W, M, bos, eos, full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, PHYSICAL: tl.constexpr, BW: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_list // LANES
    seq_len = tl.load(p_seq_lens + i_row // H)  # as above
    if BN == 0:
        begin(PDL)
    n_pages, first, last = _decided_range(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    p_scores += i_row * s_row + (i_list % LANES) * s_lane
    p_pages += i_list * M
    if PHYSICAL:
        p_table += i_row // H * s_table
    start = i_part * BW
    o_w = start + tl.arange(0, BW)
    if BN > 0:  # the kernel that counted began after what wrote the scores, so only the counts are waited for
        b_kept = _kept(p_scores, o_w, s_page, n_pages, first, last)
        if PHYSICAL:
            # [BW]
            b_physical = tl.load(p_table + o_w, mask=b_kept > 0, other=0)
        begin(PDL)
        o_n = tl.arange(0, BN)
        # [BN]
        b_n = tl.load(p_counts + i_list * s_counts + o_n, mask=o_n * BW < n_pages, other=0)
        before, length = tl.sum(tl.where(o_n < i_part, b_n, 0)), tl.sum(b_n)
    else:
        before = _count(p_scores, 0, tl.minimum(start, n_pages), s_page, n_pages, first, last, BW)
        b_kept = _kept(p_scores, o_w, s_page, n_pages, first, last)
        length = before + tl.sum(b_kept) + _count(p_scores, start + BW, n_pages, s_page, n_pages, first, last, BW)
    length = tl.minimum(length, M)
    b_slot = before + tl.cumsum(b_kept, 0) - b_kept
    m_put = (b_kept > 0) & (b_slot < M)
    tl.store(p_pages + b_slot, o_w, mask=m_put)
    if PHYSICAL:
        if BN == 0:  # not earlier: it would not fit in registers
            b_physical = tl.load(p_table + o_w, mask=m_put, other=0)
        tl.store(p_physical + i_list * M + b_slot, b_physical, mask=m_put)
    tl.store(p_pages + o_w, -1, mask=(o_w >= length) & (o_w < M))
    if i_part == 0:
        tl.store(p_lengths + i_list, length)


def counted_blocks(width: int) -> int:
    """Blocks of a row of `width` pages that are counted first; 0 where one launch is faster."""
    return triton.cdiv(width, _BLOCK) if width > _SHORT_WIDTH else 0


def launch_select_above(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, dense_below: int, full_pages: int, width: int,
    page_table: Any = None, physical: Any = None, counts: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The lists of :func:`flowlib.kernels.select.launch_select`, with its arguments, for a budget that covers rows."""
    capacity, blocks = pages.shape[-1], 0 if counts is None else counted_blocks(width)
    block, warps = next((block, warps) for widest, block, warps in _UNCOUNTED if width <= widest)
    s_counts = n_counts = 0
    limits = (bos, eos, full_pages, dense_below)
    how = dict(H=num_kv_heads, LANES=lanes, PAGE=page_size, num_stages=1, **options(pdl))
    if blocks:
        block, warps, s_counts = _BLOCK, _WARPS, counts.shape[-1]
        n_counts = max(_FEWEST_COUNTS, triton.next_power_of_2(blocks))
        count_kept_kernel[(lengths.numel(), blocks)](
            scores, seq_lens, counts, *scores.stride(), s_counts, width, *limits, BW=block, num_warps=warps, **how
        )
    grid = (lengths.numel(), triton.cdiv(max(width, capacity), block))
    select_above_kernel[grid](
        scores, seq_lens, page_table, counts if blocks else None, pages, physical, lengths, *scores.stride(),
        0 if page_table is None else page_table.stride(0), s_counts, width, capacity, *limits,
        PHYSICAL=physical is not None, BW=block, BN=n_counts, num_warps=warps, **how,
    )  # fmt: skip
