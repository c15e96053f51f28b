"""The threshold of entmax over stored scores, one program a row of scores, and attention where few tokens exceed it.

tau is found by Newton steps on the (1/a)-norm of max(z - tau, 0), which is convex in tau and almost linear: from
max z - 1, where it is at least 1, steps never pass the root, and about five suffice. A threshold is kept as its
distance from max z in two forms, t and w = t + 1, which keep their digits near 0 and near -1, and a last step too small
for either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flowlib.kernels.entmax_support import list_support, weigh_support
from flowlib.kernels.entmax_terms import powers
from flowlib.kernels.lists import pages_of
from flowlib.kernels.pdl import begin

_LOOP_TOKENS = tl.constexpr(2048)
_PAGES = tl.constexpr(1024)
_NEWTON_STEPS = tl.constexpr(12)
_STEPS = tl.constexpr(64)
_TOLERANCE = tl.constexpr(1e-6)
_TILE_STEPS = tl.constexpr(6)
_CLOSE = tl.constexpr(2.0**-4)  # the step after it is some 2^-8
_ROUNDED = tl.constexpr(2.0**-19)
_ENOUGH = tl.constexpr(1.0 - 64 * 2.0**-23)
STATE = tl.constexpr(8)
"""Room for the numbers kept of a row: max z, t, w, the last step, and how many tokens were listed and weighed (-1: none
was)."""


@triton.jit
def _terms(b_z, top, t, w, beta, KIND: tl.constexpr):
    """The powers of z - tau, of tokens whose z is -inf where they do not count."""
    b_d = b_z - top
    return powers(b_d - t, b_d - w, beta, KIND)


@triton.jit
def _sums_in_loop(
    p_z, p_active, n_active, n_tokens, top, t, w, beta, KIND: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr
):
    """Both sums over the tiles listed."""
    b_total, b_slope = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
    for o in tl.range(0, n_active * BT, BW):
        o_w = o + tl.arange(0, BW)
        m_w = o_w < n_active * BT
        # [BW]
        o_t = tl.load(p_active + o_w // BT, mask=m_w, other=0) * BT + o_w % BT
        b_z = tl.load(p_z + o_t, mask=m_w & (o_t < n_tokens), other=float("-inf"))
        b_p, b_s = _terms(b_z, top, t, w, beta, KIND)
        b_total += b_p
        b_slope += b_s
    return tl.sum(b_total), tl.sum(b_slope)


@triton.jit
def _newton(total, slope, a, KIND: tl.constexpr):
    """The step to the root of the norm's tangent."""
    slope = tl.where(slope == 0.0, 1.0, slope)
    if KIND == 2:
        step = (total - 1.0) / slope
    elif KIND == 1:
        step = (total - tl.sqrt_rn(total)) / slope
    else:
        step = total * (1.0 - tl.exp2(-a * tl.log2(tl.where(total == 0.0, 1.0, total)))) / slope
    return step


@triton.jit
def _advance(total, slope, a, t, w, low_t, low_w, high_t, high_w, i, n_steps, KIND: tl.constexpr):
    """The next threshold to try, the bracket, and whether it is worth trying."""
    step = _newton(total, slope, a, KIND)
    above = total >= 1.0
    low_t, low_w = tl.where(above, t, low_t), tl.where(above, w, low_w)
    high_t, high_w = tl.where(above, high_t, t), tl.where(above, high_w, w)
    next_t, next_w = t + step, w + step
    next_t, next_w = tl.where(next_t < low_t, low_t, next_t), tl.where(next_t < low_t, low_w, next_w)
    next_w, next_t = tl.where(next_t > high_t, high_w, next_w), tl.where(next_t > high_t, high_t, next_t)
    halve = (i >= _NEWTON_STEPS) & (i % 2 == 1)
    next_t = tl.where(halve, 0.5 * (low_t + high_t), next_t)
    next_w = tl.where(halve, 0.5 * (low_w + high_w), next_w)
    going = (i + 1 < n_steps) & (tl.abs(step) > _TOLERANCE * tl.abs(t))
    return next_t, next_w, low_t, low_w, high_t, high_w, going


