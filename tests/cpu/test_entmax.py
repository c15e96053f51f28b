"""entmax against 200 bisections in float64, and by what it is: properties, ties, masks, dtypes, a million tokens."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowlib.entmax import entmax
from flowlib.errors import FormatError, OptionError, ShapeError
from flowlib.testing.oracles.bisection import entmax_row
from tests.refusals import refused

ALPHAS = [1.0, 1.001, 1.1, 4 / 3, 1.5, 1.7, 1.75, 1.999, 2.0]
SPARSE = ALPHAS[1:]
some = settings(
    max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def draw(*shape, seed=0, scale=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)


def rounding(s, p, alpha, eps):
    """What rounding the scores, and the threshold, to a few `eps` does to each true p; float64.

    With u = p^(2 − alpha) the Jacobian is diag(u) − u·uᵀ / Σu. Scores count relative to the largest; the threshold,
    of size 1 at most, moves p by u · min(1/a, log L) · eps; p itself is rounded, and a token at the threshold may
    come out as (eps)^(1/a). The bisection itself knows no better than x^(1/a), which is good to u · eps / a in float64.
    """
    a, d, exact = alpha - 1.0, s.double() - s.double().max(), torch.finfo(torch.float64).eps
    u = torch.where(p > 0, p ** (2.0 - alpha), 0.0)
    d = torch.where(p > 0, d.abs(), 0.0)
    steepness = min(1.0 / a if a else math.inf, 2.0 + math.log(len(s)))
    moved = u * (d + (u * d).sum() / u.sum() + steepness) + (2.0 + math.log(len(s))) * p
    edge = (8.0 * eps) ** (1.0 / a) if a else 0.0
    oracle = 4.0 * exact * u / a if a else 0.0
    return 8.0 * eps * moved + edge + oracle + torch.finfo(torch.float32).tiny


def assert_near(s, alpha, p, tau=None):
    """p and tau of one row as good as the dtype computed in allows, and p rounded once to its own."""
    eps = torch.finfo(torch.float64 if s.dtype is torch.float64 else torch.float32).eps
    truth = entmax_row(s, alpha)
    stored = torch.finfo(p.dtype)
    allowed = rounding(s, truth.p, alpha, eps) + stored.eps * truth.p + stored.smallest_normal
    assert (p.double() - truth.p).abs().le(allowed).all(), (p.double() - truth.p).abs().div(allowed).max()
    if tau is not None:
        size = 1.0 + abs(float(s[s > -math.inf].double().max())) + math.log(len(s))
        assert abs(float(tau) - truth.tau) <= 16 * eps * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_rows_of_odd_sizes_in_every_dtype(alpha, dtype):
    for n, scale in ((1, 1.0), (2, 0.1), (3, 1.0), (7, 10.0), (33, 1.0), (1023, 3.0)):
        s = draw(3, n, seed=n, scale=scale, dtype=dtype)
        p, tau = entmax(s, alpha, return_tau=True)
        assert p.dtype is dtype
        assert tau.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert tau.shape == (3,)
        for row in range(3):
            assert_near(s[row], alpha, p[row], tau[row])


@pytest.mark.parametrize("alpha", [1.333, 1.5, 2.0])
@pytest.mark.parametrize("shape", [(2,), (2, 4), (2, 4, 8), (2, 4, 8, 16)])
def test_shapes_and_axes(shape, alpha):
    s = draw(*shape, seed=1)
    for dim in range(-len(shape), len(shape)):
        p, tau = entmax(s, alpha, dim=dim, return_tau=True)
        assert p.shape == s.shape
        assert tau.shape == s.movedim(dim, -1).shape[:-1]
        expected = entmax(s.movedim(dim, -1).contiguous(), alpha).movedim(-1, dim)
        torch.testing.assert_close(p, expected, rtol=0, atol=0)
        assert_near(s.movedim(dim, -1).reshape(-1, shape[dim])[0], alpha, p.movedim(dim, -1).reshape(-1, shape[dim])[0])


def test_by_hand():
    s = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)
    p, tau = entmax(s, 2.0, return_tau=True)
    assert p.tolist() == [0.75, 0.25, 0.0]
    assert float(tau) == 0.25
    p, tau = entmax(torch.zeros(4, dtype=torch.float64), 1.5, return_tau=True)
    assert p.tolist() == [0.25] * 4
    assert float(tau) == -0.5
    p, tau = entmax(s, 1, return_tau=True)
    torch.testing.assert_close(p, s.softmax(-1))
    assert float(tau) == pytest.approx(float(s.logsumexp(-1)), rel=1e-15)


@pytest.mark.parametrize(("scores", "alpha"), [([1.0, 0.9], 4 / 3), ([1.0, 0.9], 1.75)])
def test_the_largest_score_counts_in_the_bracket(scores, alpha):
    """Trap of the public initialiser, which leaves the maximum out: a mass of 1.41 and 1.7 for these scaled scores."""
    s = torch.tensor(scores, dtype=torch.float64) / (alpha - 1)
    p = entmax(s, alpha)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-14)
    assert_near(s, alpha, p)


@pytest.mark.parametrize("alpha", SPARSE)
def test_equal_scores_and_ties(alpha):
    for n in (1, 2, 5, 1000):
        p, tau = entmax(torch.full((n,), 3.5, dtype=torch.float64), alpha, return_tau=True)
        torch.testing.assert_close(p, torch.full_like(p, 1 / n), rtol=1e-12, atol=0)
        assert float(tau) == pytest.approx(3.5 * (alpha - 1) - n ** (1 - alpha), abs=1e-12)  # the bracket's right end
    tied = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    p = entmax(tied, alpha)
    assert p[0] == p[2] == p[4]
    assert p[1] == p[3]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_scores_are_finite(alpha, dtype):
    p, tau = entmax(draw(4, 129, scale=100.0, dtype=dtype), alpha, return_tau=True)
    assert p.isfinite().all()
    assert tau.isfinite().all()
    assert (p.double().sum(-1) - 1).abs().max() <= 2 * torch.finfo(dtype).eps
    huge = torch.tensor([3e38, -3e38, 3e38])
    assert entmax(huge, alpha).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_minus_infinity_is_exactly_nothing(alpha):
    s = torch.tensor([0.3, -math.inf, 0.1, -math.inf], dtype=torch.float64)
    p, tau = entmax(s, alpha, return_tau=True)
    kept, kept_tau = entmax(s[[0, 2]], alpha, return_tau=True)
    assert p[[1, 3]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(p[[0, 2]], kept, rtol=1e-14, atol=0)
    assert float(tau) == pytest.approx(float(kept_tau), abs=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_the_mask_hides_is_not_looked_at(alpha):
    s = draw(3, 2, 9, seed=4, dtype=torch.float32)
    keep = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    keep[1] = False
    poisoned = torch.where(keep, s, float("nan"))
    p, tau = entmax(poisoned, alpha, mask=keep, return_tau=True)
    assert p[:, 1].eq(0).all(), "a row without a kept score gives 0"
    assert tau[:, 1].eq(-math.inf).all()
    assert p[:, 0][:, ~keep[0]].eq(0).all()
    torch.testing.assert_close(p[:, 0][:, keep[0]], entmax(s[:, 0][:, keep[0]], alpha), rtol=1e-6, atol=1e-7)
    along = entmax(poisoned.transpose(1, 2), alpha, dim=1, mask=keep.T)
    torch.testing.assert_close(along.transpose(1, 2), p, rtol=0, atol=0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_spoil_their_row_alone(alpha, bad):
    s = draw(2, 5, seed=5)
    s[0, 3] = bad
    p, tau = entmax(s, alpha, return_tau=True)
    assert p[0].isnan().any()
    assert not tau[0].isfinite()
    assert_near(s[1], alpha, p[1], tau[1])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_empty_rows(alpha):
    p, tau = entmax(torch.zeros(3, 0), alpha, return_tau=True)
    assert p.shape == (3, 0)
    assert tau.tolist() == [-math.inf] * 3
    p, tau = entmax(torch.zeros(0, 4), alpha, return_tau=True)
    assert p.shape == (0, 4)
    assert tau.shape == (0,)
    p, tau = entmax(torch.full((2, 4), -math.inf), alpha, return_tau=True)
    assert p.tolist() == [[0.0] * 4] * 2
    assert tau.tolist() == [-math.inf] * 2


def test_one_alpha_for_each_head():
    s = draw(3, len(ALPHAS), 40, seed=6)
    p, tau = entmax(s, torch.tensor(ALPHAS, dtype=torch.float64), return_tau=True)
    for h, alpha in enumerate(ALPHAS):
        alone, alone_tau = entmax(s[:, h], alpha, return_tau=True)
        torch.testing.assert_close(p[:, h], alone, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(tau[:, h], alone_tau, rtol=1e-13, atol=1e-15)
    along = entmax(s, torch.tensor([[1.5], [2.0], [1.25]]), dim=-1)
    torch.testing.assert_close(along[2], entmax(s[2], 1.25), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_near_one_approaches_softmax(dtype):
    s = draw(5, 200, seed=7, scale=3.0, dtype=dtype)
    softmax, last = s.double().softmax(-1), math.inf
    for exponent in (2, 4, 6, 8, 12, 15):
        away = float((entmax(s, 1.0 + 10.0**-exponent).double() - softmax).abs().max())
        assert away <= 10.0**-exponent * 40 + 8 * torch.finfo(dtype).eps, exponent
        assert away <= last
        last = max(away, torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("kind", ["equal", "flat", "cliff", "normal"])
def test_a_million_tokens(alpha, kind):
    """2^20 tokens in fp32 against float64: no long sum may lose the digits of a small one."""
    n = 1 << 20
    s = {
        "equal": lambda: torch.full((n,), -7.25),
        "flat": lambda: draw(n, seed=8, scale=1e-4, dtype=torch.float32),
        "cliff": lambda: torch.cat([torch.ones(1), draw(n - 1, seed=9, scale=1e-6, dtype=torch.float32)]),
        "normal": lambda: draw(n, seed=10, scale=4.0, dtype=torch.float32),
    }[kind]()
    p, tau = entmax(s, alpha, return_tau=True)
    truth, truth_tau = entmax(s.double(), alpha, return_tau=True)
    assert float(p.double().sum()) == pytest.approx(1.0, abs=2e-6)
    eps = torch.finfo(torch.float32).eps
    assert abs(float(tau) - float(truth_tau)) <= 16 * eps * (1 + float(s.abs().max()) + math.log(n))
    assert (p.double() - truth).abs().le(rounding(s, truth, alpha, eps)).all()
    if kind == "equal":
        assert (p * n - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 1.75, 2.0])
def test_a_million_small_tokens_weigh_what_they_should(alpha):
    """One high score over a plain of 2^20: fp32 can't tell the threshold finely enough, so the mass must be settled."""
    s = torch.cat([torch.ones(1), draw((1 << 20) - 1, seed=9, scale=1e-6, dtype=torch.float32)])
    p, truth = entmax(s, alpha).double(), entmax(s.double(), alpha)
    assert 0.01 < truth[0] <= 1.0
    assert abs(float(p[0] - truth[0])) <= 8 * torch.finfo(torch.float32).eps
    assert abs(float(p[1:].sum() - truth[1:].sum())) <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.75, 2.0])
