"""Selections: the best bounds, the likely maxima, and the certificate that nothing was lost."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowlib.entmax import (
    Selection,
    certified_exact,
    certified_skip,
    entmax,
    gaussian_select,
    page_bounds,
    page_stats,
    topk_select,
)
from flowlib.entmax.gaussian import page_quantile
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.testing.oracles.bisection import attention_scores, entmax_row
from tests.refusals import refused

NAN, INF = math.nan, math.inf
some = settings(
    max_examples=80, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def pages_of(selection, b, h):
    """The list of one head, which must be ascending and padded with -1."""
    count = int(selection.counts[b, h])
    row = selection.pages[b, h].tolist()
    assert row[count:] == [-1] * (len(row) - count)
    assert row[:count] == sorted(set(row[:count]))
    assert selection.pages.dtype is selection.counts.dtype is selection.sel_lens.dtype is torch.int32
    return row[:count]


# page:      0    1    2    3    4    5    6    7
BOUNDS = [[2.0, 9.0, 5.0, 5.0, -INF, 5.0, NAN, 1.0]]


@pytest.mark.parametrize(
    ("length", "k", "pages", "tokens"),
    [
        (32, 2, [1, 7], 8),  # an exact multiple: the last full page is the tail
        (29, 3, [1, 2, 7], 9),  # the tie of pages 2, 3 and 5 goes to the lowest
        (30, 4, [1, 2, 3, 7], 14),
        (29, 6, [0, 1, 2, 3, 5, 7], 21),
        (29, 8, [0, 1, 2, 3, 5, 7], 21),  # -inf and NaN never, not even to fill the budget
        (9, 4, [0, 1, 2], 9),  # fewer pages before the tail than asked for
        (8, 3, [0, 1], 8),
        (3, 2, [0], 3),
        (1, 2, [0], 1),
    ],
)
def test_topk_by_hand(length, k, pages, tokens):
    selection = topk_select(torch.tensor([BOUNDS] * 2), lens(length, 32), k, 4)
    assert selection.pages.shape == (2, 1, k)
    assert pages_of(selection, 0, 0) == pages
    assert int(selection.sel_lens[0, 0]) == tokens


def test_topk_of_an_empty_row():
    selection = topk_select(torch.zeros(2, 3, 4), lens(0, 9), 3, 4)
    assert selection.pages[0].eq(-1).all()
    assert selection.counts[0].eq(0).all()
    assert selection.sel_lens[0].eq(0).all()


@some
@given(
    st.lists(st.sampled_from([-INF, NAN, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=24),
    st.integers(2, 12),
    st.sampled_from([1, 2, 16]),
    st.data(),
)
def test_topk_property(values, k, page_size, data):
    length = data.draw(st.integers(0, len(values) * page_size))
    tail = (length - 1) // page_size
    bounds = torch.tensor([[values]])
    if -(-length // page_size) < k - 1:
        with refused(OptionError, "decode exactly"):
            topk_select(bounds, lens(length), k, page_size)
        return
    eligible = [p for p in range(max(tail, 0)) if values[p] > -INF]
    chosen = sorted(eligible, key=lambda p: (-values[p], p))[: k - 1]
    selection = topk_select(bounds, lens(length), k, page_size)
    assert pages_of(selection, 0, 0) == sorted(chosen) + [tail] * (tail >= 0)
    counted = len(chosen) * page_size + length - tail * page_size if length else 0
    assert int(selection.sel_lens[0, 0]) == counted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_topk_of_many_equal_pages(dtype):
    """2^20 tokens, all equal, then one better page: the lowest pages and that one, whatever the sort does to ties."""
    bounds = torch.full((1, 2, 1 << 16), 3.0, dtype=dtype)
    bounds[0, 1, 60000] = 3.5
    selection = topk_select(bounds, lens(1 << 20), 5, 16)
    assert pages_of(selection, 0, 0) == [0, 1, 2, 3, 65535]
    assert pages_of(selection, 0, 1) == [0, 1, 2, 60000, 65535]
    assert selection.sel_lens.tolist() == [[80, 80]]


@pytest.mark.parametrize(
    ("q", "page_size", "z"), [(0.995, 16, 3.419888), (0.995, 32, 3.604081), (0.995, 64, 3.780306), (0.5, 16, 1.723526)]
)
def test_quantile_of_the_page_maximum(q, page_size, z):
    assert page_quantile("test", q, page_size) == pytest.approx(z, abs=5e-7)


def moments(rows=2, heads=3, pages=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(rows, heads, pages, generator=g, dtype=torch.float64)
    return mu, 0.05 + 0.3 * torch.rand(rows, heads, pages, generator=g, dtype=torch.float64)


def rule(mu, sigma, tau, hist, page_size, alpha, z, q, excess, known=-INF):
    """Pages of one head by the rule, in plain Python."""
    a, m, s = alpha - 1, mu[:hist].tolist(), sigma[:hist].tolist()
    mean = sum(m) / hist
    spread = math.sqrt(sum(x * x for x in s) / hist + sum((x - mean) ** 2 for x in m) / hist)
    upper = sum(x + 1.5 * y for x, y in zip(m, s, strict=True)) / hist
    floor = float(tau) - a * max(z * spread, excess * max(float(tau) / a - upper, 0.0))
    floor = max(floor, a * known - 1)
    z_page = NormalDist().inv_cdf(q ** (1 / page_size))
    return [p for p in range(hist) if a * (m[p] + z_page * s[p]) > floor]


@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 2.0])
@pytest.mark.parametrize(("z", "q", "excess"), [(0.3, 0.995, 0.1), (0.0, 0.5, 0.0), (0.0, 0.995, 2.0)])
def test_gaussian_rule(alpha, z, q, excess):
    mu, sigma = moments()
    tau = torch.tensor([[0.3, 0.8, 1.1], [0.1, 0.5, 0.9]], dtype=torch.float64)
    lengths, width = (11 * 16, 100), 11
    mu[1, :, 7:], sigma[1, :, 7:] = NAN, NAN
    selection = gaussian_select(mu, sigma, tau, lens(*lengths), 16, alpha, z, q, excess)
    sizes = set()
    for b, length in enumerate(lengths):
        hist = (length - 1) // 16
        for h in range(3):
            wanted = rule(mu[b, h], sigma[b, h], tau[b, h], hist, 16, alpha, z, q, excess)
            assert pages_of(selection, b, h) == [*wanted, hist]
            assert int(selection.sel_lens[b, h]) == len(wanted) * 16 + length - hist * 16
            sizes.add(len(wanted))
    assert selection.pages.shape == (2, 3, width)
    assert len(sizes) > 1, "the rule tells heads apart"


def test_gaussian_rule_is_strict_and_the_tail_stays():
    mu, sigma = torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 3, dtype=torch.float64)
    tau = torch.tensor([[0.0, -1e-12]], dtype=torch.float64)
    selection = gaussian_select(mu, sigma, tau, lens(9), 4, 2.0, excess=0.0)
    assert pages_of(selection, 0, 0) == [2], "a page at the floor is left out, the tail never is"
    assert pages_of(selection, 0, 1) == [0, 1, 2]
    assert gaussian_select(mu, sigma, tau, lens(0), 4, 2.0).counts.eq(0).all()


def test_gaussian_per_head_alpha():
    mu, sigma = moments(seed=1)
    tau = torch.full((2, 3), 0.5, dtype=torch.float64)
    alphas = [1.25, 1.5, 2.0]
    selection = gaussian_select(mu, sigma, tau, lens(170, 170), 16, torch.tensor(alphas, dtype=torch.float64))
    for h, alpha in enumerate(alphas):
        alone = gaussian_select(mu[:, h : h + 1], sigma[:, h : h + 1], tau[:, h : h + 1], lens(170, 170), 16, alpha)
        assert pages_of(selection, 1, h) == pages_of(alone, 1, 0)


def test_a_known_score_raises_the_floor():
    """A steep slope: the tail's score is far above the rest, and the estimate, which ignores the tail, far too low."""
    mu, sigma = moments(rows=1, seed=2)
    tau = torch.full((1, 3), -3.0, dtype=torch.float64)
    known = torch.tensor([[-INF, 2.2, 40.0]], dtype=torch.float64)
    selection = gaussian_select(mu, sigma, tau, lens(176), 16, 1.5, known=known)
    assert pages_of(selection, 0, 0) == list(range(11))
    for h in (1, 2):
        wanted = rule(mu[0, h], sigma[0, h], -3.0, 10, 16, 1.5, 0.0, 0.995, 0.1, float(known[0, h]))
        assert pages_of(selection, 0, h) == [*wanted, 10]
    assert 0 < len(pages_of(selection, 0, 1)) - 1 < 10
    bounds = torch.full((1, 3, 11), 0.1, dtype=torch.float64)  # 0.05 <= 0.5 · 2.2 − 1: no page can hold support
    assert pages_of(gaussian_select(mu, sigma, tau, lens(176), 16, 1.5, known=known, bounds=bounds), 0, 1) == [10]