@triton.jit
def _sums(
    b_z, p_z, p_active, n_active, n_tokens, top, t, w, beta,
    KIND: tl.constexpr, LOOP: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """(sum of x^beta, sum of x^(beta - 1)) over a row, which is `b_z` or lies in memory."""
    if LOOP:
        total, slope = _sums_in_loop(p_z, p_active, n_active, n_tokens, top, t, w, beta, KIND, BT, BW)
    else:
        b_p, b_s = _terms(b_z, top, t, w, beta, KIND)
        total, slope = tl.sum(b_p), tl.sum(b_s)
    return total, slope


@triton.jit
def _iterate(
    b_z, p_z, p_active, n_active, n_tokens, top, t, w, high_t, high_w, a, beta, n_steps, exact,
    KIND: tl.constexpr, MODE: tl.constexpr, CHECK: tl.constexpr, LOOP: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """(t, w, a last step, whether the mass is 1 there) of one row, from a first t and w inside the bracket.

    Where it ends, the last step of an exact row is taken apart from t.
    """
    low_t, low_w = tl.full((), -1.0, tl.float32), tl.zeros((), tl.float32)
    total, slope = tl.full((), 1.0, tl.float32), tl.full((), 1.0, tl.float32)
    i = tl.zeros((), tl.int32)
    going = i < n_steps
    while going:
        total, slope = _sums(b_z, p_z, p_active, n_active, n_tokens, top, t, w, beta, KIND, LOOP, BT, BW)
        next_t, next_w, low_t, low_w, high_t, high_w, going = _advance(
            total, slope, a, t, w, low_t, low_w, high_t, high_w, i, n_steps, KIND
        )
        if MODE == 0:
            t, w = tl.where(going, next_t, t), tl.where(going, next_w, w)
        else:
            t, w = tl.where(going | ~exact, next_t, t), tl.where(going | ~exact, next_w, w)
        i += 1
    rest = a * (total - 1.0) / slope
    enough = total >= 0.5  # the last step mends what is missing; NaN certifies nothing
    if MODE > 0:
        rest = tl.where(exact, rest, 0.0)
        if CHECK:
            total, slope = _sums(b_z, p_z, p_active, n_active, n_tokens, top, t, w, beta, KIND, LOOP, BT, BW)
            enough = (exact & enough) | (total >= _ENOUGH)
    return t, w, rest, enough


@triton.jit
def _tile_maxima(p_tile_max, o_n, n_tiles):
    """Of some tiles; -inf for those that are not there, or hold nothing but NaN."""
    b_max = tl.load(p_tile_max + o_n, mask=o_n < n_tiles, other=float("-inf"))
    return tl.where(b_max > float("-inf"), b_max, float("-inf"))


@triton.jit
def _below(p_tile_max, b_first, n_tiles, top, a, beta, KIND: tl.constexpr, BN: tl.constexpr):
    """(t, w) of a threshold that is not too high, but for rounding: steps towards that of the largest z of each tile,
    which more tokens can only raise. `b_first` are the first BN of them."""
    t, w = tl.full((), -1.0, tl.float32), tl.zeros((), tl.float32)
    i = tl.zeros((), tl.int32)
    going = i < _TILE_STEPS
    while going:
        b_total, b_slope = _terms(b_first, top, t, w, beta, KIND)
        for o in tl.range(BN, n_tiles, BN):
            # [BN]
            b_p, b_s = _terms(_tile_maxima(p_tile_max, o + tl.arange(0, BN), n_tiles), top, t, w, beta, KIND)
            b_total += b_p
            b_slope += b_s
        step = tl.maximum(_newton(tl.sum(b_total), tl.sum(b_slope), a, KIND), 0.0)
        t, w = t + step, w + step
        i += 1
        going = (i < _TILE_STEPS) & (step > _CLOSE)
    return t, w


@triton.jit
def _active_tiles(p_tile_max, p_active, n_tiles, top, t, BN: tl.constexpr):
    """List the tiles that may hold mass, those with a z above top + t; returns how many."""
    n_active = tl.zeros((), tl.int32)
    for o in tl.range(0, n_tiles, BN):
        o_n = o + tl.arange(0, BN)
        # [BN]
        b_max = tl.load(p_tile_max + o_n, mask=o_n < n_tiles, other=float("-inf"))
        m_n = (o_n < n_tiles) & ~((b_max - top) - t <= -_ROUNDED)
        b_n = m_n.to(tl.int32)
        tl.store(p_active + n_active + tl.cumsum(b_n, 0) - b_n, o_n, mask=m_n)
        n_active += tl.sum(b_n)
    return n_active


@triton.jit
def _is_exact(
    p_bounds, s_page, first, last, p_pages, length, tau, a, PAGE: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Whether every scored page [first, last) whose bound exceeds tau is listed; a bound of NaN exceeds everything."""
    b_above = tl.zeros((BW,), tl.int32)
    for o in tl.range(first, last, BW, loop_unroll_factor=4):
        o_w = o + tl.arange(0, BW)
        # [BW]
        b_bound = tl.load(p_bounds + o_w.to(tl.int64) * s_page, mask=o_w < last, other=float("-inf"))
        b_above += (~(a * b_bound <= tau)).to(tl.int32)
    for o in tl.range(0, length, BW, loop_unroll_factor=2):
        o_w = o + tl.arange(0, BW)
        b_page = tl.load(p_pages + o_w, mask=o_w < length, other=-1)
        m_page = (b_page >= first) & (b_page < last)
        b_bound = tl.load(p_bounds + b_page.to(tl.int64) * s_page, mask=m_page, other=float("-inf"))
        b_above -= (~(a * b_bound <= tau)).to(tl.int32)
    return tl.sum(b_above) == 0


@triton.jit
def _solve(
    p_z, p_tile_max, p_active, p_support, p_weights, p_state, p_tau, p_estimate, p_bounds, s_bound, p_certified,
    p_pages, n_pages, first, last, a, beta, n_steps, exact,
    KIND: tl.constexpr, MODE: tl.constexpr, EVERY: tl.constexpr, PAGE: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr,
    LOOP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Threshold of one query head, whose tokens are the `n_pages` pages listed; pointers are to its own values.

    Returns how many tokens with mass it listed: -1 where they are too many, or were not all at hand.
    """
    n_tokens = n_pages * PAGE
    n_tiles = tl.cdiv(n_tokens, BT)
    # [BN]
    b_first = _tile_maxima(p_tile_max, tl.arange(0, BN), n_tiles)
    b_max = b_first
    for o in tl.range(BN, n_tiles, BN):
        b_max = tl.maximum(b_max, _tile_maxima(p_tile_max, o + tl.arange(0, BN), n_tiles))
    top = tl.max(b_max)
    empty = top == float("-inf")
    top = tl.where(empty, 0.0, top)
    least = tl.exp2(-a * tl.log2(tl.maximum(n_tokens, 1).to(tl.float32)))
    high_t, high_w = -least, 1.0 - least
    t, w = tl.full((), -1.0, tl.float32), tl.zeros((), tl.float32)
    if MODE > 0:
        estimate = tl.load(p_estimate) - top
        if MODE == 1:
            estimate = tl.minimum(tl.maximum(estimate, -1.0), high_t)
        t = tl.where(exact, t, estimate)
        w = t + 1.0
        n_steps = tl.where(exact, _STEPS, n_steps)
    n_steps = tl.where(empty, 0, n_steps if MODE > 0 else _STEPS)
    CHECK: tl.constexpr = p_bounds is not None
    o_t = tl.arange(0, BW)
    n_listed = tl.full((), -1, tl.int32)
    if LOOP:
        n_active = tl.zeros((), tl.int32)
        count = n_tokens
        below_t = tl.full((), float("-inf"), tl.float32)
        if n_tokens > BW:
            below_t, below_w = _below(p_tile_max, b_first, n_tiles, top, a, beta, KIND, BN)
            n_active = _active_tiles(p_tile_max, p_active, n_tiles, top, below_t, BN)
            count = n_active * BT
            if MODE == 0:
                t, w = below_t, below_w
            else:
                t, w = tl.where(exact, below_t, t), tl.where(exact, below_w, w)
            tl.debug_barrier()  # other threads read the list
        if count <= BW:
            o_w = o_t
            if n_tokens > BW:
                o_t = tl.load(p_active + o_w // BT, mask=o_w < count, other=0) * BT + o_w % BT
            # [BW]
            b_z = tl.load(p_z + o_t, mask=(o_w < count) & (o_t < n_tokens), other=float("-inf"))
            t, w, rest, enough = _iterate(
                b_z, p_z, p_active, 0, n_tokens, top, t, w, high_t, high_w, a, beta, n_steps, exact,
                KIND, MODE, CHECK, False, BT, BW,
            )  # fmt: skip
            if t + rest >= below_t - _ROUNDED:  # else tiles left out hold tokens above it
                n_listed = list_support(p_support, p_weights, b_z, o_t, top, t, w, rest, beta, KIND, BS)
        else:
            t, w, rest, enough = _iterate(
                tl.zeros((1,), tl.float32), p_z, p_active, n_active, n_tokens, top, t, w, high_t, high_w, a, beta,
                n_steps, exact, KIND, MODE, CHECK, True, BT, _LOOP_TOKENS,
            )  # fmt: skip
    else:
        b_z = tl.load(p_z + o_t, mask=o_t < n_tokens, other=float("-inf"))
        t, w, rest, enough = _iterate(
            b_z, p_z, p_active, 0, n_tokens, top, t, w, high_t, high_w, a, beta, n_steps, exact,
            KIND, MODE, CHECK, False, BT, BW,
        )  # fmt: skip
        n_listed = list_support(p_support, p_weights, b_z, o_t, top, t, w, rest, beta, KIND, BS)
    t, w, rest = tl.where(empty, float("inf"), t), tl.where(empty, float("inf"), w), tl.where(empty, 0.0, rest)
    tau = tl.where(empty, float("-inf"), top + (t + rest))
    tl.store(p_state, top)
    tl.store(p_state + 1, t)
    tl.store(p_state + 2, w)
    tl.store(p_state + 3, rest)
    tl.store(p_state + 4, n_listed.to(tl.float32))
    tl.store(p_tau, tau)
    if p_bounds is not None:
        if not EVERY:
            enough = enough & _is_exact(p_bounds, s_bound, first, last, p_pages, n_pages, tau, a, PAGE, _PAGES)
        tl.store(p_certified, (empty | enough).to(tl.int8))
    return n_listed


@triton.jit(do_not_specialize=[
    "W", "M", "bos", "eos", "n_steps", "s_bound_row", "s_bound_lane", "exact_pages", "exact_tokens", "s_table",
])  # fmt: skip
def threshold_kernel(
    p_v, p_table, p_seq_lens, p_pages, p_physical, p_lengths, p_z, p_tile_max, p_active, p_support, p_weights, p_state,
    p_tau, p_estimate, p_bounds, p_certified, p_a, p_o, p_mass, a, beta, n_steps, v_scale, s_v_t, s_v_h, s_o_b, s_o_h,
    s_z, s_bound_row, s_bound_lane, s_bound_page, s_table, W, M, bos, eos, exact_pages, exact_tokens,
    H: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, PV_TYPE: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, FINEST: tl.constexpr, KIND: tl.constexpr, MODE: tl.constexpr, NORMALISED: tl.constexpr,
    EVERY: tl.constexpr, PHYSICAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_line = tl.program_id(0).to(tl.int64)
    i_b, i_hq = i_line // (H * G), i_line % (H * G)
    i_h = i_hq // G
    i_list = (i_b * H + i_h) * LANES + (i_hq % G) * (LANES // G)
    begin(PDL)
    seq_len = tl.load(p_seq_lens + i_b)
    n_pages = pages_of(p_lengths, i_list, tl.minimum(seq_len, W * PAGE), M, PAGE, EVERY)
    if p_a is not None:
        a = tl.load(p_a + i_hq)
        beta = 1.0 / a
    last = bos
    if p_bounds is not None:
        p_bounds += (i_b * H + i_h) * s_bound_row + (i_hq % G) * s_bound_lane
        p_certified += i_line
        last = tl.minimum(tl.cdiv(seq_len, PAGE), W) - eos
    exact = True
    if p_estimate is not None:
        p_estimate += i_line
        exact = (tl.cdiv(seq_len, PAGE) <= exact_pages) | (seq_len <= exact_tokens)
    if p_active is not None:
        p_active += i_line * (s_z // FINEST)
    if not EVERY:
        p_pages += i_list * M
        if PHYSICAL:
            p_physical += i_list * M
    p_support += i_line * BS
    p_weights += i_line * BS
    n_listed = _solve(
        p_z + i_line * s_z, p_tile_max + i_line * (s_z // FINEST), p_active, p_support, p_weights,
        p_state + i_line * STATE, p_tau + i_line, p_estimate, p_bounds, s_bound_page, p_certified, p_pages,
        n_pages, bos, last, a, beta, n_steps, exact, KIND, MODE, EVERY, PAGE, BT, BW, LOOP, BN, BS,
    )  # fmt: skip
    if n_listed >= 0:
        tl.debug_barrier()  # other threads read the list
        weigh_support(
            p_v + i_h * s_v_h, p_table + i_b * s_table, p_pages, p_physical, p_support, p_weights, n_listed,
            p_o + i_b * s_o_b + i_hq * s_o_h, p_mass + i_line, v_scale, s_v_t,
            PAGE, DV, DV0, DV1, PV_TYPE, NORMALISED, EVERY, PHYSICAL,
        )  # fmt: skip
