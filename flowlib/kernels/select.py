"""Page selection: the budget's best scored pages and the reserved pages of every list, ascending.

Each way to them is exact and gives the same on every run. One program holds a short row in its registers. Long rows are
shared by several programs: where a block of a row holds many times the budget, each finds the best of its block first
(:mod:`flowlib.kernels.select_blocks`), else all of them search together (:mod:`flowlib.kernels.select_wide`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.ordered import (
    EARLY_WIDTH,
    VECTOR,
    compacted,
    fill_rest,
    range_of,
    scores_of,
    threshold_of,
    write_range,
)
from flowlib.kernels.pdl import begin, options
from flowlib.kernels.select_above import counted_blocks, launch_select_above
from flowlib.kernels.select_blocks import blocks_of, launch_select_blocks
from flowlib.kernels.select_wide import launch_select_wide, words_of

_REGISTER_WIDTH = 16384  # at most 32767: two counts share an int32
_NARROW_WIDTH = 2048  # rows of at most so many pages are searched in blocks of this size, whatever the table's width
_KEYS_PER_THREAD = 32


@triton.jit
def _write_best(
    p_scores, p_pages, p_physical, p_table, s_page, n_pages, first, last, budget, M,
    PHYSICAL: tl.constexpr, VECTORS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the reserved pages and the best `budget` scored ones; returns the length of the list."""
    o_w = tl.arange(0, BW)
    b_s = scores_of(p_scores, o_w, s_page, first, last, VECTORS)
    if PHYSICAL and BW <= EARLY_WIDTH:  # all of them, so that the store does not wait for them
        b_physical = tl.load(p_table + o_w, mask=o_w < n_pages, other=0)
    m_scored = (o_w >= first) & (o_w < last)
    threshold, ties, taken = threshold_of(b_s, m_scored, last - first, budget)
    m_take, b_slot, _, _ = compacted(b_s, o_w, n_pages, first, last, threshold, ties, 0, 0)
    m_take = m_take & (b_slot < M)
    tl.store(p_pages + b_slot, o_w, mask=m_take)
    if PHYSICAL:
        if BW > EARLY_WIDTH:
            b_physical = tl.load(p_table + o_w, mask=m_take, other=0)
        tl.store(p_physical + b_slot, b_physical, mask=m_take)
    length = tl.minimum(n_pages - (last - first) + taken, M)
    fill_rest(p_pages, length, M)
    return length


