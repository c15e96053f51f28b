"""Page lists, or whole rows, as runs of tokens that are cut into tiles whatever the page size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pages_of(p_lengths, i_list, seq_len, M, PAGE: tl.constexpr, EVERY: tl.constexpr):
    """Pages of a list, or of a row."""
    if EVERY:
        n_pages = tl.maximum(tl.cdiv(seq_len, PAGE), 0)
    else:
        n_pages = tl.maximum(tl.minimum(tl.load(p_lengths + i_list), M), 0)
    return n_pages


@triton.jit
def tokens_of(
    p_pages, p_physical, p_table, o, last, n_list, n_row, PAGE: tl.constexpr, BT: tl.constexpr,
    EVERY: tl.constexpr, PHYSICAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(positions, slots) of the tokens o .. o + BT - 1 of a list, or of a row; those from `last` on are anything."""
    if WHOLE:  # [BT / PAGE] pages, each once
        o_i, o_in = o // PAGE + tl.arange(0, BT // PAGE), tl.arange(0, PAGE)[None, :]
    else:  # [BT] pages, of every token
        o_i, o_in = (o + tl.arange(0, BT)) // PAGE, ((o + tl.arange(0, BT)) % PAGE)[:, None]
    m_i = o_i * PAGE < last
    if EVERY:
        b_page = o_i
    else:
        b_page = tl.load(p_pages + n_list + o_i, mask=m_i, other=0)
    if PHYSICAL:  # then no load here waits for another one
        b_physical = tl.load(p_physical + n_list + o_i, mask=m_i, other=0)
    else:
        b_physical = tl.load(p_table + n_row + b_page, mask=m_i, other=0)
    b_pos = tl.reshape(b_page[:, None] * PAGE + o_in, [BT])
    return b_pos, tl.reshape(b_physical.to(tl.int64)[:, None] * PAGE + o_in, [BT])
