"""Page selection: the budget's best scored pages and the reserved pages of every list, ascending. One program a list.

The k-th highest score is found by bisection on the bits of an order-preserving integer key, so the result is exact and
the same on every run. Rows of up to ``_REGISTER_WIDTH`` pages stay in registers; wider ones are read in each round.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_REGISTER_WIDTH = 16384  # at most 32767: two counts share an int32
_LOOP_BLOCK = 8192
_KEYS_PER_THREAD = 32


@triton.jit
def _keys(p_scores, o_w, s_page, first, last):
    """uint32 keys that order as the scores do; 0 for pages outside [first, last), for NaN and for -inf."""
    m_scored = (o_w >= first) & (o_w < last)
    # [BW]
    b_s = tl.load(p_scores + o_w.to(tl.int64) * s_page, mask=m_scored, other=float("-inf"))
    m_scored = m_scored & (b_s > float("-inf"))
    b_i = tl.where(b_s == 0.0, 0.0, b_s).to(tl.int32, bitcast=True)
    b_i = tl.where(b_i < 0, b_i ^ 0x7FFFFFFF, b_i)
    b_key = b_i.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(m_scored, b_key, 0)


@triton.jit
def _write_range(p_pages, length, head, gap, M, BW: tl.constexpr):
    """Write pages 0..length-1, those from `head` on moved up by `gap`, then -1."""
    for o in tl.range(0, M, BW):
        o_w = o + tl.arange(0, BW)
        b_page = tl.where(o_w < head, o_w, o_w + gap)
        tl.store(p_pages + o_w, tl.where(o_w < length, b_page, -1), mask=o_w < M)


@triton.jit
def _threshold_in_registers(b_key, budget):
    """(threshold, number of keys above it, how many keys equal to it to take)."""
    budget = tl.minimum(tl.sum((b_key > 0).to(tl.int32)), budget)
    threshold = tl.zeros((), tl.uint32)
    for i_bit in tl.static_range(31, -1, -1):
        candidate = threshold | (1 << i_bit)
        threshold = tl.where(tl.sum((b_key >= candidate).to(tl.int32)) >= budget, candidate, threshold)
    return threshold, budget - tl.sum((b_key > threshold).to(tl.int32))


@triton.jit
def _threshold_in_loop(p_scores, s_page, first, last, budget, BW: tl.constexpr):
    """The same with two bits a round over rows that do not fit into registers."""
    count = tl.zeros((), tl.int32)
    for o in tl.range(0, last, BW):
        b_key = _keys(p_scores, o + tl.arange(0, BW), s_page, first, last)
        count += tl.sum((b_key > 0).to(tl.int32))
    budget = tl.minimum(count, budget)
    threshold = tl.zeros((), tl.uint32)
    for i_round in tl.static_range(15, -1, -1):
        low = threshold | (1 << 2 * i_round)
        middle = threshold | (2 << 2 * i_round)
        high = threshold | (3 << 2 * i_round)
        n_low = tl.zeros((), tl.int32)
        n_middle = tl.zeros((), tl.int32)
        n_high = tl.zeros((), tl.int32)
        for o in tl.range(0, last, BW):
            b_key = _keys(p_scores, o + tl.arange(0, BW), s_page, first, last)
            n_low += tl.sum((b_key >= low).to(tl.int32))
            n_middle += tl.sum((b_key >= middle).to(tl.int32))
            n_high += tl.sum((b_key >= high).to(tl.int32))
        threshold = tl.where(n_low >= budget, low, threshold)
        threshold = tl.where(n_middle >= budget, middle, threshold)
        threshold = tl.where(n_high >= budget, high, threshold)
    above = tl.zeros((), tl.int32)
    for o in tl.range(0, last, BW):
        b_key = _keys(p_scores, o + tl.arange(0, BW), s_page, first, last)
        above += tl.sum((b_key > threshold).to(tl.int32))
    return threshold, budget - above


@triton.jit
def _compact(p_pages, b_key, o_w, n_pages, first, last, threshold, ties, n_sure, n_tied, M):
    """Store the chosen pages of one block in ascending order; returns the two running counts."""
    m_reserved = (o_w < n_pages) & ((o_w < first) | (o_w >= last))
    m_sure = m_reserved | (b_key > threshold)
    m_tied = (b_key == threshold) & (b_key > 0)
    b_both = m_sure.to(tl.int32) + (m_tied.to(tl.int32) << 16)
    b_before = tl.cumsum(b_both, 0) - b_both
    b_sure = n_sure + (b_before & 0xFFFF)
    b_tied = n_tied + (b_before >> 16)
    b_slot = b_sure + tl.minimum(b_tied, ties)
    m_take = m_sure | (m_tied & (b_tied < ties))
    tl.store(p_pages + b_slot, o_w, mask=m_take & (b_slot < M))
    return n_sure + tl.sum(m_sure.to(tl.int32)), n_tied + tl.sum(m_tied.to(tl.int32))


@triton.jit
def _write_best(
    p_scores, p_pages, s_page, n_pages, first, last, budget, M, LOOP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the reserved pages and the best `budget` scored ones; returns the length of the list."""
    n_sure = tl.zeros((), tl.int32)
    n_tied = tl.zeros((), tl.int32)
    if LOOP:
        threshold, ties = _threshold_in_loop(p_scores, s_page, first, last, budget, BW)
        for o in tl.range(0, n_pages, BW):
            o_w = o + tl.arange(0, BW)
            b_key = _keys(p_scores, o_w, s_page, first, last)
            n_sure, n_tied = _compact(p_pages, b_key, o_w, n_pages, first, last, threshold, ties, n_sure, n_tied, M)
    else:
        o_w = tl.arange(0, BW)
        b_key = _keys(p_scores, o_w, s_page, first, last)
        threshold, ties = _threshold_in_registers(b_key, budget)
        n_sure, n_tied = _compact(p_pages, b_key, o_w, n_pages, first, last, threshold, ties, n_sure, n_tied, M)
    length = tl.minimum(n_sure + tl.minimum(n_tied, ties), M)
    for o in tl.range(0, M, BW):
        o_w = o + tl.arange(0, BW)
        tl.store(p_pages + o_w, -1, mask=(o_w >= length) & (o_w < M))
    return length