def test_a_million_tokens_against_bisection(alpha):
    s = draw(1 << 20, seed=11, scale=2.0)
    p, tau = entmax(s, alpha, return_tau=True)
    z = (alpha - 1) * s
    mass = lambda t: float(((z - t).clamp(min=0) ** (1 / (alpha - 1))).sum())  # noqa: E731
    assert mass(float(tau) - 1e-11) > 1.0 > mass(float(tau) + 1e-11), "the root lies between"
    assert (p - (z - tau).clamp(min=0) ** (1 / (alpha - 1))).abs().max() <= 1e-11


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients(alpha):
    s = draw(2, 6, seed=12).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entmax(x, alpha), [s], atol=1e-5)
    (row,) = torch.autograd.grad(entmax(s, alpha)[0, 0], s)
    assert row[1].eq(0).all()
    assert abs(float(row[0].sum())) <= 1e-12, "shifting all scores changes nothing"
    _, tau = entmax(s, alpha, return_tau=True)
    assert not tau.requires_grad


rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40)
alphas = st.sampled_from(SPARSE) | st.floats(1.01, 2.0)


@some
@given(rows, alphas)
def test_property_bisection(values, alpha):
    s = torch.tensor(values, dtype=torch.float64)
    p, tau = entmax(s, alpha, return_tau=True)
    assert_near(s, alpha, p, tau)
    single, single_tau = entmax(s.float(), alpha, return_tau=True)
    assert_near(s.float(), alpha, single, single_tau)


