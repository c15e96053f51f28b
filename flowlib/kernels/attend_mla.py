"""Split-KV softmax attention over page lists of MLA latents, which are keys and, in their first channels, values.

A program is a (list, head tile, split), as in :mod:`flowlib.kernels.attend`, but one tile of latents, loaded once,
serves both products of as many heads as fit: up to 64, where attend reads K and V for 16.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.attend import _LOW_PRECISION, _merge
from flowlib.kernels.pdl import begin, options

_MIN_SPLIT_TOKENS = 128
_PROGRAMS = 264  # a program fills a multiprocessor; two rounds of them on a large GPU
# bytes a channel -> query heads a program -> (tokens a tile, warps, pipeline stages): the largest that compile for
# latents of 576 channels without spills, on sm_80, sm_90 and sm_100; not timed yet
_TILES = {
    1: {16: (32, 4, 3), 32: (32, 8, 2)},
    2: {16: (32, 4, 3), 32: (64, 8, 2), 64: (32, 8, 2)},
    4: {16: (16, 8, 2)},
}
_LARGEST_ROW = 640  # channels, padded; tiles of longer latents are cut to 16 tokens
_MERGED_HEADS = 16  # at a time, so that merging takes no more registers than attention


@triton.jit
def attend_mla_kernel(
    p_q, p_c, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_o, p_lse, p_partial_o, p_partial_lse, p_arrived,
    qk_scale, v_scale, s_q_b, s_q_h, s_c_t, s_o_b, s_o_h, s_lse_b, s_lse_h, s_table, W, M,
    G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
    TYPE: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    EVERY: tl.constexpr, SELECTED: tl.constexpr, SPLIT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
    PHYSICAL: tl.constexpr, PDL: tl.constexpr,
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

    for o in tl.range(first, last, BT):
        o_t = o + tl.arange(0, BT)
        m_t = o_t < last
        # [BT]
        if EVERY:
            b_page = o_t // PAGE
        else:
            b_page = tl.load(p_pages + i_list * M + o_t // PAGE, mask=m_t, other=0)
        # [BT]
        if PHYSICAL:  # then no load here waits for another one
            b_physical = tl.load(p_physical + i_list * M + o_t // PAGE, mask=m_t, other=0)
        else:
            b_physical = tl.load(p_table + i_b * s_table + b_page, mask=m_t, other=0)
        b_slot = b_physical.to(tl.int64) * PAGE + o_t % PAGE
        m_t = m_t & (b_page * PAGE + o_t % PAGE < seq_len)

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
        tl.debug_barrier()  # the other warps' stores come before the count of one
        p_arrived += i_list * n_tiles + i_tile
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == n_splits - 1:
            tl.store(p_arrived, 0)
            n_heads = tl.minimum(HEADS - i_tile * BH, BH)
            for i_g in tl.range(0, n_heads, BG):
                _merge(
                    p_partial_o, p_partial_lse, p_o, p_lse, i_b, i_lane + i_tile * BH + i_g,
                    tl.minimum(n_heads - i_g, BG), n_splits, s_o_b, s_o_h, s_lse_b, s_lse_h, G, R, BR, 0, BG, BS,
                )  # fmt: skip


def head_tile(heads: int, itemsize: int) -> int:
    """Query heads of one list that one program serves; `itemsize` is that of a latent's channel in the pool."""
    return max(16, min(max(_TILES[itemsize]), triton.next_power_of_2(heads)))


def num_splits(max_selected_pages: int, page_size: int, lists: int, heads: int, itemsize: int) -> int:
    """How many programs share one list of `heads` query heads; a heuristic.

    Enough that all lists give a large GPU some 264 programs, and no split shorter than 128 tokens of the longest list;
    as few as do the same work in the same time.
    """
    tiles = max(1, -(-max_selected_pages * page_size // _MIN_SPLIT_TOKENS))
    programs = max(lists * -(-heads // head_tile(heads, itemsize)), 1)
    wanted = max(1, min(tiles, _PROGRAMS // programs))
    return -(-tiles // -(-tiles // wanted))


def launch_attend_mla(
    q: Any, k: Any, v: Any, page_table: Any, seq_lens: Any, pages: Any, lengths: Any, o: Any, lse: Any,
    partial_o: Any = None, partial_lse: Any = None, arrived: Any = None, *,
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
        arrived: int32, an element for each list and each 16 query heads of it, zero before and after; None with one
            split.
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
        q, k, page_table, seq_lens, pages, physical, lengths, o, lse, partial_o, partial_lse, arrived,
        scale * k_scale * 1.4426950408889634, v_scale,
        *q.stride()[:2], k.stride(0), *o.stride()[:2], *lse.stride(),
        page_table.stride(0), page_table.shape[1], 0 if pages is None else pages.shape[-1],
        G=group_size, LANES=lanes, PAGE=page_size, D=size, R=rank, BR=b_r, BE=b_e, TYPE=dtype, HEADS=heads,
        BH=head_block, BT=block, EVERY=every, SELECTED=selected, SPLIT=num_splits > 1,
        BG=min(_MERGED_HEADS, triton.next_power_of_2(heads)), BS=triton.next_power_of_2(num_splits),
        PHYSICAL=physical is not None, num_warps=warps, num_stages=stages, **options(pdl),
    )  # fmt: skip


def built_in_tile(heads: int, itemsize: int, rank: int, size: int) -> tuple[int, int, int, int]:
    """Query heads a program, tokens a tile, warps and stages, for latents of `size` channels, `rank` of content."""
    head_block = head_tile(heads, itemsize)
    block, warps, stages = _TILES[itemsize][head_block]
    row = _padded(rank) + (_padded(size - rank) if size > rank else 0)
    return head_block, 16 if row > _LARGEST_ROW else block, warps, stages


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