def scene(seed, page_size=4, tokens=61, heads=(4, 2), dim=6, scale=2.0):
    """One request in float64: scores [H_q, T], bounds [1, H_q, P], lengths."""
    g = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(heads[0], dim, generator=g, dtype=torch.float64)
    k = torch.randn(tokens, heads[1], dim, generator=g, dtype=torch.float64)
    shared = torch.randn(-(-tokens // 8), heads[1], dim, generator=g, dtype=torch.float64)
    k = k + shared.repeat_interleave(8, 0)[:tokens]
    count = -(-tokens // page_size)
    pool = torch.full((count * page_size, heads[1], dim), NAN, dtype=torch.float64)
    pool[:tokens] = k
    stats = page_stats(pool.view(count, page_size, heads[1], dim))
    slopes = torch.tensor([0.05, 0.0, -0.02, 0.0], dtype=torch.float64)[: heads[0]]
    bounds = page_bounds(q[None], stats.k_min, stats.k_max, lens(tokens), page_size, alibi_slopes=slopes)
    return attention_scores(q, k, slopes.tolist()), bounds


@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_certified_means_that_no_mass_was_dropped(alpha, seed):
    scores, bounds = scene(seed)
    found = set()
    for k in range(2, 16):
        selection = topk_select(bounds, lens(61), k, 4)
        keep = torch.stack([(torch.arange(61)[:, None] // 4 == row[None]).any(-1) for row in selection.pages[0]])
        p, tau = entmax(scores, alpha, mask=keep, return_tau=True)
        flags = certified_exact(bounds, selection, tau[None], alpha, lens(61), 4)
        for h in range(4):
            full = entmax_row(scores[h], alpha)
            dropped = float(full.p[~keep[h]].sum())
            assert float((p[h] - full.p).abs().sum()) == pytest.approx(2 * dropped, abs=1e-11)
            assert float(tau[h]) <= full.tau + 1e-12
            if flags[0, h]:
                assert dropped == 0.0
                assert (p[h] - full.p).abs().max() <= 1e-12
            found.add((bool(flags[0, h]), k < 15))
    assert {(True, True), (False, True)} <= found, "some selections are certified, some are not"


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_skipping_by_a_known_score_loses_nothing(alpha, seed):
    scores, bounds = scene(seed, scale=4.0)
    known = scores[:, 60:].amax(-1)[None]  # the tail of one token
    skip = certified_skip(bounds, known, alpha)
    assert skip[0, :, 15].all(), "the tail's own bound is -inf: whoever skips keeps the tail"
    for h in range(4):
        keep = ~skip[0, h].repeat_interleave(4)[:61]
        keep[60:] = True
        full = entmax_row(scores[h], alpha)
        assert float(full.p[~keep].sum()) == 0.0
        assert (entmax(scores[h], alpha, mask=keep) - full.p).abs().max() <= 1e-12


def test_pages_are_skipped_where_scores_lie_apart():
    bounds = torch.tensor([[[0.9, 1.1, -5.0, -INF, NAN]] * 3])
    known = torch.tensor([[3.0, 3.0, 3.0]])
    skip = certified_skip(bounds, known, torch.tensor([1.0, 1.5, 2.0]))
    assert skip[0, 0].tolist() == [False] * 5, "softmax has no zeros"
    assert skip[0, 1].tolist() == [True, False, True, True, False], "0.5 · bound <= 0.5 · 3 − 1; NaN is never skipped"
    assert skip[0, 2].tolist() == [True, True, True, True, False]
    unknown = certified_skip(bounds, torch.full((1, 3), -INF), 1.5)
    assert not unknown[0, :, :3].any()


def test_certificates_by_hand():
    bounds = torch.tensor([[[1.0, 4.0, 2.0, -INF]] * 4])
    pages = torch.tensor([[[1, 3, -1, -1]] * 3 + [[0, 1, 2, 3]]], dtype=torch.int32)
    selection = Selection(pages, (pages >= 0).sum(-1).int(), torch.zeros(1, 4, dtype=torch.int32))
    tau = torch.tensor([[1.0, 0.9, 1.0, -9.0]])
    alpha = torch.tensor([1.5, 1.5, 1.0, 1.0])
    got = certified_exact(bounds, selection, tau, alpha, lens(14), 4)
    assert got.tolist() == [[True, False, False, True]], "0.5 · 2 <= tau or not; softmax only with all pages"
    bounds[0, 0, 0] = NAN
    assert not certified_exact(bounds, selection, tau, 1.5, lens(14), 4)[0, 0]
    short = certified_exact(bounds, selection, tau, 1.5, lens(3), 4)
    assert short.all(), "nothing before the tail"


def test_refusals_of_topk():
    bounds = torch.zeros(2, 3, 8)
    for k in (1, 0, -3, 2.0, True, None):
        with refused(OptionError, f"topk_select: topk_pages is {k!r}, expected an integer of at least 2"):
            topk_select(bounds, lens(32, 9), k, 4)
    with refused(OptionError, "topk_select: topk_pages is 6, and no row has more than 3 pages: decode exactly"):
        topk_select(bounds, lens(12, 9), 6, 4)
    with refused(OptionError, "topk_select: page_size is 6, expected a positive power of two"):
        topk_select(bounds, lens(32, 9), 3, 6)
    with refused(ShapeError, "topk_select: bounds is [3, 8], expected [B, H_q, P]"):
        topk_select(bounds[0], lens(32, 9), 3, 4)
    with refused(FormatError, "topk_select: seq_lens is torch.int64, expected an int32 tensor"):
        topk_select(bounds, torch.tensor([3, 4]), 3, 4)
    with refused(BatchError, "topk_select: seq_lens has 33, expected from 0 to 32, what the pages hold"):
        topk_select(bounds, lens(33, 9), 3, 4)


def test_refusals_of_gaussian_selection():
    mu, tau = torch.zeros(1, 2, 3), torch.zeros(1, 2)

    def select(**changes):
        arguments = {"mu": mu, "sigma": mu, "tau": tau, "seq_lens": lens(9), "page_size": 4, "alpha": 1.5, **changes}
        return gaussian_select(**arguments)

    for alpha in (1.0, 0.5, 2.5):
        with refused(OptionError, f"gaussian_select: alpha is {alpha}, expected a number above 1 and at most 2"):
            select(alpha=alpha)
    with refused(OptionError, "gaussian_select: alpha is 1.0, expected a number above 1 and at most 2"):
        select(alpha=torch.tensor([1.5, 1.0]))
    for z in (-0.1, NAN, "1"):
        with refused(OptionError, f"gaussian_select: safety_margin_z is {z!r}, expected a number of at least 0"):
            select(safety_margin_z=z)
    with refused(OptionError, "gaussian_select: excess is -1.0, expected a number of at least 0"):
        select(excess=-1.0)
    for q in (0.0, 1.0, -0.5, 1.5):
        with refused(OptionError, f"gaussian_select: max_quantile is {q}, expected a number above 0 and below 1"):
            select(max_quantile=q)
    with refused(ShapeError, "gaussian_select: sigma is [1, 2, 4], expected [1, 2, 3] as mu"):
        select(sigma=torch.zeros(1, 2, 4))
    with refused(ShapeError, "gaussian_select: tau is [2], expected [1, 2] as mu"):
        select(tau=torch.zeros(2))
    with refused(ShapeError, "gaussian_select: known is [2, 1], expected [1, 2] as mu"):
        select(known=torch.zeros(2, 1))
    with refused(OptionError, "gaussian_select: bounds is given without known, the score they are held against"):
        select(bounds=mu)
    with refused(ShapeError, "gaussian_select: bounds is [1, 2, 2], expected [1, 2, 3] as mu"):
        select(bounds=mu[..., :2], known=tau)


def test_refusals_of_certificates():
    bounds, tau = torch.zeros(1, 2, 3), torch.zeros(1, 2)
    selection = topk_select(bounds, lens(9), 2, 4)
    with refused(ShapeError, "certified_exact: tau is [2], expected [1, 2] as bounds without pages"):
        certified_exact(bounds, selection, tau[0], 1.5, lens(9), 4)
    with refused(FormatError, "certified_exact: selection.pages is torch.int64, expected an int32 tensor"):
        certified_exact(bounds, selection._replace(pages=selection.pages.long()), tau, 1.5, lens(9), 4)
    with refused(BatchError, "certified_exact: selection.pages has 7, expected below the 3 of bounds"):
        certified_exact(bounds, selection._replace(pages=selection.pages.clamp(min=7)), tau, 1.5, lens(9), 4)
    with refused(OptionError, "certified_exact: alpha is 2.5, expected a number from 1 to 2"):
        certified_exact(bounds, selection, tau, 2.5, lens(9), 4)
    with refused(ShapeError, "certified_skip: known is [2], expected [1, 2] as bounds without pages"):
        certified_skip(bounds, tau[0], 1.5)
    with refused(ShapeError, "certified_skip: alpha is [3], expected a shape that broadcasts to [2]"):
        certified_skip(bounds, tau, torch.tensor([1.5, 1.5, 1.5]))
