"""Entmax attention to the few tokens of a query head that have weight: a list of them, and the sum of their values."""

from __future__ import annotations

import triton
import triton.language as tl

from flowlib.kernels.entmax_terms import powers

_VALUES = tl.constexpr(4096)  # of V that a program holds at once


@triton.jit
def list_support(
    p_support, p_weights, b_z, b_t, top, t, w, rest, beta, KIND: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """List tokens b_t with weight, and their weights; returns how many, or -1 where they are more than BS."""
    b_d = b_z - top
    # [BW]
    b_p, _ = powers((b_d - t) - rest, (b_d - w) - rest, beta, KIND)
    m_p = ~(b_p <= 0.0) & ~(b_z == float("-inf"))  # where tau is NaN, b_p is NaN of lanes without a token, too
    b_n = m_p.to(tl.int32)
    b_slot = tl.cumsum(b_n, 0) - b_n
    n_listed = tl.sum(b_n)
    n_listed = tl.where(n_listed <= BS, n_listed, -1)
    tl.store(p_support + b_slot, b_t, mask=m_p & (b_slot < n_listed))
    tl.store(p_weights + b_slot, b_p, mask=m_p & (b_slot < n_listed))
    return n_listed


@triton.jit
def _values(p_v, b_slot, m_t, s_v_t, FIRST: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, PV_TYPE: tl.constexpr):
    """fp32 ``[tokens, WIDTH]`` from column FIRST on."""
    o_v = FIRST + tl.arange(0, WIDTH)
    b_v = tl.load(p_v + b_slot[:, None] * s_v_t + o_v[None, :], mask=m_t[:, None] & (o_v < DV)[None, :], other=0.0)
    return b_v.to(PV_TYPE).to(tl.float32)


@triton.jit
def weigh_support(
    p_v, p_table, p_pages, p_physical, p_support, p_weights, n_listed, p_o, p_mass, v_scale, s_v_t,
    PAGE: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PV_TYPE: tl.constexpr,
    NORMALISED: tl.constexpr, EVERY: tl.constexpr, PHYSICAL: tl.constexpr,
):  # fmt: skip
    """Store o and mass of a query head from its list; pointers are to its own row, list and output."""
    BT: tl.constexpr = max(1, _VALUES // (2 * DV0 if DV1 > 0 else DV0))
    o_v0, o_v1 = tl.arange(0, DV0), DV0 + tl.arange(0, max(DV1, 1))
    b_mass = tl.zeros((BT,), tl.float32)
    b_o0, b_o1 = tl.zeros((BT, DV0), tl.float32), tl.zeros((BT, max(DV1, 1)), tl.float32)
    for o in tl.range(0, n_listed, BT):
        o_t = o + tl.arange(0, BT)
        m_t = o_t < n_listed
        # [BT]
        b_t = tl.load(p_support + o_t, mask=m_t, other=0)
        b_p = tl.load(p_weights + o_t, mask=m_t, other=0.0)
        if PHYSICAL:
            b_physical = tl.load(p_physical + b_t // PAGE, mask=m_t, other=0)
        else:
            b_page = b_t // PAGE
            if not EVERY:
                b_page = tl.load(p_pages + b_page, mask=m_t, other=0)
            b_physical = tl.load(p_table + b_page, mask=m_t, other=0)
        b_slot = b_physical.to(tl.int64) * PAGE + b_t % PAGE
        b_mass += b_p
        b_o0 += b_p[:, None] * _values(p_v, b_slot, m_t, s_v_t, 0, DV0, DV, PV_TYPE)
        if DV1 > 0:
            b_o1 += b_p[:, None] * _values(p_v, b_slot, m_t, s_v_t, DV0, DV1, DV, PV_TYPE)
    mass = tl.sum(b_mass)
    norm = tl.full((), v_scale, tl.float32)
    if NORMALISED:
        norm = v_scale / tl.where(mass == 0.0, 1.0, mass)
    tl.store(p_mass, mass)
    tl.store(p_o + o_v0, (tl.sum(b_o0, 0) * norm).to(p_o.dtype.element_ty), mask=o_v0 < DV)
    if DV1 > 0:
        tl.store(p_o + o_v1, (tl.sum(b_o1, 0) * norm).to(p_o.dtype.element_ty), mask=o_v1 < DV)
