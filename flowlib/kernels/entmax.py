"""Entmax attention over logical page lists, in three launches: scores, thresholds, values.

Entmax p = max(z - tau, 0)^(1/a), a = alpha - 1 and z = a * s, has exact zeros, so V is read for few tokens. The first
kernel reads K once and stores every z and the largest of each tile, the second solves for the tau of each query head
from what is stored, and sums the values of heads with few tokens above it; the third does so for the heads that share a
program with one of many, of tiles with p > 0: its splits have one tau, so their sums add up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.attend import _cut, _dot_types, _list_every
from flowlib.kernels.entmax_tau import STATE, threshold_kernel
from flowlib.kernels.entmax_terms import powers
from flowlib.kernels.lists import pages_of, tokens_of
from flowlib.kernels.pdl import begin, options

_HEAD_TILE = 16
# bytes a value -> (tokens a tile, warps, stages of scores: pages one ahead of K, and K of two tiles under way)
_TILE = {1: (128, 4, 4), 2: (64, 4, 4), 4: (32, 8, 2)}
_NARROW = 64  # 16-bit values a token that a quarter of the warps score, and half of them weigh
_SCORE_PROGRAMS, _SCORE_TOKENS = 8192, 128  # many programs, since lists differ in length; tokens that are worth one
_VALUE_STAGES = 2
_TILE_BYTES = 48 * 1024
_COARSEST, _FINEST = 128, 16
_THRESHOLD_WARPS, _THRESHOLD_REGISTERS = 8, 224  # all there are, since few programs solve
_MANY_REGISTERS = 168  # where the assembler would spill to fit one more program on a multiprocessor
_VALUE_REGISTERS = 176  # the same for values, but of narrow heads
_REGISTER_TOKENS = 4096  # a head's tokens that stay in registers while tau is solved
_VALUE_TILES = 64
_SUPPORT = 256  # tokens with weight that the program which found them also weighs
_MERGED_VALUES = tl.constexpr(4096)  # of the splits that a program adds up at a time
_SOLVE_TILES = 2048

EXACT, CORRECTED, FIXED = 0, 1, 2
"""Where tau comes from: solved for, a few steps from an estimate, or the estimate itself."""
MODES = {"exact": EXACT, "corrected": CORRECTED, "fixed": FIXED}
_KIND = {1.5: 1, 2.0: 2}
_VARYING = ["W", "M", "s_table"]


@triton.jit(do_not_specialize=_VARYING)
def score_kernel(
    p_q, p_k, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_slopes, p_z, p_tile_max, p_a, qk_scale, a,
    s_q_b, s_q_h, s_k_t, s_k_h, s_z, s_table, W, M,
    H: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, QK_TYPE: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr,
    BT: tl.constexpr, FINEST: tl.constexpr, EVERY: tl.constexpr, SELECTED: tl.constexpr, PHYSICAL: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
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

    if not SELECTED:
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
    n_pages = pages_of(p_lengths, i_list, seq_len, M, PAGE, EVERY)
    if EVERY and p_pages is not None:
        if (i_split == 0) & (i_tile == 0):
            _list_every(p_pages + i_list * M, p_lengths + i_list, n_pages, M)
    per_split = tl.cdiv(tl.cdiv(n_pages * PAGE, BT), n_splits) * BT
    first = i_split * per_split
    last = tl.minimum(first + per_split, n_pages * PAGE)

    b_a = tl.full((BH,), a, tl.float32)
    if p_a is not None:
        # [BH]
        b_a = tl.load(p_a + o_hq, mask=m_g, other=1.0)
    if p_slopes is not None:
        # [BH]
        b_slope = tl.load(p_slopes + o_hq, mask=m_g, other=0.0) * b_a
    o_line = i_b * (H * G) + o_hq

    for o in tl.range(first, last, BT):
        b_pos, b_slot = tokens_of(
            p_pages, p_physical, p_table, o, last, i_list * M, i_b * s_table, PAGE, BT, EVERY, PHYSICAL, WHOLE
        )
        o_t = o + tl.arange(0, BT)
        m_t = (o_t < last) & (b_pos < seq_len)
        p_kt = p_k + b_slot[:, None] * s_k_t + i_h * s_k_h
        # [BT, D0]
        b_k0 = tl.load(p_kt + o_d0[None, :], mask=m_t[:, None] & (o_d0 < D)[None, :], other=0.0).to(QK_TYPE)
        b_z = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")
        if D1 > 0:
            # [BT, D1]
            b_k1 = tl.load(p_kt + o_d1[None, :], mask=m_t[:, None] & (o_d1 < D)[None, :], other=0.0).to(QK_TYPE)
            b_z = tl.dot(b_q1, tl.trans(b_k1), b_z, input_precision="ieee")
        b_z *= qk_scale * b_a[:, None]
        if p_slopes is not None:
            b_z += b_slope[:, None] * (b_pos - (seq_len - 1)).to(tl.float32)[None, :]
        b_z = tl.where(m_t[None, :], b_z, float("-inf"))
        tl.store(p_z + o_line[:, None] * s_z + o_t[None, :], b_z, mask=m_g[:, None] & (o_t < last)[None, :])
        tl.store(p_tile_max + o_line * (s_z // FINEST) + o // BT, tl.max(b_z, 1), mask=m_g)


@triton.jit
def _sum_of_splits(
    p_partial_o, p_partial_mass, p_o, p_mass, i_b, i_hq, n_heads, n_splits, v_scale, s_o_b, s_o_h, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, HQ: tl.constexpr, DV: tl.constexpr, BG: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """Store WIDTH columns of `n_heads` query heads, and their mass: those of all splits, added up many at a time."""
    BS: tl.constexpr = max(1, _MERGED_VALUES // (BG * WIDTH))
    o_g, o_s = tl.arange(0, BG), tl.arange(0, BS)
    m_g = o_g < n_heads
    o_line = (i_b * HQ + i_hq + o_g) * n_splits
    o_v = FIRST + tl.arange(0, WIDTH)
    b_masses, b_parts = tl.zeros((BG, BS), tl.float32), tl.zeros((BG, BS, WIDTH), tl.float32)
    for i_s in tl.range(0, n_splits, BS):
        # [BG, BS]
        m_s = m_g[:, None] & (i_s + o_s < n_splits)[None, :]
        o_part = o_line[:, None] + (i_s + o_s)[None, :]
        b_masses += tl.load(p_partial_mass + o_part, mask=m_s, other=0.0)
        # [BG, BS, WIDTH]
        p_part = p_partial_o + o_part[:, :, None] * DV + o_v[None, None, :]
        b_parts += tl.load(p_part, mask=m_s[:, :, None] & (o_v < DV)[None, None, :], other=0.0)
    b_mass, b_o = tl.sum(b_masses, 1), tl.sum(b_parts, 1)
    m_v = m_g[:, None] & (o_v < DV)[None, :]
    if NORMALISED:
        b_o *= (1.0 / tl.where(b_mass == 0.0, 1.0, b_mass))[:, None]
    p_o += i_b * s_o_b + (i_hq + o_g)[:, None] * s_o_h
    tl.store(p_o + o_v[None, :], (b_o * v_scale).to(p_o.dtype.element_ty), mask=m_v)
    if FIRST == 0:
        tl.store(p_mass + i_b * HQ + i_hq + o_g, b_mass, mask=m_g)


@triton.jit(do_not_specialize=_VARYING)
def value_kernel(
    p_v, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_z, p_tile_max, p_state, p_a, p_o, p_mass,
    p_partial_o, p_partial_mass, p_arrived, beta, v_scale, s_v_t, s_v_h, s_o_b, s_o_h, s_z, s_table, W, M,
    H: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PV_TYPE: tl.constexpr, HEADS: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, FINEST: tl.constexpr, KIND: tl.constexpr,
    NORMALISED: tl.constexpr, EVERY: tl.constexpr, SPLIT: tl.constexpr, BG: tl.constexpr, PHYSICAL: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (HEADS + BH - 1) // BH
    i_list, i_tile = (tl.program_id(0) // n_tiles).to(tl.int64), tl.program_id(0) % n_tiles
    i_split, n_splits = tl.program_id(1), tl.num_programs(1)
    i_b, i_lane = i_list // (H * LANES), i_list % LANES
    i_h = (i_list // LANES) % H

    o_g = i_tile * BH + tl.arange(0, BH)
    m_g = o_g < HEADS
    o_hq = i_h * G + i_lane + o_g
    o_line = i_b * (H * G) + o_hq
    begin(PDL)
    if tl.min(tl.load(p_state + o_line * STATE + 4, mask=m_g, other=0.0)) >= 0.0:  # all of these heads are done
        return
    o_v0, o_v1 = tl.arange(0, DV0), DV0 + tl.arange(0, max(DV1, 1))
    seq_len = tl.minimum(tl.load(p_seq_lens + i_b), W * PAGE)
    n_pages = pages_of(p_lengths, i_list, seq_len, M, PAGE, EVERY)
    per_split = tl.cdiv(tl.cdiv(n_pages * PAGE, BT), n_splits)
    first = i_split * per_split
    last = tl.minimum(first + per_split, tl.cdiv(n_pages * PAGE, BT))
    n_tokens = n_pages * PAGE
    # [BH]
    b_top = tl.load(p_state + o_line * STATE, mask=m_g, other=0.0)
    b_t = tl.load(p_state + o_line * STATE + 1, mask=m_g, other=float("inf"))
    b_w = tl.load(p_state + o_line * STATE + 2, mask=m_g, other=float("inf"))
    b_rest = tl.load(p_state + o_line * STATE + 3, mask=m_g, other=0.0)
    b_beta = tl.full((BH,), beta, tl.float32)
    if p_a is not None:
        b_beta = 1.0 / tl.load(p_a + o_hq, mask=m_g, other=1.0)

    b_mass = tl.zeros((BH,), tl.float32)
    b_o0 = tl.zeros((BH, DV0), tl.float32)
    b_o1 = tl.zeros((BH, max(DV1, 1)), tl.float32)
    o_n = tl.arange(0, BN)
    for o_tile in tl.range(first, last, BN):
        # [BH, BN]
        m_n = m_g[:, None] & (o_tile + o_n < last)[None, :]
        b_max = tl.load(
            p_tile_max + (o_line * (s_z // FINEST))[:, None] + (o_tile + o_n)[None, :], mask=m_n, other=float("-inf")
        )
        m_n = m_n & ~(((b_max - b_top[:, None]) - b_t[:, None]) - b_rest[:, None] <= 0.0)
        m_any = tl.max(m_n.to(tl.int32), 0) > 0
        i_n = tl.min(tl.where(m_any, o_n, BN))
        while i_n < BN:
            o = (o_tile + i_n) * BT
            i_n = tl.min(tl.where(m_any & (o_n > i_n), o_n, BN))
            _, b_slot = tokens_of(
                p_pages, p_physical, p_table, o, n_tokens, i_list * M, i_b * s_table, PAGE, BT, EVERY, PHYSICAL, WHOLE
            )
            o_t = o + tl.arange(0, BT)
            # [BH, BT]
            b_z = tl.load(
                p_z + o_line[:, None] * s_z + o_t[None, :], mask=m_g[:, None] & (o_t < n_tokens)[None, :],
                other=float("-inf"),
            )  # fmt: skip
            b_d = b_z - b_top[:, None]
            b_p, _ = powers(
                (b_d - b_t[:, None]) - b_rest[:, None], (b_d - b_w[:, None]) - b_rest[:, None], b_beta[:, None], KIND
            )
            b_mass += tl.sum(b_p, 1)
            m_t = tl.max((~(b_p <= 0.0)).to(tl.int32), 0) > 0
            b_p = b_p.to(PV_TYPE)
            p_vt = p_v + b_slot[:, None] * s_v_t + i_h * s_v_h
            # [BT, DV0]
            b_v0 = tl.load(p_vt + o_v0[None, :], mask=m_t[:, None] & (o_v0 < DV)[None, :], other=0.0).to(PV_TYPE)
            b_o0 = tl.dot(b_p, b_v0, b_o0, input_precision="ieee")
            if DV1 > 0:
                # [BT, DV1]
                b_v1 = tl.load(p_vt + o_v1[None, :], mask=m_t[:, None] & (o_v1 < DV)[None, :], other=0.0).to(PV_TYPE)
                b_o1 = tl.dot(b_p, b_v1, b_o1, input_precision="ieee")

    m_0 = m_g[:, None] & (o_v0 < DV)[None, :]
    m_1 = m_g[:, None] & (o_v1 < DV)[None, :]
    if not SPLIT:
        b_norm = tl.full((BH,), v_scale, tl.float32)
        if NORMALISED:
            b_norm = v_scale / tl.where(b_mass == 0.0, 1.0, b_mass)
        p_o += i_b * s_o_b + o_hq[:, None] * s_o_h
        tl.store(p_o + o_v0[None, :], (b_o0 * b_norm[:, None]).to(p_o.dtype.element_ty), mask=m_0)
        if DV1 > 0:
            tl.store(p_o + o_v1[None, :], (b_o1 * b_norm[:, None]).to(p_o.dtype.element_ty), mask=m_1)
        tl.store(p_mass + o_line, b_mass, mask=m_g)
    else:
        o_row = o_line * n_splits + i_split
        tl.store(p_partial_o + o_row[:, None] * DV + o_v0[None, :], b_o0, mask=m_0)
        if DV1 > 0:
            tl.store(p_partial_o + o_row[:, None] * DV + o_v1[None, :], b_o1, mask=m_1)
        tl.store(p_partial_mass + o_row, b_mass, mask=m_g)
        tl.debug_barrier()  # the other warps' stores come before the count of one
        p_arrived += i_list * n_tiles + i_tile
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == n_splits - 1:
            tl.store(p_arrived, 0)
            i_hq, n_heads = i_h * G + i_lane + i_tile * BH, tl.minimum(HEADS - i_tile * BH, BH)
            _sum_of_splits(
                p_partial_o, p_partial_mass, p_o, p_mass, i_b, i_hq, n_heads, n_splits, v_scale, s_o_b, s_o_h,
                0, DV0, H * G, DV, BG, NORMALISED,
            )  # fmt: skip
            if DV1 > 0:
                _sum_of_splits(
                    p_partial_o, p_partial_mass, p_o, p_mass, i_b, i_hq, n_heads, n_splits, v_scale, s_o_b, s_o_h,
                    DV0, DV1, H * G, DV, BG, NORMALISED,
                )  # fmt: skip


def capacity(max_selected_pages: int, page_size: int) -> int:
    """Tokens of a head's stored scores: those of its longest list, in whole tiles."""
    return triton.cdiv(max_selected_pages * page_size, _COARSEST) * _COARSEST


