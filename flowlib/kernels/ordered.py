"""What selection kernels share: a row's pages, its scores as keys that order as they do, and the places of a list."""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = tl.constexpr(16)
_SEGMENT = tl.constexpr(32)


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
