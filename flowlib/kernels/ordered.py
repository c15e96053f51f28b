"""What selection kernels share: a row's pages, its scores as keys that order as they do, the score that the budget's
best exceed, and the places of a list.

That score is found by counting the scores above values between two bounds, first as numbers, then as integers that
order as they do.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = tl.constexpr(16)
FILL_BLOCK = tl.constexpr(128)
EARLY_WIDTH = tl.constexpr(2048)  # of rows whose physical pages a program loads before it knows which it takes
_SEGMENT = tl.constexpr(32)
_VALUE_ROUNDS = tl.constexpr(32)


@triton.jit
def range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE: tl.constexpr):
    """(pages of a row, the range [first, last) that their scores decide on, whether all are taken: there is none)."""
    n_pages = tl.maximum(tl.minimum((seq_len + PAGE - 1) // PAGE, W), 0)
    last = n_pages - eos
    whole = (bos >= last) | (n_pages <= full_pages) | (seq_len <= dense_below)
    return n_pages, bos, last, whole


@triton.jit
def key_of(b_s):
    """A uint32 that orders as the fp32 value does; -0.0 is 0.0."""
    b_i = tl.where(b_s == 0.0, 0.0, b_s).to(tl.int32, bitcast=True)
    b_i = tl.where(b_i < 0, b_i ^ 0x7FFFFFFF, b_i)
    return b_i.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of(b_key):
    """The fp32 value of a key; NaN of the largest."""
    b_i = (b_key ^ 0x80000000).to(tl.int32, bitcast=True)
    return tl.where(b_i < 0, b_i ^ 0x7FFFFFFF, b_i).to(tl.float32, bitcast=True)


@triton.jit
def scores_of(p_scores, o_w, s_page, first, last, VECTORS: tl.constexpr):
    """Scores; -inf for NaN and for pages outside [first, last)."""
    m_scored = (o_w >= first) & (o_w < last)
    # [BW]
    if VECTORS:  # what lies between the row's last page and the next multiple of a vector can be read
        b_s = tl.load(p_scores + o_w, mask=o_w < tl.cdiv(last, VECTOR) * VECTOR, other=float("-inf"))
    else:
        b_s = tl.load(p_scores + o_w.to(tl.int64) * s_page, mask=m_scored, other=float("-inf"))
    return tl.where(m_scored & (b_s == b_s), b_s, float("-inf"))


@triton.jit
def keys_of(p_scores, o_w, s_page, first, last):
    """uint32 keys that order as the scores do; 0 where nothing can be selected."""
    b_s = scores_of(p_scores, o_w, s_page, first, last, False)
    return tl.where(b_s > float("-inf"), key_of(b_s), 0)


@triton.jit
def put(p_pages, p_physical, p_table, o_slot, o_page, m_put, PHYSICAL: tl.constexpr):
    """Store logical pages, and the physical pages they are."""
    tl.store(p_pages + o_slot, o_page, mask=m_put)
    if PHYSICAL:
        tl.store(p_physical + o_slot, tl.load(p_table + o_page, mask=m_put, other=0), mask=m_put)


@triton.jit
def sum_before(b_x):
    """Sum of the values before each one: within segments, then over segments, which takes few steps between threads."""
    if b_x.shape[0] <= _SEGMENT * _SEGMENT:
        b_before = tl.cumsum(b_x, 0) - b_x
    else:
        # [segments, _SEGMENT]
        b_rows = tl.reshape(b_x, [b_x.shape[0] // _SEGMENT, _SEGMENT])
        b_total = tl.sum(b_rows, 1)
        b_rows = tl.cumsum(b_rows, 1) - b_rows + (tl.cumsum(b_total, 0) - b_total)[:, None]
        b_before = tl.reshape(b_rows, [b_x.shape[0]])
    return b_before


@triton.jit
def compacted(b_s, o_w, n_pages, first, last, threshold, ties, n_sure, n_tied):
    """(mask of the chosen pages of one block, their slots, masks of the sure and the tied ones)."""
    m_sure = ((o_w < n_pages) & ((o_w < first) | (o_w >= last))) | (b_s > threshold)
    m_tied = b_s == threshold
    b_both = m_sure.to(tl.int32) + (m_tied.to(tl.int32) << 16)
    b_before = sum_before(b_both)
    b_sure = n_sure + (b_before & 0xFFFF)
    b_tied = n_tied + (b_before >> 16)
    return m_sure | (m_tied & (b_tied < ties)), b_sure + tl.minimum(b_tied, ties), m_sure, m_tied


@triton.jit
def fill_rest(p_pages, length, M):
    """-1 past the list."""
    for o in tl.range(length // FILL_BLOCK * FILL_BLOCK, M, FILL_BLOCK):
        o_w = o + tl.arange(0, FILL_BLOCK)
        tl.store(p_pages + o_w, -1, mask=(o_w >= length) & (o_w < M))


@triton.jit
def write_range(p_pages, p_physical, p_table, length, head, gap, M, PHYSICAL: tl.constexpr, BW: tl.constexpr):
    """Write pages 0..length-1, those from `head` on moved up by `gap`, then -1."""
    for o in tl.range(0, tl.minimum(length, M), BW):
        o_w = o + tl.arange(0, BW)
        b_page = tl.where(o_w < head, o_w, o_w + gap)
        put(p_pages, p_physical, p_table, o_w, b_page, o_w < tl.minimum(length, M), PHYSICAL)
    fill_rest(p_pages, length, M)


@triton.jit
def _between(near, far):
    """A third of the way from one value to another."""
    return 0.6666667 * near + 0.33333334 * far


@triton.jit
def threshold_of(b_s, m_scored, scored, budget):
    """(threshold, scores equal to it to take, scores taken); what lies above the threshold is taken as well.

    Args:
        b_s: scores, -inf where nothing can be selected.
        m_scored: mask of the scored pages; scored: how many they are.
        budget: most scores to take.
    """
    count = scored
    low_value = tl.min(tl.where(m_scored, b_s, float("inf")))
    if low_value == float("-inf"):
        count = tl.sum((b_s > float("-inf")).to(tl.int32))
        low_value = tl.min(tl.where(b_s > float("-inf"), b_s, float("inf")))
    high_value = tl.max(b_s)
    budget = tl.minimum(count, budget)
    # `count` scores are >= low, at least the budget; `above`, fewer, are >= high (at first: > high)
    above = tl.zeros((), tl.int32)
    i_round = tl.zeros((), tl.int32)
    # two probes a round share a reduction
    first_probe = _between(low_value, high_value)
    second_probe = _between(high_value, low_value)
    while (
        (count != budget) & (first_probe > low_value) & (second_probe >= first_probe) & (second_probe < high_value)
    ) & (i_round < _VALUE_ROUNDS):
        both = tl.sum((b_s >= first_probe).to(tl.int32) + ((b_s >= second_probe).to(tl.int32) << 16))
        n_first, n_second = both & 0xFFFF, both >> 16
        low_up, high_down = n_first >= budget, n_second < budget
        above = tl.where(low_up, tl.where(high_down, n_second, above), n_first)
        count = tl.where(high_down, tl.where(low_up, n_first, count), n_second)
        low_value = tl.where(high_down, tl.where(low_up, first_probe, low_value), second_probe)
        high_value = tl.where(low_up, tl.where(high_down, second_probe, high_value), first_probe)
        first_probe = _between(low_value, high_value)
        second_probe = _between(high_value, low_value)
        i_round += 1
    low = key_of(low_value)
    span = key_of(high_value) - low + (above == 0).to(tl.uint32)
    while (count != budget) & (span > 1):
        half = span >> 1
        n = tl.sum(((b_s > float("-inf")) & (key_of(b_s) >= low + half)).to(tl.int32))
        up = n >= budget
        low = tl.where(up, low + half, low)
        span = tl.where(up, span - half, half)
        count = tl.where(up, n, count)
        above = tl.where(up, above, n)
    low = tl.where(budget > 0, low, 0xFFFFFFFF)
    return value_of(low), tl.where(count == budget, budget, budget - above), budget
