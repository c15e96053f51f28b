"""Split-KV softmax attention over logical page lists: one program a (list, head tile, split); the last one merges.

The tokens of a list are one run of ``length * page_size`` positions, cut into tiles of BT tokens whatever the page
size. A head dimension is cut into two powers of two (576 = 512 + 64); heads go in tiles of 16.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.pdl import begin, options

_HEAD_TILE = 16
# bytes a value -> (tokens a tile, warps, pipeline stages); those of 1 and 2 bytes from a sweep on an H200
_TILE = {1: (128, 4, 4), 2: (64, 4, 2), 4: (32, 8, 2)}
_TILE_BYTES = 96 * 1024

_PROGRAMS = 512
MERGED_HEADS = 2
"""Query heads a program merges at least: 4 splits of 2,048 heads of 512 took 20 us on an H200 by one head, 4 by two."""
_MIN_SPLIT_TOKENS = 128

_LOW_PRECISION = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16}


@triton.jit
def _merge_part(
    p_partial_o, p_partial_lse, p_o, b_top, b_norm, m_g, n_splits,
    START: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Some columns of the merged output."""
    o_v = START + tl.arange(0, BV)
    m_v = m_g[:, None] & (o_v < DV)[None, :]
    b_o = tl.zeros((m_g.shape[0], BV), tl.float32)
    for i_s in tl.range(0, n_splits, loop_unroll_factor=max(1, min(8, 4096 // (m_g.shape[0] * BV)))):
        # [BG]
        b_w = tl.exp(tl.load(p_partial_lse + i_s, mask=m_g, other=float("-inf")) - b_top)
        # [BG, BV]
        b_o += b_w[:, None] * tl.load(p_partial_o + i_s * DV + o_v[None, :], mask=m_v, other=0.0)
    tl.store(p_o + o_v[None, :], (b_o * b_norm[:, None]).to(p_o.dtype.element_ty), mask=m_v)


@triton.jit
def _merge(
    p_partial_o, p_partial_lse, p_o, p_lse, i_b, i_hq, n_heads, n_splits, s_o_b, s_o_h, s_lse_b, s_lse_h,
    HQ: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store the attention of `n_heads` query heads from that of all splits, added in the order of the splits."""
    o_g, o_s = tl.arange(0, BG), tl.arange(0, BS)
    m_g = o_g < n_heads
    p_partial_lse += (i_b * HQ + i_hq + o_g) * n_splits
    # [BG, BS]
    b_lse = tl.load(
        p_partial_lse[:, None] + o_s[None, :], mask=m_g[:, None] & (o_s < n_splits)[None, :], other=float("-inf")
    )
    b_top = tl.max(b_lse, 1)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_total = tl.sum(tl.exp(b_lse - b_top[:, None]), 1)
    b_norm = 1.0 / tl.where(b_total == 0.0, 1.0, b_total)
    p_partial_o += ((i_b * HQ + i_hq + o_g) * n_splits * DV)[:, None]
    p_o += i_b * s_o_b + (i_hq + o_g)[:, None] * s_o_h
    _merge_part(p_partial_o, p_partial_lse, p_o, b_top, b_norm, m_g, n_splits, 0, DV, DV0)
    if DV1 > 0:
        _merge_part(p_partial_o, p_partial_lse, p_o, b_top, b_norm, m_g, n_splits, DV0, DV, DV1)
    b_lse = tl.where(b_total == 0.0, float("-inf"), b_top + tl.log(b_total))
    tl.store(p_lse + i_b * s_lse_b + (i_hq + o_g) * s_lse_h, b_lse, mask=m_g)


@triton.jit
def _list_every(p_pages, p_length, n_pages, M):
    """Write the list of all pages."""
    for o in tl.range(0, M, 128):
        o_i = o + tl.arange(0, 128)
        tl.store(p_pages + o_i, tl.where(o_i < n_pages, o_i, -1), mask=o_i < M)
    tl.store(p_length, n_pages)


@triton.jit
def attend_kernel(
    p_q, p_k, p_v, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_slopes, p_o, p_lse,
    p_partial_o, p_partial_lse, p_arrived, qk_scale, v_scale,
    s_q_b, s_q_h, s_k_t, s_k_h, s_v_t, s_v_h, s_o_b, s_o_h, s_lse_b, s_lse_h, s_table, W, M,
    H: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    QK_TYPE: tl.constexpr, PV_TYPE: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    EVERY: tl.constexpr, SELECTED: tl.constexpr, ALONGSIDE: tl.constexpr, SPLIT: tl.constexpr, BG: tl.constexpr,
    BS: tl.constexpr, PHYSICAL: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (HEADS + BH - 1) // BH
    i_list, i_tile = (tl.program_id(0) // n_tiles).to(tl.int64), tl.program_id(0) % n_tiles
    i_split, n_splits = tl.program_id(1), tl.num_programs(1)
    i_b, i_lane = i_list // (H * LANES), i_list % LANES
    i_h = (i_list // LANES) % H

    o_g = i_tile * BH + tl.arange(0, BH)
    m_g = o_g < HEADS
    o_hq = i_h * G + i_lane + o_g
    o_d0, o_d1 = tl.arange(0, D0), D0 + tl.arange(0, max(D1, 1))
    o_v0, o_v1 = tl.arange(0, DV0), DV0 + tl.arange(0, max(DV1, 1))

    if not SELECTED and not ALONGSIDE:
        begin(PDL)
    seq_len = tl.minimum(tl.load(p_seq_lens + i_b), W * PAGE)
    p_q += i_b * s_q_b + o_hq[:, None] * s_q_h
    # [BH, D0]
    b_q0 = tl.load(p_q + o_d0[None, :], mask=m_g[:, None] & (o_d0 < D)[None, :], other=0.0).to(QK_TYPE)
    if D1 > 0:
        # [BH, D1]
        b_q1 = tl.load(p_q + o_d1[None, :], mask=m_g[:, None] & (o_d1 < D)[None, :], other=0.0).to(QK_TYPE)
    if SELECTED:  # selection began after what wrote lengths and queries
        begin(PDL)
    if EVERY:
        n_pages = tl.maximum(tl.cdiv(seq_len, PAGE), 0)
        if p_pages is not None:
            if (i_split == 0) & (i_tile == 0):
                _list_every(p_pages + i_list * M, p_lengths + i_list, n_pages, M)
    else:
        n_pages = tl.maximum(tl.minimum(tl.load(p_lengths + i_list), M), 0)
    per_split = tl.cdiv(tl.cdiv(n_pages * PAGE, BT), n_splits) * BT
    first = i_split * per_split
    last = tl.minimum(first + per_split, n_pages * PAGE)

    if p_slopes is not None:
        # [BH]
        b_slope = tl.load(p_slopes + o_hq, mask=m_g, other=0.0) * 1.4426950408889634

    b_max = tl.full((BH,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BH,), tl.float32)
    b_o0 = tl.zeros((BH, DV0), tl.float32)
    b_o1 = tl.zeros((BH, max(DV1, 1)), tl.float32)

    for o in tl.range(first, last, BT):
        if WHOLE:  # [BT / PAGE] pages, each once
            o_i, o_in = o // PAGE + tl.arange(0, BT // PAGE), tl.arange(0, PAGE)[None, :]
        else:  # [BT] pages, of every token
            o_i, o_in = (o + tl.arange(0, BT)) // PAGE, ((o + tl.arange(0, BT)) % PAGE)[:, None]
        m_i = o_i * PAGE < last
        if EVERY:
            b_page = o_i
        else:
            b_page = tl.load(p_pages + i_list * M + o_i, mask=m_i, other=0)
        if PHYSICAL:  # then no load here waits for another one
            b_physical = tl.load(p_physical + i_list * M + o_i, mask=m_i, other=0)
        else:
            b_physical = tl.load(p_table + i_b * s_table + b_page, mask=m_i, other=0)
        # [BT]
        b_pos = tl.reshape(b_page[:, None] * PAGE + o_in, [BT])
        b_slot = tl.reshape(b_physical.to(tl.int64)[:, None] * PAGE + o_in, [BT])
        m_t = (o + tl.arange(0, BT) < last) & (b_pos < seq_len)

        p_kt = p_k + b_slot[:, None] * s_k_t + i_h * s_k_h
        # [BT, D0]
        b_k0 = tl.load(p_kt + o_d0[None, :], mask=m_t[:, None] & (o_d0 < D)[None, :], other=0.0).to(QK_TYPE)
        p_vt = p_v + b_slot[:, None] * s_v_t + i_h * s_v_h
        # [BT, DV0]
        b_v0 = tl.load(p_vt + o_v0[None, :], mask=m_t[:, None] & (o_v0 < DV)[None, :], other=0.0).to(PV_TYPE)
        if DV1 > 0:
            # [BT, DV1]
            b_v1 = tl.load(p_vt + o_v1[None, :], mask=m_t[:, None] & (o_v1 < DV)[None, :], other=0.0).to(PV_TYPE)
        b_s = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")
        if D1 > 0:
            # [BT, D1]
            b_k1 = tl.load(p_kt + o_d1[None, :], mask=m_t[:, None] & (o_d1 < D)[None, :], other=0.0).to(QK_TYPE)
            b_s = tl.dot(b_q1, tl.trans(b_k1), b_s, input_precision="ieee")
        b_s *= qk_scale
        if p_slopes is not None:
            b_s += b_slope[:, None] * (b_pos - (seq_len - 1)).to(tl.float32)[None, :]
        b_s = tl.where(m_t[None, :], b_s, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay = tl.exp2(b_max - b_safe)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_max = b_new
        b_p = b_p.to(PV_TYPE)

        b_o0 = tl.dot(b_p, b_v0, b_o0 * b_decay[:, None], input_precision="ieee")
        if DV1 > 0:
            b_o1 = tl.dot(b_p, b_v1, b_o1 * b_decay[:, None], input_precision="ieee")

    b_norm = v_scale / tl.where(b_sum == 0.0, 1.0, b_sum)
    b_o0 *= b_norm[:, None]
    b_o1 *= b_norm[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    m_0 = m_g[:, None] & (o_v0 < DV)[None, :]
    m_1 = m_g[:, None] & (o_v1 < DV)[None, :]
    if not SPLIT:
        p_o += i_b * s_o_b + o_hq[:, None] * s_o_h
        tl.store(p_o + o_v0[None, :], b_o0.to(p_o.dtype.element_ty), mask=m_0)
        if DV1 > 0:
            tl.store(p_o + o_v1[None, :], b_o1.to(p_o.dtype.element_ty), mask=m_1)
        tl.store(p_lse + i_b * s_lse_b + o_hq * s_lse_h, b_lse, mask=m_g)
    else:
        o_row = (i_b * (H * G) + o_hq) * n_splits + i_split
        tl.store(p_partial_o + o_row[:, None] * DV + o_v0[None, :], b_o0, mask=m_0)
        if DV1 > 0:
            tl.store(p_partial_o + o_row[:, None] * DV + o_v1[None, :], b_o1, mask=m_1)
        tl.store(p_partial_lse + o_row, b_lse, mask=m_g)
        tl.debug_barrier()  # the other warps' stores come before the count of one
        p_arrived += i_list * n_tiles + i_tile
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == n_splits - 1:
            tl.store(p_arrived, 0)
            _merge(
                p_partial_o, p_partial_lse, p_o, p_lse, i_b, i_h * G + i_lane + i_tile * BH,
                tl.minimum(HEADS - i_tile * BH, BH), n_splits, s_o_b, s_o_h, s_lse_b, s_lse_h,
                H * G, DV, DV0, DV1, BG, BS,
            )  # fmt: skip
    if ALONGSIDE:  # for whoever waits for this kernel
        begin(PDL)


def num_splits(max_selected_pages: int, page_size: int, rows: int, programs: int = _PROGRAMS) -> int:
    """How many programs share one list; a heuristic.

    Enough that ``rows`` lists (times head tiles) give a large GPU some `programs`, and no split shorter than 128 tokens
    of the longest list; as few as do the same work in the same time.
    """
    tokens = max_selected_pages * page_size
    tiles = max(1, -(-tokens // _MIN_SPLIT_TOKENS))
    wanted = max(1, min(tiles, programs // max(rows, 1)))
    return -(-tiles // -(-tiles // wanted))


def launch_attend(
    q: Any, k: Any, v: Any, page_table: Any, seq_lens: Any, pages: Any, lengths: Any, o: Any, lse: Any,
    partial_o: Any = None, partial_lse: Any = None, arrived: Any = None, *,
    num_kv_heads: int, group_size: int, lanes: int, page_size: int, scale: float, k_scale: float, v_scale: float,
    alibi_slopes: Any = None, num_splits: int = 1, physical: Any = None, selected: bool = False, every: bool = False,
    alongside: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """Attend to the tokens of every row's page list.

    Args:
        q: ``[bs, H_q, D]``; k ``[T, H_kv, D]``, v ``[T, H_kv, Dv]``: the pool's token slots. Last axes contiguous;
            fp32, bf16, fp16 or (k, v) fp8.
        page_table: int32 ``[bs, W]``, logical to physical pages; seq_lens int32 ``[bs]``, tokens.
        pages: int32 ``[bs, num_kv_heads * lanes, M]`` contiguous, logical pages; lengths int32 of its first two axes.
            ``lanes`` is 1 (one list a kv head) or ``group_size`` (one a query head).
        o: ``[bs, H_q, Dv]``, written; lse fp32 ``[bs, H_q]``, written, natural logarithm. An empty row gives 0, -inf.
        partial_o: fp32 ``[bs, H_q, num_splits, Dv]``, partial_lse fp32 ``[bs, H_q, num_splits]``, contiguous; scratch,
            None with one split.
        arrived: int32, an element for each list and each 16 query heads of it, zero before and after; None with one
            split.
        scale: factor of q . k; k_scale, v_scale: what one unit of stored k and v stands for.
        physical: int32 like pages, the physical pages of the lists; None to look them up in the page table.
        every: attend to all pages of each row: `pages` and `lengths` are written, or None.
        selected: the kernel launched just before is the selection that wrote `pages`, with the same `pdl`.
        alongside: the kernel launched just before, with the same `pdl` and ``release``, writes nothing read here.
        pdl: programmatic dependent launch (sm_90 and later).
        alibi_slopes: fp32 ``[H_q]``: adds ``slope * (position - (seq_len - 1))`` to a score.

    Slots at or past a row's length are never read, nor is anything of the lists past their lengths.
    """
    head_dim, v_head_dim, heads = k.shape[-1], v.shape[-1], group_size if lanes == 1 else 1
    d0, d1 = _cut(head_dim)
    dv0, dv1 = _cut(v_head_dim)
    qk_type, pv_type = _dot_types(q, k, v)
    itemsize = 4 if tl.float32 in (qk_type, pv_type) else k.element_size()
    block, warps, stages = _tile(d0 + d1 + dv0 + dv1, itemsize)
    attend_kernel[(q.shape[0] * num_kv_heads * lanes * triton.cdiv(heads, _HEAD_TILE), num_splits)](
        q, k, v, page_table, seq_lens, pages, physical, lengths, alibi_slopes, o, lse,
        partial_o, partial_lse, arrived, scale * k_scale * 1.4426950408889634, v_scale,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *o.stride()[:2], *lse.stride(),
        page_table.stride(0), page_table.shape[1], 0 if pages is None else pages.shape[-1],
        H=num_kv_heads, G=group_size, LANES=lanes, PAGE=page_size, D=head_dim, D0=d0, D1=d1, DV=v_head_dim, DV0=dv0,
        DV1=dv1, QK_TYPE=qk_type, PV_TYPE=pv_type, HEADS=heads, BH=_HEAD_TILE, BT=block,
        EVERY=every, SELECTED=selected, ALONGSIDE=alongside, SPLIT=num_splits > 1,
        BG=max(MERGED_HEADS, min(_HEAD_TILE, triton.next_power_of_2(heads))), BS=triton.next_power_of_2(num_splits),
        PHYSICAL=physical is not None, WHOLE=block % page_size == 0,
        num_warps=warps, num_stages=stages, **options(pdl),
    )  # fmt: skip


def _cut(size: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that cover `size`; parts of a dot have at least 16 lanes."""
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


def _dot_types(q: Any, k: Any, v: Any) -> tuple[tl.dtype, tl.dtype]:
    """Operand types of q . k and p . v: 16 bits where q and the pool are stored so (fp8 goes with q), else fp32."""
    wide = _LOW_PRECISION.get(str(q.dtype), tl.float32)
    qk_type = wide if k.dtype == q.dtype or k.element_size() == 1 else tl.float32
    if wide == tl.float32 or v.element_size() == 1:
        return qk_type, wide
    return qk_type, _LOW_PRECISION.get(str(v.dtype), tl.float32)


def _tile(lanes: int, itemsize: int) -> tuple[int, int, int]:
    """(tokens a tile, warps, stages); a tile of `lanes` K and V values a token stays within its share of memory."""
    block, warps, stages = _TILE[itemsize]
    while block > 16 and block * lanes * itemsize > _TILE_BYTES:
        block //= 2
    return block, warps, stages