@some
@given(rows, alphas, st.floats(-1000, 1000))
def test_property_shift_and_order(values, alpha, shift):
    s = torch.tensor(values, dtype=torch.float64)
    p, tau = entmax(s, alpha, return_tau=True)
    moved, moved_tau = entmax(s + shift, alpha, return_tau=True)
    assert (p - moved).abs().max() <= 1e-9
    assert float(moved_tau) == pytest.approx(float(tau) + (alpha - 1) * shift, abs=1e-9)
    order = s.argsort(descending=True, stable=True)
    assert entmax(s[order], alpha)[order.argsort()].sub(p).abs().max() <= 1e-13, "order does not matter"
    assert p[order].diff().le(0).all(), "a higher score has no less mass"


@some
@given(rows, alphas)
def test_property_mass_zeros_and_bracket(values, alpha):
    s, a = torch.tensor(values, dtype=torch.float64), alpha - 1
    p, tau = entmax(s, alpha, return_tau=True)
    top, slack = a * float(s.max()), 1e-13 * (1 + abs(a * float(s.max())))
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-13)
    assert p.ge(0).all()
    assert top - 1 - slack <= float(tau) <= top - len(values) ** (-a) + slack
    assert p[a * s < float(tau) - slack].eq(0).all(), "below the threshold exactly nothing"
    assert p[a * s > float(tau) + max(slack, 1e-300**a)].gt(0).all()