@triton.jit(do_not_specialize=["W", "bos", "eos", "top_k", "ratio_q16", "dense_below"])
def select_kernel(
    p_scores, p_seq_lens, p_pages, p_lengths, s_row, s_lane, s_page,
    W, M, bos, eos, top_k, ratio_q16, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, SCORED: tl.constexpr, LOOP: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    i_list = tl.program_id(0).to(tl.int64)
    i_row = i_list // LANES
    p_pages += i_list * M
    seq_len = tl.load(p_seq_lens + i_row // H)
    n_pages = tl.maximum(tl.minimum((seq_len + PAGE - 1) // PAGE, W), 0)
    first = bos
    last = n_pages - eos
    whole = (first >= last) | (seq_len <= dense_below)
    length = tl.where(whole, n_pages, tl.minimum(n_pages, bos + eos))
    if SCORED:
        if whole:
            _write_range(p_pages, length, first, n_pages - length, M, BW)
        else:
            p_scores += i_row * s_row + (i_list % LANES) * s_lane
            budget = tl.maximum((n_pages.to(tl.int64) * ratio_q16) >> 16, top_k).to(tl.int32)
            length = _write_best(p_scores, p_pages, s_page, n_pages, first, last, budget, M, LOOP, BW)
    else:
        _write_range(p_pages, length, first, n_pages - length, M, BW)
    tl.store(p_lengths + i_list, tl.minimum(length, M))


def _num_warps(block: int, loop: bool) -> int:
    """Up to 32 keys a thread (the best on an H200), half of that where a loop keeps more alive."""
    return 16 if loop else min(16, max(4, block // (32 * _KEYS_PER_THREAD)))


def launch_select(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, top_k: int, ratio_q16: int, dense_below: int,
    scored: bool, width: int | None = None,
) -> None:  # fmt: skip
    """Write the page list of every row (or of every query head of a row).

    Args:
        scores: fp32 ``[bs * num_kv_heads, lanes, width]``, any strides; only pages ``[bos, S - eos)`` are read, where
            ``S = min(ceil(seq_len / page_size), width)``. None where ``scored`` is False.
        seq_lens: int32 ``[bs]``, tokens, the query token included. 0 gives an empty list.
        pages: int32 ``[bs, num_kv_heads * lanes, M]`` contiguous, written: logical pages, ascending, then -1.
        lengths: int32 ``[bs, num_kv_heads * lanes]`` contiguous, written.
        top_k, ratio_q16: the budget is ``max(top_k, S * ratio_q16 >> 16)`` scored pages.
        dense_below: rows of at most this many tokens get all their pages.
        scored: False selects the reserved pages alone.
        width: pages a row can have; ``scores.shape[2]`` where not given, unbounded without scores.

    Of equal scores the lower page is taken (-0.0 equals 0.0); NaN and -inf never are. Lists are cut at M entries.
    """
    if width is None:
        width = scores.shape[2] if scored else 2**30
    capacity = pages.shape[-1]
    widest = max(width if scored else capacity, 32)
    loop = widest > _REGISTER_WIDTH
    block = _LOOP_BLOCK if loop else triton.next_power_of_2(widest)
    strides = scores.stride() if scored else (0, 0, 0)
    select_kernel[(lengths.numel(),)](
        scores if scored else None, seq_lens, pages, lengths, *strides,
        width, capacity, bos, eos, top_k, ratio_q16, dense_below,
        H=num_kv_heads, LANES=lanes, PAGE=page_size, SCORED=scored, LOOP=loop, BW=block,
        num_warps=_num_warps(block, loop), num_stages=1,
    )  # fmt: skip
