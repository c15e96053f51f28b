"""The threshold of entmax over normal scores: one program a plane of a row, bisection with scalars or page by page."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flowlib.kernels.pages import _scored_range
from flowlib.kernels.pdl import begin, options

_BLOCK = 2048
_VALUES_PER_THREAD = 8
_BISECTIONS = tl.constexpr(48)
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
def _moment(b_t, BETA: tl.constexpr):
    """E[max(t + Z, 0)^BETA] of a standard normal Z."""
    b_density = 0.3989422804014327 * tl.exp(-0.5 * b_t * b_t)
    b_below = 0.5 * _erfc(-0.7071067811865476 * b_t)
    if BETA == 1.0:
        b_m = b_t * b_below + b_density
    elif BETA == 2.0:
        b_m = (b_t * b_t + 1.0) * b_below + b_t * b_density
    elif BETA == 3.0:
        b_m = (b_t * b_t + 3.0) * b_t * b_below + (b_t * b_t + 2.0) * b_density
    else:
        b_start = tl.sqrt_rn(tl.maximum(b_t - 9.0, 0.0))
        b_range = tl.sqrt_rn(tl.maximum(b_t, 0.0) + 9.0) - b_start
        b_m = b_t * 0.0
        for i_node in tl.range(0, _NODES):
            b_u = b_start + b_range * ((i_node + 0.5) / _NODES)
            b_d = b_u * b_u - b_t
            b_m += tl.exp(2.0 * BETA * tl.log(b_u) - 0.5 * b_d * b_d) * 2.0 * b_u
        b_m = b_m * b_range * (0.3989422804014327 / _NODES)
    return tl.maximum(b_m, 0.0)


@triton.jit
def _expected_power(b_mean, b_sigma, BETA: tl.constexpr):
    """E[max(Y, 0)^BETA] of a normal Y; far above 0 by its expansion, which no small deviation can upset."""
    b_sigma = tl.maximum(b_sigma, 1e-10)
    b_t = b_mean / b_sigma
    b_near = tl.exp(BETA * tl.log(b_sigma)) * _moment(tl.minimum(b_t, _FAR), BETA)
    b_far = tl.maximum(b_t, _FAR)
    b_power = tl.exp(BETA * tl.log(tl.maximum(b_mean, 1e-30)))
    return tl.where(b_t > _FAR, b_power * (1.0 + 0.5 * BETA * (BETA - 1.0) / (b_far * b_far)), b_near)


@triton.jit
def _mass(p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, tau, PAGE: tl.constexpr, A: tl.constexpr,
          BETA: tl.constexpr, MIXTURE: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """The row's mass above tau."""
    if MIXTURE:
        total = tl.zeros((), tl.float32)
        for o in tl.range(0, n_pages, BW):
            o_w = o + tl.arange(0, BW)
            m_scored = (o_w >= first) & (o_w < last)
            # [BW]
            b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
            b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
            total += tl.sum(tl.where(m_scored, _expected_power(A * b_mu - tau, A * b_sigma, BETA), 0.0))
        total *= PAGE
    else:
        total = (last - first).to(tl.float32) * PAGE * _expected_power(A * mean - tau, A * row, BETA)
    return total


@triton.jit
def gaussian_tau_kernel(
    p_mu, p_sigma, p_tau, p_seq_lens, s_mu_row, s_mu_plane, s_mu, s_sigma_row, s_sigma_plane, s_sigma, s_tau_row,
    s_tau_plane, W, bos, eos, safety_z, excess,
    H: tl.constexpr, PLANES: tl.constexpr, PAGE: tl.constexpr, A: tl.constexpr, BETA: tl.constexpr,
    MIXTURE: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_plane = tl.program_id(0).to(tl.int64) // PLANES, tl.program_id(0) % PLANES
    begin(PDL)
    first, last, n_pages = _scored_range(p_seq_lens, i_row, W, bos, eos, H, PAGE)
    p_mu += i_row * s_mu_row + i_plane * s_mu_plane
    p_sigma += i_row * s_sigma_row + i_plane * s_sigma_plane
    n_scored = tl.maximum(last - first, 1).to(tl.float32)
    sum_mu, sum_upper = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    top_mu, top_sigma = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        # [BW]
        b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
        b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
        sum_mu += tl.sum(b_mu)
        sum_upper += tl.sum(b_mu + 1.5 * b_sigma)
        top_mu = tl.maximum(top_mu, tl.max(tl.where(m_scored, b_mu, float("-inf"))))
        top_sigma = tl.maximum(top_sigma, tl.max(b_sigma))
    mean = sum_mu / n_scored
    variance = tl.zeros((), tl.float32)
    for o in tl.range(0, n_pages, BW):
        o_w = o + tl.arange(0, BW)
        m_scored = (o_w >= first) & (o_w < last)
        # [BW]
        b_mu = tl.load(p_mu + o_w.to(tl.int64) * s_mu, mask=m_scored, other=0.0)
        b_sigma = tl.load(p_sigma + o_w.to(tl.int64) * s_sigma, mask=m_scored, other=0.0)
        b_spread = tl.where(m_scored, b_mu - mean, 0.0)
        variance += tl.sum(b_sigma * b_sigma + b_spread * b_spread)
    row = tl.maximum(tl.sqrt_rn(variance / n_scored), _MIN_SIGMA)
    reach = tl.sqrt_rn(2.0 * tl.log(n_scored * PAGE + 1.0)) + 8.0
    low = A * (top_mu if MIXTURE else mean) - 1.0
    high = low + 1.0 + A * (top_sigma if MIXTURE else row) * reach
    for _ in tl.range(0, _BISECTIONS):
        middle = 0.5 * (low + high)
        mass = _mass(p_mu, p_sigma, s_mu, s_sigma, first, last, n_pages, mean, row, middle, PAGE, A, BETA, MIXTURE, BW)
        low = tl.where(mass >= 1.0, middle, low)
        high = tl.where(mass >= 1.0, high, middle)
    tau = 0.5 * (low + high)
    margin = tl.maximum(safety_z * row, excess * tl.maximum(tau / A - sum_upper / n_scored, 0.0))
    tau = tl.where(last > first, tau - A * margin, 0.0)
    tl.store(p_tau + i_row * s_tau_row + i_plane * s_tau_plane, tau)


def launch_gaussian_tau(
    mu: Any, sigma: Any, tau: Any, seq_lens: Any, *, num_kv_heads: int, page_size: int, bos: int, eos: int,
    alpha: float, safety_margin_z: float, excess: float, mixture: bool, pdl: bool = False,
) -> None:  # fmt: skip
    """tau fp32 ``[R, n]`` of page means and deviations mu, sigma fp32 ``[R, n, W]`` over the scored pages.

    See :class:`flowlib.ops.GaussianTau` for what it solves; a row without a scored page gives 0.
    """
    rows, planes, width = mu.shape
    block = min(_BLOCK, triton.next_power_of_2(max(width, 32)))
    beta = 1.0 / (alpha - 1.0)
    near = round(beta)
    gaussian_tau_kernel[(rows * planes,)](
        mu, sigma, tau, seq_lens, *mu.stride(), *sigma.stride(), *tau.stride(), width, bos, eos, safety_margin_z,
        excess, H=num_kv_heads, PLANES=planes, PAGE=page_size, A=alpha - 1.0,
        BETA=float(near) if abs(beta - near) < 1e-9 else beta, MIXTURE=mixture, BW=block,
        num_warps=min(8, max(1, block // (32 * _VALUES_PER_THREAD))), num_stages=1, **options(pdl),
    )  # fmt: skip
