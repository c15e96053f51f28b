"""Split-KV softmax attention over page lists of MLA latents, which are keys and, in their first channels, values.

A program is a (list, head tile, split), as in :mod:`flowlib.kernels.attend`, but one tile of latents, loaded once,
serves both products of as many heads as fit: up to 64, where attend reads K and V for 16. Splits are merged by a kernel
of its own: outputs of 512 channels and 64 heads are too much for the last program of a list alone.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.attend import _LOW_PRECISION, MERGED_HEADS, _merge
from flowlib.kernels.pdl import begin, options

_MIN_SPLIT_TOKENS = 128
_MULTIPROCESSORS = 132
_RESIDENT = {16: 2, 32: 1, 64: 1}  # programs of so many heads that a multiprocessor holds
# bytes a channel -> query heads a program -> (tokens a tile, warps, pipeline stages): the largest that compile for
# latents of 576 channels without spills, on sm_80, sm_90 and sm_100; timed with 16 and 128 heads on an H200
_TILES = {
    1: {16: (32, 4, 3), 32: (32, 8, 2)},
    2: {16: (32, 4, 3), 32: (32, 8, 3), 64: (32, 8, 3)},
    4: {16: (16, 8, 2)},
}
_STAGES_OF_SM_100 = 2  # of 64 heads: its tiles take more shared memory
_LARGEST_ROW = 640  # channels, padded; tiles of longer latents are cut to 16 tokens


@triton.jit
def _find(
    p_pages, p_physical, p_table, o_t, last, seq_len, PAGE: tl.constexpr, EVERY: tl.constexpr, PHYSICAL: tl.constexpr
):
    """Physical pages of some positions of a list, -1 where no token of the row is."""
    m_t = o_t < last
    # [BT]
    if EVERY:
        b_page = o_t // PAGE
    else:
        b_page = tl.load(p_pages + o_t // PAGE, mask=m_t, other=0)
    # [BT]
    if PHYSICAL:  # then no load here waits for another one
        b_physical = tl.load(p_physical + o_t // PAGE, mask=m_t, other=0)
    else:
        b_physical = tl.load(p_table + b_page, mask=m_t, other=0)
    return tl.where(m_t & (b_page * PAGE + o_t % PAGE < seq_len), b_physical, -1)


@triton.jit
def attend_mla_kernel(
    p_q, p_c, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_o, p_lse, p_partial_o, p_partial_lse,
    qk_scale, v_scale, s_q_b, s_q_h, s_c_t, s_o_b, s_o_h, s_lse_b, s_lse_h, s_table, W, M,
    G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
    TYPE: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    EVERY: tl.constexpr, SELECTED: tl.constexpr, SPLIT: tl.constexpr, PHYSICAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (HEADS + BH - 1) // BH
    i_list, i_tile = (tl.program_id(0) // n_tiles).to(tl.int64), tl.program_id(0) % n_tiles
    i_split, n_splits = tl.program_id(1), tl.num_programs(1)
    i_b, i_lane = i_list // LANES, i_list % LANES

    o_g = i_tile * BH + tl.arange(0, BH)
    m_g = o_g < HEADS
    o_hq = i_lane + o_g
    o_r, o_e = tl.arange(0, BR), R + tl.arange(0, max(BE, 1))
    m_r, m_e = o_r < R, o_e < D
    whole_rows: tl.constexpr = R == BR

    if not SELECTED:
        begin(PDL)
    seq_len = tl.minimum(tl.load(p_seq_lens + i_b), W * PAGE)
    p_q += i_b * s_q_b + o_hq[:, None] * s_q_h
    # [BH, BR]
    b_q = tl.load(p_q + o_r[None, :], mask=m_g[:, None] & m_r[None, :], other=0.0).to(TYPE)
    if BE > 0:
        # [BH, BE]
        b_qe = tl.load(p_q + o_e[None, :], mask=m_g[:, None] & m_e[None, :], other=0.0).to(TYPE)
    if SELECTED:  # selection began after what wrote lengths and queries
        begin(PDL)
    if EVERY:
        n_pages = tl.maximum(tl.cdiv(seq_len, PAGE), 0)
        if p_pages is not None:
            if (i_split == 0) & (i_tile == 0):
                for o in tl.range(0, M, 128):
                    o_all = o + tl.arange(0, 128)
                    tl.store(p_pages + i_list * M + o_all, tl.where(o_all < n_pages, o_all, -1), mask=o_all < M)
                tl.store(p_lengths + i_list, n_pages)
    else:
        n_pages = tl.maximum(tl.minimum(tl.load(p_lengths + i_list), M), 0)
    per_split = tl.cdiv(tl.cdiv(n_pages * PAGE, BT), n_splits) * BT
    first = i_split * per_split
    last = tl.minimum(first + per_split, n_pages * PAGE)

    b_max = tl.full((BH,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BH,), tl.float32)
    b_o = tl.zeros((BH, BR), tl.float32)

    p_list = None if EVERY else p_pages + i_list * M
    p_found = p_physical + i_list * M if PHYSICAL else None
    p_row = p_table + i_b * s_table
    # a tile's pages are found a tile earlier: latents whose address waits for another load would not be prefetched
    b_next = _find(p_list, p_found, p_row, first + tl.arange(0, BT), last, seq_len, PAGE, EVERY, PHYSICAL)
    for o in tl.range(first, last, BT):
        o_t = o + tl.arange(0, BT)
        b_slot, m_t = b_next.to(tl.int64) * PAGE + o_t % PAGE, b_next >= 0
        b_next = _find(p_list, p_found, p_row, o_t + BT, last, seq_len, PAGE, EVERY, PHYSICAL)
        p_ct = p_c + b_slot[:, None] * s_c_t
        # [BT, BR]
        if whole_rows:
            b_c = tl.load(p_ct + o_r[None, :], mask=m_t[:, None], other=0.0).to(TYPE)
        else:
            b_c = tl.load(p_ct + o_r[None, :], mask=m_t[:, None] & m_r[None, :], other=0.0).to(TYPE)
        b_s = tl.dot(b_q, tl.trans(b_c), input_precision="ieee")
        if BE > 0:
            # [BT, BE]
            b_e = tl.load(p_ct + o_e[None, :], mask=m_t[:, None] & m_e[None, :], other=0.0).to(TYPE)
            b_s = tl.dot(b_qe, tl.trans(b_e), b_s, input_precision="ieee")
        b_s = tl.where(m_t[None, :], b_s * qk_scale, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay = tl.exp2(b_max - b_safe)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_max = b_new
        b_o = tl.dot(b_p.to(TYPE), b_c, b_o * b_decay[:, None], input_precision="ieee")

    b_o *= (v_scale / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    m_o = m_g[:, None] & m_r[None, :]
    if not SPLIT:
        p_o += i_b * s_o_b + o_hq[:, None] * s_o_h
        tl.store(p_o + o_r[None, :], b_o.to(p_o.dtype.element_ty), mask=m_o)
        tl.store(p_lse + i_b * s_lse_b + o_hq * s_lse_h, b_lse, mask=m_g)
    else:
        o_row = (i_b * G + o_hq) * n_splits + i_split
        tl.store(p_partial_o + o_row[:, None] * R + o_r[None, :], b_o, mask=m_o)
        tl.store(p_partial_lse + o_row, b_lse, mask=m_g)


@triton.jit
def merge_mla_kernel(
    p_partial_o, p_partial_lse, p_o, p_lse, n_splits, s_o_b, s_o_h, s_lse_b, s_lse_h,
    G: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program merges the splits of BG query heads."""
    n_tiles: tl.constexpr = (G + BG - 1) // BG
    begin(PDL)
    i_b, i_hq = tl.program_id(0).to(tl.int64) // n_tiles, tl.program_id(0) % n_tiles * BG
    _merge(
        p_partial_o, p_partial_lse, p_o, p_lse, i_b, i_hq, tl.minimum(G - i_hq, BG), n_splits, s_o_b, s_o_h, s_lse_b,
        s_lse_h, G, R, BR, 0, BG, BS,
    )  # fmt: skip


