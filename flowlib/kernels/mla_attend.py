"""Attention of ragged queries over ragged keys, with its log-sum-exp: one program a (query tile, head, request).

Queries of a causal batch are the last ones of their request: query j of q sees keys ``0 .. kv - q + j``. A head
dimension is cut into two powers of two (192 = 128 + 64).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_LOG2E = 1.4426950408889634
_LOW_PRECISION = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16}
# query rows a tile -> (keys a tile, warps, stages); what spills nothing at 192 and 128 lanes. From 3 stages on the next
# keys are on their way while a tile is computed; two programs of 64 rows share a multiprocessor instead. Not timed yet.
_TILES = {16: (64, 4, 4), 64: (64, 4, 2), 128: (64, 8, 3)}
_TILES_BEFORE_SM_90 = {16: (64, 4, 3), 64: (32, 4, 3), 128: (32, 8, 3)}
_LANES = 320  # of a key and a value; with more, two stages fill the memory, on older GPUs too
_WIDE_TILES = {16: (16, 8, 2)}


@triton.jit
def _scores_of_tile(
    b_q0, b_q1, p_kt, s_k_t, s_k_d, o_n, kv_len, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    o_d0, o_d1 = tl.arange(0, D0).to(tl.int64), D0 + tl.arange(0, max(D1, 1)).to(tl.int64)
    p_row = p_kt + o_n.to(tl.int64)[None, :] * s_k_t
    m_0, m_1 = (o_d0 < D)[:, None], (o_d1 < D)[:, None]
    if MASK:
        m_0, m_1 = m_0 & (o_n < kv_len)[None, :], m_1 & (o_n < kv_len)[None, :]
    # [D0, BT]
    b_k0 = tl.load(p_row + o_d0[:, None] * s_k_d, mask=m_0, other=0.0).to(b_q0.dtype)
    b_s = tl.dot(b_q0, b_k0, input_precision="ieee")
    if D1 > 0:
        # [D1, BT]
        b_k1 = tl.load(p_row + o_d1[:, None] * s_k_d, mask=m_1, other=0.0).to(b_q0.dtype)
        b_s = tl.dot(b_q1, b_k1, b_s, input_precision="ieee")
    return b_s


@triton.jit
def _attend_tiles(
    b_q0, b_q1, b_max, b_sum, b_o0, b_o1, p_kt, p_vt, s_k_t, s_k_d, s_v_t, s_v_d, qk_scale, o_m, shift, kv_len,
    first, last, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    o_v0, o_v1 = tl.arange(0, DV0).to(tl.int64), DV0 + tl.arange(0, max(DV1, 1)).to(tl.int64)
    for o in tl.range(first, last, BT):
        o_n = o + tl.arange(0, BT)
        b_s = _scores_of_tile(b_q0, b_q1, p_kt, s_k_t, s_k_d, o_n, kv_len, D, D0, D1, MASK) * qk_scale
        m_0, m_1 = (o_v0 < DV)[None, :], (o_v1 < DV)[None, :]
        if MASK:
            m_n = (o_n < kv_len)[None, :]
            if CAUSAL:
                m_n = m_n & (o_n[None, :] <= (shift + o_m)[:, None])
            b_s = tl.where(m_n, b_s, float("-inf"))
            m_0, m_1 = m_0 & (o_n < kv_len)[:, None], m_1 & (o_n < kv_len)[:, None]
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay = tl.exp2(b_max - b_safe)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_max = b_new
        b_p = b_p.to(b_q0.dtype)
        p_row = p_vt + o_n.to(tl.int64)[:, None] * s_v_t
        # [BT, DV0]
        b_v0 = tl.load(p_row + o_v0[None, :] * s_v_d, mask=m_0, other=0.0).to(b_q0.dtype)
        b_o0 = tl.dot(b_p, b_v0, b_o0 * b_decay[:, None], input_precision="ieee")
        if DV1 > 0:
            # [BT, DV1]
            b_v1 = tl.load(p_row + o_v1[None, :] * s_v_d, mask=m_1, other=0.0).to(b_q0.dtype)
            b_o1 = tl.dot(b_p, b_v1, b_o1 * b_decay[:, None], input_precision="ieee")
    return b_max, b_sum, b_o0, b_o1


@triton.jit(
    do_not_specialize=["s_lse_t", "s_lse_h", "qk_scale"],
    do_not_specialize_on_alignment=["p_q_start", "p_kv_start", "p_lse"],
)
def attend_ragged_kernel(
    p_q, p_k, p_v, p_q_start, p_kv_start, p_o, p_lse, qk_scale,
    s_q_t, s_q_h, s_q_d, s_k_t, s_k_h, s_k_d, s_v_t, s_v_h, s_v_d, s_o_t, s_o_h, s_o_d, s_lse_t, s_lse_h,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    CAUSAL: tl.constexpr, TYPE: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # of a causal batch the longest first
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_q, i_kv = tl.load(p_q_start + i_b), tl.load(p_kv_start + i_b)
    q_len, kv_len = tl.load(p_q_start + i_b + 1) - i_q, tl.load(p_kv_start + i_b + 1) - i_kv
    i_m = i_tile * BM
    if i_m >= q_len:
        return
    o_m = i_m + tl.arange(0, BM)
    m_m = o_m < q_len
    o_d0, o_d1 = tl.arange(0, D0).to(tl.int64), D0 + tl.arange(0, max(D1, 1)).to(tl.int64)
    o_v0, o_v1 = tl.arange(0, DV0).to(tl.int64), DV0 + tl.arange(0, max(DV1, 1)).to(tl.int64)
    i_row, o_row = i_q.to(tl.int64) + i_m, tl.arange(0, BM).to(tl.int64)
    p_row = p_q + i_row * s_q_t + i_h * s_q_h + o_row[:, None] * s_q_t
    # [BM, D0]
    b_q0 = tl.load(p_row + o_d0[None, :] * s_q_d, mask=m_m[:, None] & (o_d0 < D)[None, :], other=0.0).to(TYPE)
    # [BM, D1]
    b_q1 = tl.load(p_row + o_d1[None, :] * s_q_d, mask=m_m[:, None] & (o_d1 < D)[None, :], other=0.0).to(TYPE)
    p_kt = p_k + i_kv.to(tl.int64) * s_k_t + i_h * s_k_h
    p_vt = p_v + i_kv.to(tl.int64) * s_v_t + i_h * s_v_h

    b_max = tl.full((BM,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BM,), tl.float32)
    b_o0 = tl.zeros((BM, DV0), tl.float32)
    b_o1 = tl.zeros((BM, max(DV1, 1)), tl.float32)
    shift = kv_len - q_len
    last, open_end = kv_len, kv_len
    if CAUSAL:
        last = tl.minimum(tl.maximum(shift + tl.minimum(i_m + BM, q_len), 0), kv_len)
        open_end = tl.minimum(tl.maximum(shift + i_m + 1, 0), kv_len)
    open_end = open_end // BT * BT  # up to here every row sees every key
    b_max, b_sum, b_o0, b_o1 = _attend_tiles(
        b_q0, b_q1, b_max, b_sum, b_o0, b_o1, p_kt, p_vt, s_k_t, s_k_d, s_v_t, s_v_d, qk_scale, o_m, shift, kv_len,
        0, open_end, D, D0, D1, DV, DV0, DV1, CAUSAL, False, BT,
    )  # fmt: skip
    b_max, b_sum, b_o0, b_o1 = _attend_tiles(
        b_q0, b_q1, b_max, b_sum, b_o0, b_o1, p_kt, p_vt, s_k_t, s_k_d, s_v_t, s_v_d, qk_scale, o_m, shift, kv_len,
        open_end, last, D, D0, D1, DV, DV0, DV1, CAUSAL, True, BT,
    )  # fmt: skip

    b_norm = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    p_row = p_o + i_row * s_o_t + i_h * s_o_h + o_row[:, None] * s_o_t
    b_o0 = (b_o0 * b_norm[:, None]).to(p_o.dtype.element_ty)
    tl.store(p_row + o_v0[None, :] * s_o_d, b_o0, mask=m_m[:, None] & (o_v0 < DV)[None, :])
    if DV1 > 0:
        b_o1 = (b_o1 * b_norm[:, None]).to(p_o.dtype.element_ty)
        tl.store(p_row + o_v1[None, :] * s_o_d, b_o1, mask=m_m[:, None] & (o_v1 < DV)[None, :])
    tl.store(p_lse + i_row * s_lse_t + i_h * s_lse_h + o_row * s_lse_t, b_lse, mask=m_m)


def launch_attend_ragged(
    q: Any, k: Any, v: Any, query_start_loc: Any, kv_start_loc: Any, o: Any, lse: Any, *, scale: float, causal: bool,
    max_query_len: int, tile: tuple[int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """Softmax attention of each request's queries over its keys.

    Args:
        q: ``[Tq, H, D]``; k ``[Tk, H, D]``, v ``[Tk, H, Dv]``; any strides; fp32, bf16 or fp16.
        query_start_loc, kv_start_loc: int32 ``[n + 1]``, first row of each request, and the end.
        o: ``[Tq, H, Dv]``, written; lse fp32 ``[Tq, H]``, written, natural logarithm; any strides. A query that sees
            no key gives 0, -inf.
        scale: factor of q . k, in the log-sum-exp too.
        max_query_len: queries of the longest request, at least 1.
        tile: (query rows a program, keys a tile, warps, pipeline stages) in place of the built-in ones: for benchmarks,
            which try others.
    """
    d0, d1 = _cut(q.shape[-1])
    dv0, dv1 = _cut(v.shape[-1])
    same = q.dtype == k.dtype == v.dtype
    wide = _LOW_PRECISION.get(str(q.dtype), tl.float32) if same else tl.float32
    rows, block, warps, stages = tile or built_in_tile(wide, max_query_len, q.shape[-1], v.shape[-1])
    attend_ragged_kernel[(triton.cdiv(max_query_len, rows), q.shape[1], query_start_loc.shape[0] - 1)](
        q, k, v, query_start_loc, kv_start_loc, o, lse, scale * _LOG2E,
        *q.stride(), *k.stride(), *v.stride(), *o.stride(), *lse.stride(),
        D=q.shape[-1], D0=d0, D1=d1, DV=v.shape[-1], DV0=dv0, DV1=dv1, CAUSAL=causal, TYPE=wide, BM=rows, BT=block,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def built_in_tile(wide: tl.dtype, max_query_len: int, size: int, v_size: int) -> tuple[int, int, int, int]:
    """Query rows a program, keys a tile, warps and stages: operands of dtype `wide`, keys of `size` and values of
    `v_size` channels."""
    lanes = sum(_cut(size)) + sum(_cut(v_size))
    tiles = _WIDE_TILES
    if wide != tl.float32:
        interpreted = triton.knobs.runtime.interpret
        older = not interpreted and triton.runtime.driver.active.get_current_target().arch < 90
        tiles = _TILES_BEFORE_SM_90 if older else _TILES
    rows = next((rows for rows in tiles if max_query_len <= rows), max(tiles))
    keys, warps, stages = tiles[rows]
    return rows, keys, warps, min(stages, 2) if lanes > _LANES else stages


def _cut(size: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that cover `size`; parts of a dot have at least 16 lanes."""
    first = max(16, 1 << (size.bit_length() - 1))
    rest = size - first
    return first, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
