"""The budget's best pages of rows that registers do not hold, by many programs a row.

A radix search: four launches count the scores by eight bits of their keys each, among those that share the bits found
so far, until the key of the last page to take is known; the fifth counts what each block takes, the sixth writes. The
result is exact and the same on every run, since only integers are added up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.ordered import compacted, key_of, put, range_of, scores_of, value_of
from flowlib.kernels.pdl import begin, options

_PROGRAMS = 1024
"""About what a large GPU runs at once. Programs are small, since each waits for its loads once; where that makes more
than so many, they are larger."""
_BLOCK, _WARPS = 1024, 4  # pages of a small program
_LARGE_BLOCK, _LARGE_WARPS = 4096, 8
_BITS = tl.constexpr(8)
_BINS = tl.constexpr(256)
_ROUNDS = tl.constexpr(4)
_STATES = tl.constexpr(_ROUNDS * _BINS)  # where the states lie behind the histograms
_COUNTS = tl.constexpr(_STATES + 2 * (_ROUNDS + 1))  # and the counts behind them
_FEWEST_COUNTS = 64  # loaded in a program: tables of up to 65,536 pages share a kernel
_VARYING = [
    "W", "M", "bos", "eos", "top_k", "ratio_q16", "full_pages", "dense_below", "s_row", "s_lane", "s_bins", "s_table"
]  # fmt: skip


@triton.jit
def _searched_range(seq_len, W, bos, eos, full_pages, dense_below, narrow, PAGE: tl.constexpr):
    """Pages of a row, and the range of those to choose from: an empty one for rows that another kernel selects."""
    n_pages, first, last, whole = range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    return n_pages, first, tl.where(whole | (n_pages <= narrow), first, last)


@triton.jit
def _own_scores(
    p_scores, p_seq_lens, i_list, i_part, s_row, s_lane, s_page, W, bos, eos, full_pages, dense_below, narrow,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """(pages of the row, searched range, the program's pages, their scores); nothing that the kernel before writes."""
    i_row = i_list // LANES
    seq_len = tl.load(p_seq_lens + i_row // H)
    n_pages, first, last = _searched_range(seq_len, W, bos, eos, full_pages, dense_below, narrow, PAGE)
    o_w = i_part * BW + tl.arange(0, BW)
    # [BW]
    b_s = scores_of(p_scores + i_row * s_row + i_list % LANES * s_lane, o_w, s_page, first, last, VECTORS)
    return n_pages, first, last, o_w, b_s


@triton.jit
def _next_digit(p_bins, n_pages, top_k, ratio_q16, ROUND: tl.constexpr):
    """(the key's first ROUND digits, scores with these digits to take), from what the rounds before have counted."""
    o_bin = tl.arange(0, _BINS)
    # [_BINS]
    b_n = tl.load(p_bins + (ROUND - 1) * _BINS + o_bin)
    total = tl.sum(b_n)
    if ROUND == 1:
        prefix = tl.zeros((), tl.uint32)
        budget = tl.maximum((n_pages.to(tl.int64) * ratio_q16) >> 16, top_k).to(tl.int32)
        rest = tl.minimum(budget, total)
    else:
        prefix = tl.load(p_bins + _STATES + 2 * (ROUND - 1)).to(tl.uint32, bitcast=True)
        rest = tl.load(p_bins + _STATES + 2 * (ROUND - 1) + 1)
    b_from = total - (tl.cumsum(b_n, 0) - b_n)  # scores of this digit or a larger one
    digit = tl.maximum(tl.sum((b_from >= rest).to(tl.int32)) - 1, 0)
    digit = tl.where(rest > 0, digit, _BINS - 1)
    above = tl.sum(tl.where(o_bin > digit, b_n, 0))
    return (prefix << _BITS) | digit.to(tl.uint32), rest - above


@triton.jit
def _remember(p_bins, prefix, rest, ROUND: tl.constexpr):
    """Keep what was found for the next launch, and leave the histogram before the last one as it was: zero."""
    tl.store(p_bins + _STATES + 2 * ROUND, prefix.to(tl.int32, bitcast=True))
    tl.store(p_bins + _STATES + 2 * ROUND + 1, rest)
    if ROUND > 1:
        o_bin = tl.arange(0, _BINS)
        tl.store(p_bins + (ROUND - 2) * _BINS + o_bin, tl.zeros((_BINS,), tl.int32))


@triton.jit(do_not_specialize=_VARYING)
def digit_kernel(
    p_scores, p_seq_lens, p_bins, s_row, s_lane, s_page, s_bins, W, bos, eos, top_k, ratio_q16, full_pages,
    dense_below, narrow,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr, ROUND: tl.constexpr,
    BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round ROUND of the search: how many of the scores that share the digits found so far have which next digit."""
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_pages, first, last, _, b_s = _own_scores(
        p_scores, p_seq_lens, i_list, i_part, s_row, s_lane, s_page, W, bos, eos, full_pages, dense_below, narrow,
        H, LANES, PAGE, VECTORS, BW,
    )  # fmt: skip
    p_bins += i_list * s_bins
    begin(PDL)  # not earlier: the kernel before this one began after what wrote scores and lengths
    if (first < last) & (i_part * BW < last):
        b_key = key_of(b_s)
        m_key = b_s > float("-inf")
        if ROUND > 0:
            prefix, rest = _next_digit(p_bins, n_pages, top_k, ratio_q16, ROUND)
            m_key = m_key & ((b_key >> (_BITS * (_ROUNDS - ROUND))) == prefix)
            if i_part == 0:
                _remember(p_bins, prefix, rest, ROUND)
        b_digit = ((b_key >> (_BITS * (_ROUNDS - 1 - ROUND))) & (_BINS - 1)).to(tl.int32)
        # [_BINS]
        b_n = tl.histogram(b_digit, _BINS, mask=m_key)
        tl.atomic_add(p_bins + ROUND * _BINS + tl.arange(0, _BINS), b_n, mask=b_n > 0, sem="relaxed")


@triton.jit(do_not_specialize=_VARYING)
def count_kernel(
    p_scores, p_seq_lens, p_bins, s_row, s_lane, s_page, s_bins, W, bos, eos, top_k, ratio_q16, full_pages,
    dense_below, narrow,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """How many pages of each block are surely taken, and how many are tied with the last one."""
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_pages, first, last, o_w, b_s = _own_scores(
        p_scores, p_seq_lens, i_list, i_part, s_row, s_lane, s_page, W, bos, eos, full_pages, dense_below, narrow,
        H, LANES, PAGE, VECTORS, BW,
    )  # fmt: skip
    p_bins += i_list * s_bins
    begin(PDL)
    if (first < last) & (i_part * BW < n_pages):
        key, ties = _next_digit(p_bins, n_pages, top_k, ratio_q16, _ROUNDS)
        if i_part == 0:
            _remember(p_bins, key, ties, _ROUNDS)
        threshold = value_of(key)
        m_reserved = (o_w < n_pages) & ((o_w < first) | (o_w >= last))
        tl.store(p_bins + _COUNTS + 2 * i_part, tl.sum((m_reserved | (b_s > threshold)).to(tl.int32)))
        tl.store(p_bins + _COUNTS + 2 * i_part + 1, tl.sum((b_s == threshold).to(tl.int32)))


@triton.jit(do_not_specialize=_VARYING)
def write_kernel(
    p_scores, p_seq_lens, p_table, p_bins, p_pages, p_physical, p_lengths, s_row, s_lane, s_page, s_table, s_bins,
    W, M, bos, eos, full_pages, dense_below, narrow,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr, PHYSICAL: tl.constexpr,
    BW: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each block writes what it takes behind what the blocks before it take."""
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_pages, first, last, o_w, b_s = _own_scores(
        p_scores, p_seq_lens, i_list, i_part, s_row, s_lane, s_page, W, bos, eos, full_pages, dense_below, narrow,
        H, LANES, PAGE, VECTORS, BW,
    )  # fmt: skip
    p_bins += i_list * s_bins
    p_pages += i_list * M
    begin(PDL)
    if first < last:
        o_n = tl.arange(0, BN)
        # [BN]
        m_n = o_n * BW < n_pages
        b_sure = tl.load(p_bins + _COUNTS + 2 * o_n, mask=m_n, other=0)
        b_tied = tl.load(p_bins + _COUNTS + 2 * o_n + 1, mask=m_n, other=0)
        n_sure, n_tied = tl.sum(tl.where(o_n < i_part, b_sure, 0)), tl.sum(tl.where(o_n < i_part, b_tied, 0))
        threshold = value_of(tl.load(p_bins + _STATES + 2 * _ROUNDS).to(tl.uint32, bitcast=True))
        ties = tl.load(p_bins + _STATES + 2 * _ROUNDS + 1)
        length = tl.minimum(tl.sum(b_sure) + ties, M)
        m_take, b_slot, _, _ = compacted(b_s, o_w, n_pages, first, last, threshold, ties, n_sure, n_tied)
        if PHYSICAL:
            p_table += i_list // (LANES * H) * s_table
            p_physical += i_list * M
        put(p_pages, p_physical, p_table, b_slot, o_w, m_take & (b_slot < M), PHYSICAL)
        tl.store(p_pages + o_w, -1, mask=(o_w >= length) & (o_w < M))
        if i_part == 0:
            tl.store(p_lengths + i_list, length)
            tl.store(p_bins + (_ROUNDS - 1) * _BINS + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int32))


def words_of(width: int) -> int:
    """int32 of scratch for a list of a row of at most `width` pages."""
    return _COUNTS.value + 2 * triton.cdiv(width, _BLOCK)


def launch_select_wide(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, bins: Any, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, top_k: int, ratio_q16: int, dense_below: int,
    full_pages: int, narrow: int, width: int, vectors: bool, page_table: Any = None, physical: Any = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """The lists of rows of more than `narrow` pages; arguments as for :func:`flowlib.kernels.select.launch_select`.

    Args:
        bins: scratch, int32 ``[bs, num_kv_heads * lanes, words]`` contiguous, at least :func:`words_of` words: all
            zero before the first call; each leaves the histograms zero again.
        vectors: whether scores can be read in vectors past a row's end.
    """
    lists, capacity, block, warps = lengths.numel(), pages.shape[-1], _BLOCK, _WARPS
    if lists * triton.cdiv(width, block) > _PROGRAMS:
        block, warps = _LARGE_BLOCK, _LARGE_WARPS
    blocks = triton.cdiv(width, block)
    how = dict(
        H=num_kv_heads, LANES=lanes, PAGE=page_size, VECTORS=vectors, BW=block, num_warps=warps, num_stages=1,
        **options(pdl),
    )  # fmt: skip
    words, limits = bins.shape[-1], (full_pages, dense_below, narrow)
    searched = (scores, seq_lens, bins, *scores.stride(), words, width, bos, eos, top_k, ratio_q16, *limits)
    for i_round in range(_ROUNDS.value):
        digit_kernel[(lists, blocks)](*searched, ROUND=i_round, **how)
    count_kernel[(lists, blocks)](*searched, **how)
    write_kernel[(lists, triton.cdiv(max(width, capacity), block))](
        scores, seq_lens, page_table, bins, pages, physical, lengths, *scores.stride(),
        0 if page_table is None else page_table.stride(0), words, width, capacity, bos, eos, *limits,
        PHYSICAL=physical is not None, BN=max(_FEWEST_COUNTS, triton.next_power_of_2(blocks)), **how,
    )  # fmt: skip