def head_tile(heads: int, itemsize: int) -> int:
    """Query heads of one list that one program serves; `itemsize` is that of a latent's channel in the pool."""
    return max(16, min(max(_TILES[itemsize]), triton.next_power_of_2(heads)))


@functools.cache  # a plan asks for every number of rows up to its own
def num_splits(max_selected_pages: int, page_size: int, lists: int, heads: int, itemsize: int) -> int:
    """How many programs share one list of `heads` query heads; a heuristic.

    Of the numbers allowed the one with which the programs' rounds on a large GPU times the length of a program are
    least, and the smallest such. Allowed are 1, and what makes at most two rounds of programs with no split shorter
    than 128 tokens of the longest list. More rounds could end sooner by this count, which leaves out what every split
    adds: a partial output of fp32 to write and to merge, and the start of a program. On an H200 it chose the fastest
    of five numbers, or one within 2 % of it, for 2,080 tokens of 16 requests with 16 and with 128 heads,
    when splits were merged one head at a time.
    """
    tiles = max(1, -(-max_selected_pages * page_size // _MIN_SPLIT_TOKENS))
    tile = head_tile(heads, itemsize)
    programs, at_once = max(lists * -(-heads // tile), 1), _MULTIPROCESSORS * _RESIDENT[tile]
    most = min(tiles, max(1, 2 * at_once // programs))
    return min(range(1, most + 1), key=lambda n: (-(-programs * n // at_once) * -(-tiles // n), n))


def launch_attend_mla(
    q: Any, k: Any, v: Any, page_table: Any, seq_lens: Any, pages: Any, lengths: Any, o: Any, lse: Any,
    partial_o: Any = None, partial_lse: Any = None, *,
    num_kv_heads: int, group_size: int, lanes: int, page_size: int, scale: float, k_scale: float, v_scale: float,
    alibi_slopes: None = None, num_splits: int = 1, physical: Any = None, selected: bool = False, every: bool = False,
    pdl: bool = False, tile: tuple[int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """Attend to the tokens of every row's page list.

    Args:
        q: ``[bs, H_q, D]``, absorbed queries; k ``[T, 1, D]``: the latents in the pool's token slots. Last axes
            contiguous; fp32, bf16, fp16 or (k) fp8.
        v: ``[T, 1, Dv]``, the first channels of the latents: looked at for its size only.
        page_table: int32 ``[bs, W]``, logical to physical pages; seq_lens int32 ``[bs]``, tokens.
        pages: int32 ``[bs, lanes, M]`` contiguous, logical pages; lengths int32 of its first two axes. ``lanes`` is 1
            (one list for all query heads) or ``group_size`` (one a query head).
        o: ``[bs, H_q, Dv]``, written; lse fp32 ``[bs, H_q]``, written, natural logarithm. An empty row gives 0, -inf.
        partial_o: fp32 ``[bs, H_q, num_splits, Dv]``, partial_lse fp32 ``[bs, H_q, num_splits]``, contiguous; scratch,
            None with one split.
        num_kv_heads: 1; alibi_slopes None: positions are in the latents.
        scale: factor of q . k; k_scale, v_scale: what one unit of a stored latent stands for.
        physical: int32 like pages, the physical pages of the lists; None to look them up in the page table.
        every: attend to all pages of each row: `pages` and `lengths` are written, or None.
        selected: the kernel launched just before is the selection that wrote `pages`, with the same `pdl`.
        pdl: programmatic dependent launch (sm_90 and later).
        tile: (query heads a program, tokens a tile, warps, pipeline stages) in place of the built-in ones: for
            benchmarks, which try others.

    Slots at or past a row's length are never read, nor is anything of the lists past their lengths.
    """
    size, rank, heads = k.shape[-1], v.shape[-1], group_size if lanes == 1 else 1
    b_r, b_e = _padded(rank), _padded(size - rank) if size > rank else 0
    dtype = _LOW_PRECISION.get(str(q.dtype), tl.float32)
    dtype = dtype if k.dtype == q.dtype or k.element_size() == 1 else tl.float32
    itemsize = 4 if dtype == tl.float32 else k.element_size()
    head_block, block, warps, stages = tile or built_in_tile(heads, itemsize, rank, size)
    attend_mla_kernel[(q.shape[0] * num_kv_heads * lanes * triton.cdiv(heads, head_block), num_splits)](
        q, k, page_table, seq_lens, pages, physical, lengths, o, lse, partial_o, partial_lse,
        scale * k_scale * 1.4426950408889634, v_scale,
        *q.stride()[:2], k.stride(0), *o.stride()[:2], *lse.stride(),
        page_table.stride(0), page_table.shape[1], 0 if pages is None else pages.shape[-1],
        G=group_size, LANES=lanes, PAGE=page_size, D=size, R=rank, BR=b_r, BE=b_e, TYPE=dtype, HEADS=heads,
        BH=head_block, BT=block, EVERY=every, SELECTED=selected, SPLIT=num_splits > 1, PHYSICAL=physical is not None,
        num_warps=warps, num_stages=stages, **options(pdl),
    )  # fmt: skip
    if num_splits > 1:
        merge_mla_kernel[(q.shape[0] * triton.cdiv(group_size, MERGED_HEADS),)](
            partial_o, partial_lse, o, lse, num_splits, *o.stride()[:2], *lse.stride(), G=group_size, R=rank, BR=b_r,
            BG=MERGED_HEADS, BS=triton.next_power_of_2(num_splits), num_warps=4, **options(pdl),
        )  # fmt: skip


def built_in_tile(heads: int, itemsize: int, rank: int, size: int) -> tuple[int, int, int, int]:
    """Query heads a program, tokens a tile, warps and stages, for latents of `size` channels, `rank` of content."""
    head_block = head_tile(heads, itemsize)
    block, warps, stages = _TILES[itemsize][head_block]
    row = _padded(rank) + (_padded(size - rank) if size > rank else 0)
    if head_block == 64 and not triton.knobs.runtime.interpret:
        if triton.runtime.driver.active.get_current_target().arch >= 100:
            stages = _STAGES_OF_SM_100
    return head_block, 16 if row > _LARGEST_ROW else block, warps, stages


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