@triton.jit(do_not_specialize=["W", "bos", "eos", "top_k", "ratio_q16", "full_pages", "dense_below"])
def select_kernel(
    p_scores, p_seq_lens, p_table, p_pages, p_physical, p_lengths, s_row, s_lane, s_page, s_table,
    W, M, bos, eos, top_k, ratio_q16, full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, SCORED: tl.constexpr, PHYSICAL: tl.constexpr,
    VECTORS: tl.constexpr, BW: tl.constexpr, NARROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_list = tl.program_id(0).to(tl.int64)
    i_row = i_list // LANES
    if not SCORED:
        begin(PDL)
    seq_len = tl.load(p_seq_lens + i_row // H)
    if SCORED:  # the kernel that wrote the scores began after what wrote the lengths
        begin(PDL)
    p_pages += i_list * M
    if PHYSICAL:
        p_physical += i_list * M
        p_table += i_row // H * s_table
    n_pages, first, last, whole = range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    length = tl.where(whole, n_pages, tl.minimum(n_pages, bos + eos))
    if SCORED:
        if whole:
            write_range(p_pages, p_physical, p_table, length, first, n_pages - length, M, PHYSICAL, BW)
        elif n_pages <= BW:  # launches after this one select from longer rows
            p_scores += i_row * s_row + (i_list % LANES) * s_lane
            budget = tl.maximum((n_pages.to(tl.int64) * ratio_q16) >> 16, top_k).to(tl.int32)
            if NARROW == BW:
                length = _write_best(
                    p_scores, p_pages, p_physical, p_table, s_page, n_pages, first, last, budget, M, PHYSICAL, VECTORS,
                    BW,
                )  # fmt: skip
            elif n_pages <= NARROW:
                length = _write_best(
                    p_scores, p_pages, p_physical, p_table, s_page, n_pages, first, last, budget, M, PHYSICAL, VECTORS,
                    NARROW,
                )  # fmt: skip
            else:
                length = _write_best(
                    p_scores, p_pages, p_physical, p_table, s_page, n_pages, first, last, budget, M, PHYSICAL, VECTORS,
                    BW,
                )  # fmt: skip
    else:
        write_range(p_pages, p_physical, p_table, length, first, n_pages - length, M, PHYSICAL, BW)
    tl.store(p_lengths + i_list, tl.minimum(length, M))


def _num_warps(block: int) -> int:
    """Up to 32 keys a thread, the best on an H200."""
    return min(16, max(4, block // (32 * _KEYS_PER_THREAD)))


def scratch_of(width: int, top_k: int, ratio_q16: int = 0) -> dict[str, int]:
    """int32 that a list needs of the scratch of :func:`launch_select`, by argument, over a table of at most `width`
    pages; what has no name there needs none."""
    shared = None if top_k >= width else blocks_of(width, top_k, ratio_q16)
    words = {
        "counts": counted_blocks(min(width, top_k)),
        "candidates": 0 if shared is None else shared.words,
        "bins": words_of(width) if width > max(top_k, _REGISTER_WIDTH) else 0,
    }
    return {name: n for name, n in words.items() if n}


def launch_select(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, top_k: int, ratio_q16: int, dense_below: int,
    scored: bool, full_pages: int = 0, width: int | None = None, page_table: Any = None, physical: Any = None,
    counts: Any = None, candidates: Any = None, bins: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Write the page list of every row (or of every query head of a row).

    Args:
        scores: fp32 ``[bs * num_kv_heads, lanes, width]``, any strides; only pages ``[bos, S - eos)`` are read, where
            ``S = min(ceil(seq_len / page_size), width)``. None where ``scored`` is False.
        seq_lens: int32 ``[bs]``, tokens, the query token included. 0 gives an empty list.
        pages: int32 ``[bs, num_kv_heads * lanes, M]`` contiguous, written: logical pages, ascending, then -1.
        lengths: int32 ``[bs, num_kv_heads * lanes]`` contiguous, written.
        top_k, ratio_q16: the budget is ``max(top_k, S * ratio_q16 >> 16)`` scored pages.
        full_pages, dense_below: rows of at most so many pages, or tokens, get all their pages, whatever their scores.
        scored: False selects the reserved pages alone.
        width: pages a row can have; ``scores.shape[2]`` where not given, unbounded without scores.
        page_table: int32 ``[bs, width]``, logical to physical pages, and physical: int32 like pages, written with the
            physical pages of the lists (past their lengths it is left alone); both or none.
        counts: int32 ``[bs, num_kv_heads * lanes, blocks]`` contiguous, scratch of rows that their budget covers
            (``top_k >= width``): at least :func:`flowlib.kernels.select_above.counted_blocks` blocks. None where that
            is 0; elsewhere without it each program of a list reads the whole row: the same lists, in time that grows
            with the square of the width.
        candidates: int32 ``[bs, num_kv_heads * lanes, words]`` contiguous, scratch of rows that are much longer than
            their budget: as many words as :func:`scratch_of` says. Without it they are selected from more slowly.
        bins: int32 ``[bs, num_kv_heads * lanes, words]`` contiguous, scratch of rows of more than 16,384 pages that
            their budget does not cover: at least :func:`flowlib.kernels.select_wide.words_of` words, zero before the
            first call, and left so that the next one can have them. None where no row is so long.
        pdl: programmatic dependent launch (sm_90 and later).

    Of equal scores the lower page is taken (-0.0 equals 0.0); NaN and -inf never are. Lists are cut at M entries.
    """
    if width is None:
        width = scores.shape[2] if scored else 2**30
    capacity = pages.shape[-1]
    if scored and top_k >= width > _NARROW_WIDTH:
        launch_select_above(
            scores, seq_lens, pages, lengths, num_kv_heads=num_kv_heads, lanes=lanes, page_size=page_size, bos=bos,
            eos=eos, dense_below=dense_below, full_pages=full_pages, width=width, page_table=page_table,
            physical=physical, counts=counts, pdl=pdl,
        )  # fmt: skip
        return
    wide = scored and width > _REGISTER_WIDTH
    if wide and bins is None:
        raise ValueError(f"launch_select: rows of up to {width} pages need the scratch 'bins', see scratch_of")
    shared = blocks_of(width, top_k, ratio_q16, candidates.shape[-1]) if scored and candidates is not None else None
    if shared is not None and shared.pays(lengths.numel(), held=not wide):
        launch_select_blocks(
            scores, seq_lens, pages, lengths, candidates, shared, num_kv_heads=num_kv_heads, lanes=lanes,
            page_size=page_size, bos=bos, eos=eos, top_k=top_k, ratio_q16=ratio_q16, dense_below=dense_below,
            full_pages=full_pages, vectors=_in_vectors(scores), page_table=page_table, physical=physical, pdl=pdl,
        )  # fmt: skip
        return
    block = min(_REGISTER_WIDTH, triton.next_power_of_2(max(width if scored else capacity, 32)))
    vectors = scored and _in_vectors(scores)
    strides = scores.stride() if scored else (0, 0, 0)
    select_kernel[(lengths.numel(),)](
        scores if scored else None, seq_lens, page_table, pages, physical, lengths, *strides,
        0 if page_table is None else page_table.stride(0), width, capacity, bos, eos, top_k, ratio_q16,
        full_pages, dense_below,
        H=num_kv_heads, LANES=lanes, PAGE=page_size, SCORED=scored, PHYSICAL=physical is not None, VECTORS=vectors,
        BW=block, NARROW=min(block, _NARROW_WIDTH), num_warps=_num_warps(block), num_stages=1, **options(pdl),
    )  # fmt: skip
    if wide:
        launch_select_wide(
            scores, seq_lens, pages, lengths, bins, num_kv_heads=num_kv_heads, lanes=lanes, page_size=page_size,
            bos=bos, eos=eos, top_k=top_k, ratio_q16=ratio_q16, dense_below=dense_below, full_pages=full_pages,
            narrow=block, width=width, vectors=vectors, page_table=page_table, physical=physical, pdl=pdl,
        )  # fmt: skip


def _in_vectors(scores: Any) -> bool:
    """Whether every row starts at a multiple of a vector and can be read up to the next one past its end."""
    vector, (rows, lanes, width) = VECTOR.value, scores.shape
    s_row, s_lane, s_page = scores.stride()
    aligned = s_page == 1 and s_row % vector == 0 and (lanes == 1 or s_lane % vector == 0)
    end = scores.storage_offset() + (rows - 1) * s_row + (lanes - 1) * s_lane + -(-width // vector) * vector
    return aligned and end * scores.element_size() <= scores.untyped_storage().nbytes()