def workspace(heads: int, max_selected_pages: int, page_size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes for one row, and dtypes, of the scratch of :func:`launch_entmax`, by the name of its argument."""
    tokens = capacity(max_selected_pages, page_size)
    scratch: dict[str, tuple[tuple[int, ...], str]] = {
        "z": ((heads, tokens), "float32"),
        "tile_max": ((heads, tokens // _FINEST), "float32"),
        "state": ((heads, STATE.value), "float32"),
        "support": ((heads, _SUPPORT), "int32"),
        "weights": ((heads, _SUPPORT), "float32"),
    }
    if tokens > _REGISTER_TOKENS:
        scratch["active"] = ((heads, tokens // _FINEST), "int32")
    return scratch


def launch_entmax(
    q: Any, k: Any, v: Any, page_table: Any, seq_lens: Any, pages: Any, lengths: Any, o: Any, tau: Any, mass: Any,
    z: Any, tile_max: Any, state: Any, support: Any, weights: Any, active: Any = None, partial_o: Any = None,
    partial_mass: Any = None, arrived: Any = None, *,
    num_kv_heads: int, group_size: int, lanes: int, page_size: int, scale: float, k_scale: float, v_scale: float,
    alpha: float, a_of_head: Any = None, mode: str = "exact", steps: int = 0, estimate: Any = None,
    exact_pages: int = 0, exact_tokens: int = 0, bounds: Any = None, certified: Any = None, bos: int = 0, eos: int = 1,
    alibi_slopes: Any = None, num_splits: int = 1, physical: Any = None, selected: bool = False, every: bool = False,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Entmax attention over the tokens of every row's page list.

    Arguments not named here are those of :func:`flowlib.kernels.attend.launch_attend`; `num_splits` cuts the values.
    With `every` the page table finds the pages.

    Args:
        o: ``[bs, H_q, Dv]``, written; an empty row gives 0.
        tau: fp32 ``[bs, H_q]`` contiguous, written: the threshold of (alpha - 1) * s; -inf for an empty row.
        mass: fp32 ``[bs, H_q]`` contiguous, written: the sum of the probabilities as tau gives them.
        z, tile_max, state, support, weights, active: scratch, contiguous ``[bs, ...]``, see :func:`workspace`.
        partial_o: fp32 ``[bs, H_q, num_splits, Dv]``, partial_mass fp32 ``[bs, H_q, num_splits]``; scratch, None with
            one split. arrived as there.
        alpha: above 1, at most 2; 1.5 and 2 take no logarithms.
        a_of_head: fp32 ``[H_q]``, alpha - 1 of each query head in place of `alpha`.
        mode: "exact" solves for tau; "corrected" takes `steps` steps from the estimate, kept inside the bracket that
            holds tau, and divides by the mass; "fixed" takes the estimate as it is and does not divide. A step
            over a list of more than 4,096 tokens leaves tiles out that cannot hold mass at tau, even where an estimate
            below it would give them some, so that it is another step.
        estimate: fp32 ``[bs, H_q]`` contiguous, a tau; None in mode "exact".
        exact_pages, exact_tokens: rows of at most so many pages or tokens have no estimate and are exact in every mode.
        bounds: fp32 ``[bs * num_kv_heads, group_size or 1, width]``, any strides: bounds of the scores in each page,
            read at the scored pages ``[bos, S - eos)``.
        certified: int8 ``[bs, H_q]`` contiguous, written where `bounds` are given: 1 where no scored page outside of
            the list can hold mass, so that o is the attention over the whole row.
    """
    head_dim, v_head_dim, heads = k.shape[-1], v.shape[-1], group_size if lanes == 1 else 1
    qk_type, pv_type = _dot_types(q, k, v)
    itemsize = 4 if tl.float32 in (qk_type, pv_type) else k.element_size()
    d0, d1 = _cut(head_dim)
    dv0, dv1 = _cut(v_head_dim)
    block, warps, stages = _block(max(d0 + d1, dv0 + dv1), itemsize)
    a = 1.0 if a_of_head is not None else alpha - 1.0
    kind = 0 if a_of_head is not None else _KIND.get(float(alpha), 0)
    many = kind == 0 or d1 > 0 or dv1 > 0 or itemsize == 4
    launch = {**options(pdl), **({"maxnreg": _MANY_REGISTERS} if many else {})}
    programs = q.shape[0] * num_kv_heads * lanes * triton.cdiv(heads, _HEAD_TILE)
    tokens, columns, longest = z.shape[-1], page_table.shape[1], 0 if pages is None else pages.shape[-1]
    strides = (0, 0, 0) if bounds is None else bounds.stride()
    if bounds is not None and bounds.shape[1] == 1:
        strides = (strides[0], 0, strides[2])
    narrow = itemsize == 2 and max(d0 + d1, dv0 + dv1) <= _NARROW
    capped = {"maxnreg": _MANY_REGISTERS if narrow else _VALUE_REGISTERS} if many or narrow else {}
    common = {
        "H": num_kv_heads, "G": group_size, "LANES": lanes, "PAGE": page_size, "BT": block, "FINEST": _FINEST,
        "EVERY": every, **launch,
    }  # fmt: skip
    score_splits = max(1, min(triton.cdiv(tokens, _SCORE_TOKENS), _SCORE_PROGRAMS // max(programs, 1)))
    physical = None if every else physical
    score_kernel[(programs, score_splits)](
        q, k, page_table, seq_lens, pages, physical, lengths, alibi_slopes, z, tile_max, a_of_head, scale * k_scale, a,
        *q.stride()[:2], *k.stride()[:2], tokens, page_table.stride(0), columns, longest,
        D=head_dim, D0=d0, D1=d1, QK_TYPE=qk_type, HEADS=heads, BH=_HEAD_TILE, SELECTED=selected,
        PHYSICAL=physical is not None, WHOLE=block % page_size == 0, num_warps=warps // 4 if narrow else warps,
        num_stages=stages, **common,
    )  # fmt: skip
    threshold_kernel[(tau.numel(),)](
        v, page_table, seq_lens, pages, physical, lengths, z, tile_max, active, support, weights, state, tau, estimate,
        bounds, certified, a_of_head, o, mass, a, 1.0 / a, steps if mode == "corrected" else 0, v_scale,
        *v.stride()[:2], *o.stride()[:2], tokens, *strides, page_table.stride(0), columns, longest, bos, eos,
        exact_pages, exact_tokens, DV=v_head_dim, DV0=dv0, DV1=dv1, PV_TYPE=pv_type,
        BW=min(_REGISTER_TOKENS, triton.next_power_of_2(tokens)), LOOP=tokens > _REGISTER_TOKENS,
        BN=min(_SOLVE_TILES, triton.next_power_of_2(tokens // block)), BS=support.shape[-1], KIND=kind,
        MODE=MODES[mode], NORMALISED=mode != "fixed", PHYSICAL=physical is not None, num_warps=_THRESHOLD_WARPS,
        num_stages=1, **common | {"maxnreg": _THRESHOLD_REGISTERS},
    )  # fmt: skip
    value_kernel[(programs, num_splits)](
        v, page_table, seq_lens, pages, physical, lengths, z, tile_max, state, a_of_head, o, mass,
        partial_o, partial_mass, arrived, 1.0 / a, v_scale, *v.stride()[:2], *o.stride()[:2], tokens,
        page_table.stride(0), columns, longest,
        DV=v_head_dim, DV0=dv0, DV1=dv1, PV_TYPE=pv_type, HEADS=heads, BH=_HEAD_TILE,
        BN=min(_VALUE_TILES, triton.next_power_of_2(tokens // block)), KIND=kind, NORMALISED=mode != "fixed",
        SPLIT=num_splits > 1, BG=min(_HEAD_TILE, triton.next_power_of_2(heads)), PHYSICAL=physical is not None,
        WHOLE=block % page_size == 0, num_warps=warps // 2 if narrow else warps, num_stages=_VALUE_STAGES,
        **common | capped,
    )  # fmt: skip


def _block(lanes: int, itemsize: int) -> tuple[int, int, int]:
    """(tokens a tile, warps, stages); a tile of `lanes` values a token stays within its share of memory."""
    block, warps, stages = _TILE[itemsize]
    while block > _FINEST and block * lanes * itemsize > _TILE_BYTES:
        block //= 2
    return block, warps, stages