@some
@given(rows, alphas, st.data())
def test_property_truncation(values, alpha, data):
    """A selection: tau does not rise, p does not fall, and the L1 distance is twice the dropped mass."""
    s = torch.tensor(values, dtype=torch.float64)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    keep[data.draw(st.integers(0, len(values) - 1))] = True
    full, tau = entmax(s, alpha, return_tau=True)
    part, part_tau = entmax(s, alpha, mask=keep, return_tau=True)
    dropped = float(full[~keep].sum())
    assert float(part_tau) <= float(tau) + 1e-12
    assert (part - full)[keep].ge(-1e-12).all()
    assert float((part - full).abs().sum()) == pytest.approx(2 * dropped, abs=1e-11)
    if dropped == 0.0:
        assert (part - full).abs().max() <= 1e-13


def test_refusals():
    s = torch.zeros(2, 3)
    for alpha in (0.99, 2.01, -1.0, math.nan, math.inf, "1.5", None, True):
        with refused(OptionError, f"entmax: alpha is {alpha!r}, expected a number from 1 to 2"):
            entmax(s, alpha)  # type: ignore[arg-type]
    with refused(OptionError, "entmax: alpha is 2.5, expected a number from 1 to 2"):
        entmax(s, torch.tensor([1.5, 2.5]))
    with refused(OptionError, "entmax: alpha is nan, expected a number from 1 to 2"):
        entmax(s, torch.tensor([1.5, math.nan]))
    with refused(ShapeError, "entmax: alpha is [3], expected a shape that broadcasts to [2]"):
        entmax(s, torch.tensor([1.5, 1.5, 1.5]))
    with refused(FormatError, "entmax: alpha is torch.int64, expected a floating tensor without gradient"):
        entmax(s, torch.tensor([1, 2]))
    with refused(FormatError, "entmax: alpha is torch.float32 with requires_grad, expected a floating tensor without"):
        entmax(s, torch.tensor([1.5, 1.5], requires_grad=True))
    with refused(FormatError, "entmax: scores is torch.int64, expected float16, bfloat16, float32 or float64"):
        entmax(torch.zeros(3, dtype=torch.int64), 1.5)
    with refused(FormatError, "entmax: scores is list, expected a floating tensor"):
        entmax([1.0], 1.5)  # type: ignore[arg-type]
    for dim in (2, -3):
        with refused(ShapeError, f"entmax: dim is {dim}, expected an axis of scores [2, 3]"):
            entmax(s, 1.5, dim=dim)
    with refused(ShapeError, "entmax: dim is -1, expected an axis of scores []"):
        entmax(torch.tensor(1.0), 1.5)
    with refused(FormatError, "entmax: mask is torch.int64, expected a bool tensor, True where a score is kept"):
        entmax(s, 1.5, mask=torch.ones(3, dtype=torch.int64))
    with refused(ShapeError, "entmax: mask is [2], expected a shape that broadcasts to [2, 3]"):
        entmax(s, 1.5, mask=torch.ones(2, dtype=torch.bool))
