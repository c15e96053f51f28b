"""The budget's best pages of rows much longer than the budget: the best of each block of a row, then the best of those.

Whatever is among the best of a row is among the best of its block, and of equal scores the lower page is taken in both
launches, so the lists are those of one program that holds the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.ordered import (
    EARLY_WIDTH,
    FILL_BLOCK,
    VECTOR,
    compacted,
    fill_rest,
    put,
    range_of,
    scores_of,
    threshold_of,
    write_range,
)
from flowlib.kernels.pdl import begin, options

_SHORTEST = 4096  # rows of at most so many pages are one program's
_BLOCKS = (1024, 2048, 4096, 8192)
_LEAST_SAVING = 4  # times the budget that a block holds
_MOST_CANDIDATES = 16384  # that a program holds in its registers, a few words apart
_FEW_LISTS = 64  # leave multiprocessors idle where one program has a row
_FEW_KEYS, _MANY_KEYS = 8, 32  # a thread has
_WIDE = 8192  # scores that 8 warps hold
_NOTHING = tl.constexpr(-8388608)  # the bits of -inf
_VARYING = ["W", "bos", "eos", "top_k", "ratio_q16", "full_pages", "dense_below", "s_row", "s_lane", "s_list", "room"]


@dataclass(frozen=True)
class Blocks:
    """How a row is shared.

    Attributes:
        width: most pages of the row.
        block: pages of a program of the first launch; room: candidates it may find; count: such programs.
    """

    width: int
    block: int
    room: int
    count: int

    @property
    def words(self) -> int:
        """int32 of scratch for a list: scores of candidates, and their pages."""
        return 2 * self.room * self.count

    @property
    def searched(self) -> int:
        """Scores that are searched one launch after the other."""
        return self.block + self.room * self.count

    def pays(self, lists: int, held: bool) -> bool:
        """Whether it is faster for so many lists than what else there is: one program a list, if `held` in its
        registers, or a search by all of them in six launches; measured on an H200."""
        return self.searched <= self.width // 4 if lists <= _FEW_LISTS else not held


def blocks_of(width: int, top_k: int, ratio_q16: int, words: int | None = None) -> Blocks | None:
    """The blocks that leave the fewest scores to search; None for short rows, and budgets of a large part of a row.

    Args:
        width: most pages of a row.
        top_k, ratio_q16: the budget, see :func:`flowlib.kernels.select.launch_select`.
        words: of scratch for a list that there are.
    """
    if width <= _SHORTEST:
        return None
    room = triton.cdiv(max(top_k, width * ratio_q16 >> 16, 1), VECTOR.value) * VECTOR.value
    sizes = [block for block in _BLOCKS if block >= _LEAST_SAVING * room]
    found = [Blocks(width, block, room, triton.cdiv(width, block)) for block in sizes]
    found = [x for x in found if x.count * room <= _MOST_CANDIDATES and (words is None or x.words <= words)]
    return min(found, key=lambda x: (x.searched, -x.block), default=None)


@triton.jit
def _budget(n_pages, top_k, ratio_q16):
    return tl.maximum((n_pages.to(tl.int64) * ratio_q16) >> 16, top_k).to(tl.int32)


@triton.jit(do_not_specialize=_VARYING)
def best_of_blocks_kernel(
    p_scores, p_seq_lens, p_candidates, s_row, s_lane, s_page, s_list, room, W, bos, eos, top_k, ratio_q16,
    full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, VECTORS: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_list, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_list // LANES
    seq_len = tl.load(p_seq_lens + i_row // H)  # the kernel that wrote the scores began after what wrote the lengths
    begin(PDL)
    n_pages, first, last, whole = range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    if (i_part * BW < last) & ~whole:
        o_w = i_part * BW + tl.arange(0, BW)
        # [BW]
        b_s = scores_of(p_scores + i_row * s_row + i_list % LANES * s_lane, o_w, s_page, first, last, VECTORS)
        m_scored = (o_w >= first) & (o_w < last)
        scored = tl.maximum(tl.minimum(last, (i_part + 1) * BW) - tl.maximum(first, i_part * BW), 0)
        budget = tl.minimum(_budget(n_pages, top_k, ratio_q16), room)
        threshold, ties, taken = threshold_of(b_s, m_scored, scored, budget)
        m_take, b_slot, _, _ = compacted(b_s, o_w, 0, 0, 0, threshold, ties, 0, 0)
        p_candidates += i_list * s_list + i_part * room
        tl.store(p_candidates + b_slot, b_s.to(tl.int32, bitcast=True), mask=m_take)
        tl.store(p_candidates + tl.num_programs(1) * room + b_slot, o_w, mask=m_take)
        for o in tl.range(taken // FILL_BLOCK * FILL_BLOCK, room, FILL_BLOCK):
            o_c = o + tl.arange(0, FILL_BLOCK)
            tl.store(p_candidates + o_c, _NOTHING, mask=(o_c >= taken) & (o_c < room))


@triton.jit
def _write_reserved(p_pages, p_physical, p_table, n_pages, first, last, taken, M, PHYSICAL: tl.constexpr):
    """The pages before `first` and from `last` on, with room for those taken between them."""
    reserved = first + n_pages - last
    for o in tl.range(0, reserved, FILL_BLOCK):
        o_r = o + tl.arange(0, FILL_BLOCK)
        b_page = tl.where(o_r < first, o_r, last - first + o_r)
        b_slot = tl.where(o_r < first, o_r, taken + o_r)
        put(p_pages, p_physical, p_table, b_slot, b_page, (o_r < reserved) & (b_slot < M), PHYSICAL)


@triton.jit(do_not_specialize=[*_VARYING, "M", "s_table", "n_blocks"])
def best_of_candidates_kernel(
    p_candidates, p_seq_lens, p_table, p_pages, p_physical, p_lengths, s_table, s_list, n_blocks, room, W, M, bos, eos,
    top_k, ratio_q16, full_pages, dense_below,
    H: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, PHYSICAL: tl.constexpr, BLOCK: tl.constexpr,
    BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_list = tl.program_id(0).to(tl.int64)
    i_b = i_list // (LANES * H)
    seq_len = tl.load(p_seq_lens + i_b)  # as above
    p_pages += i_list * M
    if PHYSICAL:
        p_physical += i_list * M
        p_table += i_b * s_table
    n_pages, first, last, whole = range_of(seq_len, W, bos, eos, full_pages, dense_below, PAGE)
    length = n_pages
    begin(PDL)
    if whole:
        write_range(p_pages, p_physical, p_table, length, first, 0, M, PHYSICAL, BW)
    else:
        p_candidates += i_list * s_list
        o_c = tl.arange(0, BW)
        count = tl.cdiv(last, BLOCK) * room
        m_c = o_c < count
        # [BW]
        b_s = tl.load(p_candidates + o_c, mask=m_c, other=_NOTHING).to(tl.float32, bitcast=True)
        b_page = tl.load(p_candidates + n_blocks * room + o_c, mask=m_c, other=0)
        if PHYSICAL and BW <= EARLY_WIDTH:  # of all of them, so that the store does not wait for them
            b_physical = tl.load(p_table + b_page, mask=b_s > float("-inf"), other=0)
        threshold, ties, taken = threshold_of(b_s, m_c, count, _budget(n_pages, top_k, ratio_q16))
        m_take, b_slot, _, _ = compacted(b_s, o_c, 0, 0, 0, threshold, ties, 0, 0)
        b_slot += first
        m_take = m_take & (b_slot < M)
        tl.store(p_pages + b_slot, b_page, mask=m_take)
        if PHYSICAL:
            if BW > EARLY_WIDTH:
                b_physical = tl.load(p_table + b_page, mask=m_take, other=0)
            tl.store(p_physical + b_slot, b_physical, mask=m_take)
        _write_reserved(p_pages, p_physical, p_table, n_pages, first, last, taken, M, PHYSICAL)
        length = tl.minimum(first + taken + n_pages - last, M)
        fill_rest(p_pages, length, M)
    tl.store(p_lengths + i_list, tl.minimum(length, M))


def launch_select_blocks(
    scores: Any, seq_lens: Any, pages: Any, lengths: Any, candidates: Any, shared: Blocks, *,
    num_kv_heads: int, lanes: int, page_size: int, bos: int, eos: int, top_k: int, ratio_q16: int, dense_below: int,
    full_pages: int, vectors: bool, page_table: Any = None, physical: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The lists of all rows; arguments as for :func:`flowlib.kernels.select.launch_select`.

    Args:
        candidates: scratch, int32 ``[bs, num_kv_heads * lanes, words]`` contiguous, at least ``shared.words`` words.
        shared: from :func:`blocks_of` for this budget.
        vectors: whether scores can be read in vectors past a row's end.
    """
    how = dict(H=num_kv_heads, LANES=lanes, PAGE=page_size, num_stages=1, **options(pdl))
    words, limits = candidates.shape[-1], (bos, eos, top_k, ratio_q16, full_pages, dense_below)
    best_of_blocks_kernel[(lengths.numel(), shared.count)](
        scores, seq_lens, candidates, *scores.stride(), words, shared.room, shared.width, *limits, VECTORS=vectors,
        BW=shared.block, num_warps=_num_warps(shared.block, lengths.numel()), **how,
    )  # fmt: skip
    block = triton.next_power_of_2(shared.count * shared.room)
    best_of_candidates_kernel[(lengths.numel(),)](
        candidates, seq_lens, page_table, pages, physical, lengths, 0 if page_table is None else page_table.stride(0),
        words, shared.count, shared.room, shared.width, pages.shape[-1], *limits, PHYSICAL=physical is not None,
        BLOCK=shared.block, BW=block, num_warps=_num_warps(block, lengths.numel()), **how,
    )  # fmt: skip


def _num_warps(block: int, lists: int) -> int:
    if block > _WIDE:
        return 16
    return min(8, max(4, block // (32 * (_FEW_KEYS if lists <= _FEW_LISTS else _MANY_KEYS))))
