"""The threshold from means and deviations: against dense integrals, over a million tokens, without any deviation."""

import math

import pytest
import torch

from flowlib.entmax import gaussian_tau
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.ops.gaussian_tau import truncated_moment
from flowlib.testing.oracles.bisection import entmax_row, gaussian_threshold, normal_mass
from tests.refusals import refused

ALPHAS = [4 / 3, 1.5, 1.7, 2.0]
LENGTHS = [41, 4, 0, 26, 9]  # pages of 4: 10, 0, 0, 6 and 2 before the tail


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def draw(rows=5, heads=2, pages=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    mu = 2 * torch.randn(rows, heads, pages, generator=g, dtype=torch.float64)
    return mu, 0.05 + torch.rand(rows, heads, pages, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_against_integrals(alpha, mixture):
    mu, sigma = draw()
    for b, length in enumerate(LENGTHS):
        hist = max(0, (length - 1) // 4)
        mu[b, :, hist:], sigma[b, :, hist:] = math.nan, math.nan  # never looked at
    tau = gaussian_tau(mu, sigma, lens(*LENGTHS), 4, alpha, mixture)
    for b, length in enumerate(LENGTHS):
        hist = max(0, (length - 1) // 4)
        if hist == 0:
            assert tau[b].eq(0).all()
            continue
        for h in range(2):
            m, s, count = mu[b, h, :hist], sigma[b, h, :hist], torch.full((hist,), 4.0, dtype=torch.float64)
            if not mixture:
                s, count = ((s * s).mean() + m.var(correction=0)).sqrt()[None], count.sum()[None]
                m = m.mean()[None]
            assert float(tau[b, h]) == pytest.approx(gaussian_threshold(alpha, m, s, count), abs=1e-4)


def test_each_head_has_its_alpha_and_its_model():
    mu, sigma = draw(heads=4, seed=1)
    alphas, mixed = torch.tensor([1.5, 1.5, 2.0, 4 / 3], dtype=torch.float64), torch.tensor([True, False, True, False])
    tau = gaussian_tau(mu, sigma, lens(*LENGTHS), 4, alphas, mixed)
    for h in range(4):
        one = slice(h, h + 1)
        alone = gaussian_tau(mu[:, one], sigma[:, one], lens(*LENGTHS), 4, float(alphas[h]), bool(mixed[h]))
        torch.testing.assert_close(tau[:, one], alone, rtol=0, atol=0)
    assert not tau[0, 0].eq(tau[0, 1])


@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 2.0])
@pytest.mark.parametrize(("n", "sigma"), [(1 << 20, 4.0), (1 << 17, 4.0), (1 << 20, 1.0)])
def test_a_million_tokens_in_float32(alpha, n, sigma):
    """Trap: with the normal CDF as 0.5 · (1 + erf) the threshold of alpha 1.5 is off by 2.03 at n = 2^20, sigma 4."""
    mu = torch.zeros(1, 1, n // 16 + 1)
    spread = torch.full_like(mu, sigma)
    tau = gaussian_tau(mu, spread, lens(n + 1), 16, alpha)
    assert tau.dtype is torch.float32
    truth = gaussian_tau(mu.double(), spread.double(), lens(n + 1), 16, alpha)
    assert abs(float(tau) - float(truth)) <= 1e-4 * max(1.0, abs(float(truth)))
    single = torch.tensor([sigma], dtype=torch.float64)
    mass = n * float(normal_mass(alpha - 1, float(truth), torch.zeros(1), single, 40001))
    assert mass == pytest.approx(1.0, abs=1e-3)


def test_the_mixture_over_many_pages_in_float32():
    g = torch.Generator().manual_seed(2)
    mu, sigma = 0.5 * torch.randn(6, 1, 5001, generator=g), 0.05 + 0.3 * torch.rand(6, 1, 5001, generator=g)
    hist = torch.tensor([5000, 4100, 3000, 4500, 4999, 1])
    lengths = (hist * 16 + 1).to(torch.int32)
    for alpha in (1.5, 2.0):
        tau = gaussian_tau(mu, sigma, lengths, 16, alpha, True)
        truth = gaussian_tau(mu.double(), sigma.double(), lengths, 16, alpha, True)
        assert (tau - truth).abs().max() < 1e-5
        last = gaussian_threshold(alpha, mu[5, 0, :1], sigma[5, 0, :1], torch.tensor([16.0], dtype=torch.float64))
        assert float(truth[5, 0]) == pytest.approx(last, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [0.0, 1e-12, 1e-7])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_pages_without_spread(alpha, sigma, dtype):
    """Trap: a bracket of max mean ± max sigma misses the root: entmax of the means, each page_size times over."""
    mu = draw(rows=1, seed=3)[0]
    tau = gaussian_tau(mu.to(dtype), torch.full_like(mu, sigma).to(dtype), lens(41), 4, alpha, True)
    for h in range(2):
        means = mu[0, h, :10].to(dtype).double()
        assert float(tau[0, h]) == pytest.approx(entmax_row(means.repeat_interleave(4), alpha).tau, abs=1e-5)
    flat = torch.full((1, 1, 11), 1.25, dtype=dtype)
    tau = gaussian_tau(flat, torch.full_like(flat, sigma), lens(41), 4, alpha)
    assert float(tau) == pytest.approx((alpha - 1) * 1.25 - 40 ** (1 - alpha), abs=1e-4)


def test_the_threshold_is_near_that_of_normal_scores():
    """Within three standard deviations of a maximum of n normals, which are sigma · π / sqrt(6) / sqrt(2 log n)."""
    g = torch.Generator().manual_seed(4)
    scores = 0.5 + 1.5 * torch.randn(4, 64000, generator=g, dtype=torch.float64)
    pages = scores.view(4, 1, -1, 16)
    mu, sigma = (torch.nn.functional.pad(x, (0, 1)) for x in (pages.mean(-1), pages.std(-1, correction=0)))
    for alpha in (1.5, 2.0):
        tau = gaussian_tau(mu, sigma, lens(*[64001] * 4), 16, alpha)
        for b in range(4):
            away = (alpha - 1) * 1.5 * math.pi / math.sqrt(6 * 2 * math.log(64000))
            assert float(tau[b]) == pytest.approx(entmax_row(scores[b], alpha).tau, abs=3 * away)


def test_third_moment():
    """Trap: the density's coefficient is mu²·sigma + 2·sigma³, not sigma³ + 2·mu²·sigma."""
    third = truncated_moment(torch.zeros(1, dtype=torch.float64), 3.0)
    assert float(third) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-12)
    t = torch.linspace(-2, 3, 11, dtype=torch.float64)
    torch.testing.assert_close(
        truncated_moment(t, 3.0), normal_mass(1 / 3, 0.0, 3 * t, torch.full_like(t, 3.0), 40001), rtol=1e-6, atol=1e-9
    )


def test_refusals():
    mu = torch.zeros(2, 3, 5)

    def tau(**changes):
        arguments = {"mu": mu, "sigma": mu, "seq_lens": lens(17, 3), "page_size": 4, "alpha": 1.5, **changes}
        return gaussian_tau(**arguments)

    for alpha in (1.0, 2.5, math.nan):
        with refused(OptionError, f"gaussian_tau: alpha is {alpha}, expected a number above 1 and at most 2"):
            tau(alpha=alpha)
    with refused(ShapeError, "gaussian_tau: alpha is [2], expected a shape that broadcasts to [3]"):
        tau(alpha=torch.tensor([1.5, 1.5]))
    with refused(FormatError, "gaussian_tau: mixture is torch.float32, expected a bool, or a bool tensor [H_q]"):
        tau(mixture=torch.ones(3))
    with refused(FormatError, "gaussian_tau: mixture is int, expected a bool, or a bool tensor [H_q]"):
        tau(mixture=1)
    with refused(ShapeError, "gaussian_tau: mixture is [2], expected [3] [H_q]"):
        tau(mixture=torch.tensor([True, False]))
    with refused(ShapeError, "gaussian_tau: sigma is [2, 3, 4], expected [2, 3, 5] as mu"):
        tau(sigma=mu[..., :4])
    with refused(FormatError, "gaussian_tau: mu is torch.int64, expected float16, bfloat16, float32 or float64"):
        tau(mu=mu.long())
    with refused(OptionError, "gaussian_tau: page_size is 5, expected a positive power of two"):
        tau(page_size=5)
    with refused(BatchError, "gaussian_tau: seq_lens has 21, expected from 0 to 20, what the pages hold"):
        tau(seq_lens=lens(21, 3))
