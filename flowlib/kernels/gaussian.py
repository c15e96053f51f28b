"""The threshold of entmax over normal scores: one program a plane of a row, over scalars or page by page. The moments
of long rows are summed by many programs before it.

The expected mass F falls with the threshold, and log F is concave for one normal: Newton steps on it inside a bracket
take five to ten evaluations.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.pages import _scored_range
from flowlib.kernels.pdl import begin, options

_BLOCKS = ((2048, 1024), (2**31, 4096))
"""(widest row, pages at a time): few sizes, since sums of other parts differ in their last digits."""
_VALUES_PER_THREAD = 8
_PART, _PART_WARPS = 1024, 4  # pages of a long row that one program sums
_LONG_WIDTH = 4096
_FEWEST_PARTS = 64  # loaded in a program: tables of up to 65,536 pages share a kernel
_REGISTERS = {16: 128}  # of the largest programs all there are
_MANY_REGISTERS = 168  # where the assembler would spill to fit one more program on a multiprocessor
_NEWTON_STEPS = tl.constexpr(12)
_STEPS = tl.constexpr(64)
_TOLERANCE = tl.constexpr(1e-6)
_TAIL_TOKENS = tl.constexpr(16)
_NODES = tl.constexpr(48)
_MIN_SIGMA = tl.constexpr(1e-6)
_FAR = tl.constexpr(64.0)


@triton.jit
def _erfc(b_x):
    """erfc in fp32 with a relative error below 2e-7 everywhere, so that far tails keep their digits."""
    b_z = tl.abs(b_x)
    b_t = 1.0 / (1.0 + 0.5 * b_z)
    b_p = -0.82215223 + b_t * 0.17087277
    b_p = 1.48851587 + b_t * b_p
    b_p = -1.13520398 + b_t * b_p
    b_p = 0.27886807 + b_t * b_p
    b_p = -0.18628806 + b_t * b_p
    b_p = 0.09678418 + b_t * b_p
    b_p = 0.37409196 + b_t * b_p
    b_p = 1.00002368 + b_t * b_p
    b_y = b_t * tl.exp(-b_z * b_z - 1.26551223 + b_t * b_p)
    return tl.where(b_x >= 0.0, b_y, 2.0 - b_y)


@triton.jit
def _moments(b_t, BETA: tl.constexpr):
    """E[max(t + Z, 0)^p] of a standard normal Z, for p = BETA and for p = BETA - 1."""
    b_density = 0.3989422804014327 * tl.exp(-0.5 * b_t * b_t)
    b_below = 0.5 * _erfc(-0.7071067811865476 * b_t)
    if BETA == 1.0:
        b_m, b_less = b_t * b_below + b_density, b_below
    elif BETA == 2.0:
        b_m, b_less = (b_t * b_t + 1.0) * b_below + b_t * b_density, b_t * b_below + b_density
    elif BETA == 3.0:
        b_m = (b_t * b_t + 3.0) * b_t * b_below + (b_t * b_t + 2.0) * b_density
        b_less = (b_t * b_t + 1.0) * b_below + b_t * b_density
    else:
        b_start = tl.sqrt_rn(tl.maximum(b_t - 9.0, 0.0))
        b_range = tl.sqrt_rn(tl.maximum(b_t, 0.0) + 9.0) - b_start
        b_m, b_less = b_t * 0.0, b_t * 0.0
        for i_node in tl.range(0, _NODES):
            b_u = b_start + b_range * ((i_node + 0.5) / _NODES)
            b_d = b_u * b_u - b_t
            b_part = tl.exp(2.0 * (BETA - 1.0) * tl.log(b_u) - 0.5 * b_d * b_d) * 2.0 * b_u
            b_less += b_part
            b_m += b_part * b_u * b_u
        b_unit = b_range * (0.3989422804014327 / _NODES)
        b_m, b_less = b_m * b_unit, b_less * b_unit
    return tl.maximum(b_m, 0.0), tl.maximum(b_less, 0.0)


@triton.jit
def _expected_powers(b_mean, b_sigma, BETA: tl.constexpr):
    """E[max(Y, 0)^p] of a normal Y, p = BETA and BETA - 1; far above 0 by its expansion, for any small deviation."""
    b_sigma = tl.maximum(b_sigma, 1e-10)
    b_t = b_mean / b_sigma
    b_m, b_less = _moments(tl.minimum(b_t, _FAR), BETA)
    b_log = tl.log(b_sigma)
    b_far = tl.maximum(b_t, _FAR)
    b_square = 0.5 / (b_far * b_far)
    b_up = tl.log(tl.maximum(b_mean, 1e-30))
    b_power = tl.exp(BETA * b_up) * (1.0 + b_square * BETA * (BETA - 1.0))
    b_lower = tl.exp((BETA - 1.0) * b_up) * (1.0 + b_square * (BETA - 1.0) * (BETA - 2.0))
    m_far = b_t > _FAR
    return (
        tl.where(m_far, b_power, tl.exp(BETA * b_log) * b_m),
        tl.where(m_far, b_lower, tl.exp((BETA - 1.0) * b_log) * b_less),
    )


@triton.jit
def _masses(p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, tau, mixed, PAGE: tl.constexpr,
            A: tl.constexpr, BETA: tl.constexpr, MIXTURE: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """The row's expected mass above tau, and the same of one power less."""
    count = tl.maximum(last - first, 0).to(tl.float32) * PAGE
    total, less = _expected_powers(A * mean - tau, A * row, BETA)
    total, less = count * total, count * less
    if MIXTURE:
        if mixed:
            b_total, b_less = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
            for o in tl.range(0, n_pages, BW):
                o_w = o + tl.arange(0, BW)
                m_scored = (o_w >= first) & (o_w < last)
                # [BW]
                b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
                b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
                b_p, b_l = _expected_powers(A * b_mu - tau, A * b_sigma, BETA)
                b_total += tl.where(m_scored, b_p, 0.0)
                b_less += tl.where(m_scored, b_l, 0.0)
            total, less = tl.sum(b_total) * PAGE, tl.sum(b_less) * PAGE
    return total, less


@triton.jit
def _threshold(p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, low, high, mixed, PAGE: tl.constexpr,
               A: tl.constexpr, BETA: tl.constexpr, MIXTURE: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """Where the expected mass is 1; it is at least 1 at `low` and at most 1 at `high`."""
    tau = low
    i = tl.zeros((), tl.int32)
    going = last > first
    while going:
        total, less = _masses(
            p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, tau, mixed, PAGE, A, BETA, MIXTURE, BW
        )
        low, high = tl.where(total >= 1.0, tau, low), tl.where(total >= 1.0, high, tau)
        new = tau + total * tl.log(tl.maximum(total, 1e-37)) / (BETA * tl.maximum(less, 1e-37))
        inside = (new >= low) & (new <= high) & ((i < _NEWTON_STEPS) | (i % 2 == 0))
        new = tl.where(inside, new, 0.5 * (low + high))
        i += 1
        going = (i < _STEPS) & (tl.abs(new - tau) > _TOLERANCE * tl.maximum(tl.abs(tau), 1.0))
        tau = new
    return tau


@triton.jit
def _tail_maximum(
    p_q, p_k, p_table, seq_len, slope, scale, s_k_t, PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """The largest score in the row's last page; -inf for an empty row."""
    o_d = tl.arange(0, BD)
    # [BD]
    b_q = tl.load(p_q + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    first = tl.maximum(seq_len - 1, 0) // PAGE * PAGE
    page = tl.load(p_table + first // PAGE, mask=seq_len > 0, other=0).to(tl.int64)
    b_top = tl.full((_TAIL_TOKENS,), float("-inf"), tl.float32)
    for o in tl.range(0, seq_len - first, _TAIL_TOKENS):
        o_t = o + tl.arange(0, _TAIL_TOKENS)
        m_t = first + o_t < seq_len
        # [_TAIL_TOKENS, BD]
        p_kt = p_k + (page * PAGE + o_t)[:, None] * s_k_t + o_d[None, :]
        b_k = tl.load(p_kt, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
        b_s = tl.sum(b_k * b_q[None, :], 1) * scale + slope * (first + o_t - (seq_len - 1)).to(tl.float32)
        b_top = tl.where(m_t & (b_s > b_top), b_s, b_top)
    return tl.max(b_top)


@triton.jit(do_not_specialize=["W", "bos", "eos"])
def gaussian_moments_kernel(
    p_mu, p_sigma, p_moments, p_seq_lens, s_mu_row, s_mu_plane, s_mu, s_sigma_row, s_sigma_plane, s_sigma, W, bos, eos,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of BW pages of a plane: the mean, the squares about it, and the sum of the deviations."""
    i_plane, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_plane // PLANES
    begin(PDL)
    first, last, _ = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    o_w = i_part * BW + tl.arange(0, BW)
    m_scored = (o_w >= first) & (o_w < last)
    p_mu += i_row * s_mu_row + i_plane % PLANES * s_mu_plane
    p_sigma += i_row * s_sigma_row + i_plane % PLANES * s_sigma_plane
    # [BW]
    b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
    b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
    mean = tl.sum(b_mu) / tl.maximum(tl.sum(m_scored.to(tl.int32)), 1).to(tl.float32)
    b_away = tl.where(m_scored, b_mu - mean, 0.0)
    p_moments += (i_plane * tl.num_programs(1) + i_part) * 3
    tl.store(p_moments, mean)
    tl.store(p_moments + 1, tl.sum(b_away * b_away + b_sigma * b_sigma))
    tl.store(p_moments + 2, tl.sum(b_sigma))


@triton.jit
def _joined_moments(p_moments, n_parts, first, last, n_scored, BW: tl.constexpr, BN: tl.constexpr):
    """(mean, deviation, mean deviation of a page) of a plane, from those of its parts."""
    o_n = tl.arange(0, BN)
    b_count = tl.minimum(last, (o_n + 1) * BW) - tl.maximum(first, o_n * BW)
    m_n = (o_n < n_parts) & (b_count > 0)
    b_count = b_count.to(tl.float32)
    # [BN]
    b_mean = tl.load(p_moments + o_n * 3, mask=m_n, other=0.0)
    b_square = tl.load(p_moments + o_n * 3 + 1, mask=m_n, other=0.0)
    b_width = tl.load(p_moments + o_n * 3 + 2, mask=m_n, other=0.0)
    mean = tl.sum(tl.where(m_n, b_count * b_mean, 0.0)) / n_scored
    b_away = tl.where(m_n, b_mean - mean, 0.0)
    square = tl.sum(b_square + tl.where(m_n, b_count, 0.0) * b_away * b_away) / n_scored
    return mean, tl.sqrt_rn(tl.maximum(square, 0.0)), tl.sum(b_width) / n_scored


@triton.jit(do_not_specialize=["W", "bos", "eos", "s_table", "n_parts"])
def gaussian_tau_kernel(
    p_mu, p_sigma, p_moments, p_tau, p_estimate, p_seq_lens, p_q, p_k, p_table, p_slopes, s_mu_row, s_mu_plane, s_mu,
    s_sigma_row, s_sigma_plane, s_sigma, s_tau_row, s_tau_plane, s_q_b, s_q_h, s_k_t, s_k_h, s_table, W, n_parts, bos,
    eos, scale, safety_z, excess,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, A: tl.constexpr,
    BETA: tl.constexpr, MIXTURE: tl.constexpr, BY_SLOPE: tl.constexpr, TAIL: tl.constexpr, BW: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    i_b, i_hq = i_row // H, i_row % H * PLANES + i_plane
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_mu += i_row * s_mu_row + i_plane * s_mu_plane
    p_sigma += i_row * s_sigma_row + i_plane * s_sigma_plane
    slope = tl.zeros((), tl.float32)
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_hq)
    known = tl.full((), float("-inf"), tl.float32)
    if TAIL:
        seq_len = tl.minimum(tl.load(p_seq_lens + i_b), W * PAGE)
        known = _tail_maximum(
            p_q + i_b * s_q_b + i_hq * s_q_h, p_k + i_row % H * s_k_h, p_table + i_b * s_table, seq_len, slope, scale,
            s_k_t, PAGE, D, BD,
        )  # fmt: skip
    n_scored = tl.maximum(last - first, 1).to(tl.float32)
    if BN > 0:
        p_moments += (i_row * PLANES + i_plane) * n_parts * 3
        mean, row, spread = _joined_moments(p_moments, n_parts, first, last, n_scored, BW, BN)
    else:
        # in one pass: moments about the mean of the first block, which lies among the values, so that nothing cancels
        o_w = tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
        shift = tl.sum(b_mu) / tl.maximum(tl.minimum(last, BW) - first, 1).to(tl.float32)
        b_sum, b_square = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
        b_width = tl.zeros((BW,), tl.float32)
        b_top, b_wide = tl.full((BW,), float("-inf"), tl.float32), tl.zeros((BW,), tl.float32)
        for o in tl.range(0, n_pages, BW, loop_unroll_factor=2):
            o_w = o + tl.arange(0, BW)
            m_scored = (o_w >= first) & (o_w < last)
            # [BW]
            b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
            b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
            b_away = tl.where(m_scored, b_mu - shift, 0.0)
            b_sum += b_away
            b_square += b_sigma * b_sigma + b_away * b_away
            b_width += b_sigma
            if MIXTURE:
                b_top = tl.maximum(b_top, tl.where(m_scored, b_mu, float("-inf")))
                b_wide = tl.maximum(b_wide, b_sigma)
        away = tl.sum(b_sum) / n_scored
        mean, spread = shift + away, tl.sum(b_width) / n_scored
        row = tl.sqrt_rn(tl.maximum(tl.sum(b_square) / n_scored - away * away, 0.0))
    row = tl.maximum(row, _MIN_SIGMA)
    upper = mean + 1.5 * spread
    mixed = (slope != 0.0) if BY_SLOPE else (last > first)
    centre, width = mean, row
    if MIXTURE:
        centre, width = tl.where(mixed, tl.max(b_top), mean), tl.where(mixed, tl.max(b_wide), row)
    low = A * centre - 1.0
    high = low + 1.0 + A * width * (tl.sqrt_rn(2.0 * tl.log(n_scored * PAGE + 1.0)) + 8.0)
    tau = _threshold(
        p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, low, high, mixed, PAGE, A, BETA, MIXTURE, BW
    )
    if p_estimate is not None:
        tl.store(p_estimate + i_row * s_tau_row + i_plane * s_tau_plane, tl.where(last > first, tau, 0.0))
    margin = tl.maximum(safety_z * row, excess * tl.maximum(tau / A - upper, 0.0))
    tau = tl.where(last > first, tau - A * margin, 0.0)
    if TAIL:
        tau = tl.where(last > first, tl.maximum(tau, A * known - 1.0), tau)
    tl.store(p_tau + i_row * s_tau_row + i_plane * s_tau_plane, tau)


@triton.jit(do_not_specialize=["W", "s_table"])
def tail_floor_kernel(
    p_tau, p_seq_lens, p_q, p_k, p_table, p_slopes, s_q_b, s_q_h, s_k_t, s_k_h, s_table, W, scale,
    H: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, A: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_b, i_hq = tl.program_id(0).to(tl.int64) // (H * G), tl.program_id(0) % (H * G)
    begin(PDL)
    slope = tl.zeros((), tl.float32)
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_hq)
    seq_len = tl.minimum(tl.load(p_seq_lens + i_b), W * PAGE)
    known = _tail_maximum(
        p_q + i_b * s_q_b + i_hq * s_q_h, p_k + i_hq // G * s_k_h, p_table + i_b * s_table, seq_len, slope, scale,
        s_k_t, PAGE, D, BD,
    )  # fmt: skip
    tl.store(p_tau + tl.program_id(0), A * known - 1.0)


def launch_tail_floor(
    tau: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int, alpha: float, q: Any, k: Any,
    page_table: Any, scale: float, k_scale: float, alibi_slopes: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """tau fp32 ``[R, G]`` contiguous: (alpha - 1) times the largest score of each row's last page, less 1.

    Args as for :func:`launch_gaussian_tau`; -inf for an empty row.
    """
    size = k.shape[-1]
    tail_floor_kernel[(tau.numel(),)](
        tau, seq_lens, q, k, page_table, alibi_slopes, *q.stride()[:2], *k.stride()[:2], page_table.stride(0),
        page_table.shape[1], scale * k_scale, H=num_kv_heads, G=tau.shape[1], PAGE=page_size, D=size,
        BD=triton.next_power_of_2(size), A=alpha - 1.0, num_warps=4, num_stages=1, **options(pdl),
    )  # fmt: skip


def launch_gaussian_tau(
    mu: Any, sigma: Any, tau: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int,
    alpha: float, safety_margin_z: float, excess: float, mixture: bool | None, tail: bool = False, q: Any = None,
    k: Any = None, page_table: Any = None, scale: float = 1.0, k_scale: float = 1.0, alibi_slopes: Any = None,
    estimate: Any = None, moments: Any = None, pdl: bool = False,
) -> None:  # fmt: skip
    """tau fp32 ``[R, n]`` of page means and deviations mu, sigma fp32 ``[R, n, W]`` over the scored pages.

    See :class:`flowlib.ops.GaussianTau` for what it solves; a row without a scored page gives 0.

    Args:
        mixture: None takes a normal per page for planes whose `alibi_slopes` fp32 ``[num_kv_heads * n]`` is not 0.
        tail: the threshold is at least (alpha - 1) times the largest score of the row's last page, less 1: of queries
            q ``[bs, num_kv_heads * n, D]`` and keys k ``[T, num_kv_heads, D]``, found by the page table.
        estimate: fp32 with the strides of tau, written: the threshold without its margins and whatever `tail` tells.
        moments: scratch, fp32 ``[R, n, parts, 3]`` contiguous with :func:`parts_of` parts: a kernel sums the parts of
            long rows first. None: each row's program sums all of it, as always where pages are normals of their own.
    """
    rows, planes, width = mu.shape
    block = next(block for widest, block in _BLOCKS if width <= widest)
    warps = block // (32 * _VALUES_PER_THREAD)
    beta = 1.0 / (alpha - 1.0)
    near = round(beta)
    by_slope = mixture is None
    mixed = alibi_slopes is not None if by_slope else mixture
    parts = 0 if moments is None or mixed else moments.shape[2]
    if parts:
        block, warps = _PART, _PART_WARPS
        gaussian_moments_kernel[(rows * planes, parts)](
            mu, sigma, moments, seq_lens, *mu.stride(), *sigma.stride(), width, bos, eos, H=num_kv_heads,
            PLANES=planes, PAGE=page_size, BW=block, num_warps=warps, num_stages=1, **options(pdl),
        )  # fmt: skip
    size = k.shape[-1] if tail else 1
    strides = (*q.stride()[:2], *k.stride()[:2], page_table.stride(0)) if tail else (0,) * 5
    gaussian_tau_kernel[(rows * planes,)](
        mu, sigma, moments if parts else None, tau, estimate, seq_lens, q if tail else None, k if tail else None,
        page_table if tail else None, alibi_slopes, *mu.stride(), *sigma.stride(), *tau.stride(), *strides, width,
        parts, bos, eos, scale * k_scale, safety_margin_z, excess, H=num_kv_heads, PLANES=planes, PAGE=page_size,
        D=size, BD=triton.next_power_of_2(size), A=alpha - 1.0,
        BETA=float(near) if abs(beta - near) < 1e-9 else beta, MIXTURE=mixed,
        BY_SLOPE=by_slope and alibi_slopes is not None, TAIL=tail, BW=block,
        BN=max(_FEWEST_PARTS, triton.next_power_of_2(parts)) if parts else 0, num_warps=warps, num_stages=1,
        maxnreg=_REGISTERS.get(warps, _MANY_REGISTERS), **options(pdl),
    )  # fmt: skip


def scratch_of(width: int) -> dict[str, tuple[int, ...]]:
    """Shapes for one plane of :func:`launch_gaussian_tau`'s scratch, for rows of at most `width` pages, by argument.

    Whether pages are normals of their own, which use none, is known at the launch only.
    """
    parts = parts_of(width)
    return {"moments": (parts, 3)} if parts else {}


def parts_of(width: int) -> int:
    """Parts in which rows of at most `width` pages are summed; 0 where one program sums a row."""
    return triton.cdiv(width, _PART) if width > _LONG_WIDTH else 0
