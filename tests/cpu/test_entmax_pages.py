"""Statistics of pages, the bound of every score in a page, and the moments of its scores."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowlib.entmax import page_bounds, page_moments, page_stats
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.testing import gamma
from flowlib.testing.oracles.bisection import attention_scores
from tests.refusals import refused
from tests.suites.entmax_world import World

some = settings(
    max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

LENGTHS = [41, 1, 16, 17, 0, 26]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_statistics(dtype, page_size):
    k = torch.randn(5, page_size, 3, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    stats = page_stats(k)
    assert stats.k_min.dtype is stats.k_max.dtype is dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert stats.k_mean.dtype is stats.k_std.dtype is wide
    torch.testing.assert_close(stats.k_min, k.min(1).values, rtol=0, atol=0)
    torch.testing.assert_close(stats.k_max, k.max(1).values, rtol=0, atol=0)
    truth, step = k.double(), gamma(page_size + 8, wide)
    allowed = step * truth.abs().sum(1)
    assert (stats.k_mean.double() - truth.mean(1)).abs().le(allowed).all()
    assert (stats.k_std.double() - truth.std(1, correction=0)).abs().le(allowed).all()


def test_deviation_beside_a_large_mean():
    """E[k²] − mean² would have no digit left: the mean is 10⁴ deviations away."""
    g = torch.Generator().manual_seed(2)
    k = (1000.0 + 0.1 * torch.randn(3, 16, 2, 5, generator=g)).float()
    std, wide = page_stats(k, ("gaussian",)).k_std.double(), k.double()
    assert (std / wide.std(1, correction=0) - 1).abs().max() <= 1e-5
    cancelled = ((k * k).mean(1) - k.mean(1) ** 2).clamp(min=0).sqrt().double()
    assert (cancelled / wide.std(1, correction=0) - 1).abs().max() >= 0.1, "the trap is one"
    assert page_stats(torch.full((1, 16, 1, 2), 3.3), ("gaussian",)).k_std.eq(0).all()


def test_sets_are_kept_as_asked():
    k = torch.zeros(2, 4, 1, 3)
    assert page_stats(k, ("topk",))[2:] == (None, None)
    assert page_stats(k, ("gaussian",))[:2] == (None, None)
    assert page_stats(k, ()) == (None,) * 4
    assert all(s.shape == (2, 1, 3) for s in page_stats(k, ("gaussian", "topk", "topk")))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_score_exceeds_the_bound_of_its_page(heads, dtype):
    world = World(LENGTHS, heads=heads, dtype=dtype, seed=3)
    slopes = torch.linspace(-1.0, 1.0, heads[0])
    for s in (None, slopes):
        bounds = world.bounds(s)
        assert bounds.shape == (len(LENGTHS), heads[0], world.table.shape[1])
        assert bounds.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        for b in range(len(LENGTHS)):
            n = world.scored(b)
            assert bounds[b, :, n:].eq(-math.inf).all()
            scores = attention_scores(world.q[b], world.k[b], None if s is None else s.tolist())
            best = scores[:, : n * 4].unflatten(1, (n, 4)).amax(-1) if n else scores[:, :0]
            slack = gamma(2 * 12 + 8, bounds.dtype) * (1 + bounds[b, :, :n].abs().double() + 40)
            assert (bounds[b, :, :n].double() >= best - slack).all()


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.75])
def test_bound_by_formula(slope):
    """Σ_d max(q·min, q·max) / sqrt(D) before the bias is added, and ALiBi of the best slot, at logical positions."""
    world = World([23, 9], dtype=torch.float64, seed=4)
    slopes = torch.tensor([slope, 0.0, 2 * slope, slope], dtype=torch.float64)
    bounds = world.bounds(slopes)
    for b in range(2):
        for h in range(4):
            for p in range(world.scored(b)):
                keys = world.k[b][p * 4 : p * 4 + 4, h // 2]
                q = world.q[b, h]
                inner = sum(max(float(q[d] * keys[:, d].min()), float(q[d] * keys[:, d].max())) for d in range(12))
                position = p * 4 + 3 if slopes[h] >= 0 else p * 4
                bias = float(slopes[h]) * (position - (world.lengths[b] - 1))
                assert float(bounds[b, h, p]) == pytest.approx(inner / math.sqrt(12) + bias, abs=1e-12)


def test_a_page_of_one_key_has_its_score_as_bound():
    world = World([7, 5], page_size=1, dtype=torch.float64, seed=5)
    slopes = torch.tensor([0.5, 0.0, -0.5, 0.25], dtype=torch.float64)
    bounds = world.bounds(slopes)
    mu, sigma = world.moments(slopes)
    for b, n in enumerate(world.lengths):
        scores = attention_scores(world.q[b], world.k[b], slopes.tolist())[:, : n - 1]
        torch.testing.assert_close(bounds[b, :, : n - 1], scores, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(mu[b, :, : n - 1], scores, rtol=1e-13, atol=1e-13)
    assert sigma.eq(0).all()


def test_slopes_belong_to_query_heads():
    """Trap: four query heads on two kv heads; the slope of head 1 is not that of head 0, nor of kv head 1."""
    world = World([33], seed=6, dtype=torch.float64)
    none, some_slopes = world.bounds(), world.bounds(torch.tensor([0.0, 8.0, 0.0, 8.0]))
    pages = torch.arange(8, dtype=torch.float64)
    torch.testing.assert_close(some_slopes[0, [0, 2], :8], none[0, [0, 2], :8], rtol=0, atol=0)
    bias = 8.0 * (pages * 4 + 3 - 32)
    torch.testing.assert_close(some_slopes[0, [1, 3], :8], none[0, [1, 3], :8] + bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_taken_in_float32(dtype):
    """Trap: rounding q / sqrt(D) or the products to 16 bits costs three digits."""
    world = World([129, 70], dim=40, dtype=dtype, seed=7)
    twin = World([129, 70], dim=40, dtype=dtype, seed=7)
    twin.q, twin.stats = twin.q.double(), page_stats(twin.kv[0].double())
    step = gamma(40 + 8)
    for got, wanted in zip((world.bounds(), *world.moments()), (twin.bounds(), *twin.moments()), strict=True):
        finite = wanted.isfinite()
        size = wanted[finite].abs().max() + 40
        assert (got[finite].double() - wanted[finite]).abs().max() <= step * size
        assert step * size < torch.finfo(dtype).eps / 2, "what 16 bits would cost is more"


def test_moments_by_formula():
    world = World([41, 26], dtype=torch.float64, seed=8)
    slopes = torch.tensor([0.25, 0.0, -0.5, 0.0], dtype=torch.float64)
    mu, sigma = world.moments(slopes)
    for b in range(2):
        n = world.scored(b)
        assert mu[b, :, n:].eq(-math.inf).all()
        assert sigma[b, :, n:].eq(0).all()
        scores = attention_scores(world.q[b], world.k[b], slopes.tolist())[:, : n * 4].unflatten(1, (n, 4))
        torch.testing.assert_close(mu[b, :, :n], scores.mean(-1), rtol=1e-12, atol=1e-12)
        for h in range(4):
            for p in range(n):
                deviation = world.k[b][p * 4 : p * 4 + 4, h // 2].std(0, correction=0)
                wanted = math.sqrt(float((world.q[b, h] ** 2 * deviation**2).sum()) / 12)
                assert float(sigma[b, h, p]) == pytest.approx(wanted, rel=1e-12)


def test_physical_order_changes_nothing():
    worlds = [World(LENGTHS, seed=9, order=order, width=40) for order in (1, 2)]
    assert not worlds[0].table.equal(worlds[1].table)
    slopes = torch.tensor([0.5, 0.0, -0.25, 0.0])
    torch.testing.assert_close(worlds[0].bounds(slopes), worlds[1].bounds(slopes), rtol=0, atol=0)
    for a, b in zip(worlds[0].moments(slopes), worlds[1].moments(slopes), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_without_a_table_rows_have_their_pages_in_turn():
    k = torch.randn(6, 4, 2, 12, generator=torch.Generator().manual_seed(10))
    stats, q = page_stats(k), torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(11))
    lens = torch.tensor([12, 9], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    given_table = page_bounds(q, stats.k_min, stats.k_max, lens, 4, table)
    torch.testing.assert_close(page_bounds(q, stats.k_min, stats.k_max, lens, 4), given_table, rtol=0, atol=0)
    with refused(ShapeError, "page_bounds: there are 6 blocks for 4 rows, expected a multiple where block_table is"):
        page_bounds(q.repeat(2, 1, 1), stats.k_min, stats.k_max, lens.repeat(2), 4)


@some
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.integers(0, 2**31),
    st.lists(st.floats(-2, 2), min_size=4, max_size=4),
)
def test_property_bound_dominates(lengths, page_size, heads, seed, slopes):
    if max(lengths) == 0:
        lengths = [1]
    world = World(lengths, heads=heads, dim=5, page_size=page_size, dtype=torch.float64, seed=seed)
    bounds = world.bounds(torch.tensor(slopes[: heads[0]], dtype=torch.float64))
    for b in range(len(lengths)):
        n = world.scored(b)
        scores = attention_scores(world.q[b], world.k[b], slopes[: heads[0]])[:, : n * page_size]
        best = scores.unflatten(1, (n, page_size)).amax(-1) if n else scores
        assert (bounds[b, :, :n] >= best - 1e-11).all()


def test_refusals():
    q, k, lens = torch.zeros(2, 4, 8), torch.zeros(6, 2, 8), torch.tensor([9, 12], dtype=torch.int32)
    table = torch.zeros(2, 3, dtype=torch.int32)

    def bounds(q=q, k_min=k, k_max=k, lens=lens, page_size=4, table=table, slopes=None):
        return page_bounds(q, k_min, k_max, lens, page_size, table, slopes)

    for page_size in (0, 3, -4, 4.0, True, None):
        with refused(OptionError, f"page_bounds: page_size is {page_size!r}, expected a positive power of two"):
            bounds(page_size=page_size)
    with refused(ShapeError, "page_bounds: q is [4, 8], expected [B, H_q, D]"):
        bounds(q=torch.zeros(4, 8))
    with refused(FormatError, "page_bounds: q is torch.int32, expected float16, bfloat16, float32 or float64"):
        bounds(q=torch.zeros(2, 4, 8, dtype=torch.int32))
    with refused(ShapeError, "page_bounds: k_max is [5, 2, 8], expected [6, 2, 8] as k_min"):
        bounds(k_max=torch.zeros(5, 2, 8))
    with refused(ShapeError, "page_bounds: axis D of k_min is 9, expected 8 as in q"):
        bounds(k_min=torch.zeros(6, 2, 9), k_max=torch.zeros(6, 2, 9))
    with refused(ShapeError, "page_bounds: q has 4 heads, expected a multiple of the 3 kv heads"):
        bounds(k_min=torch.zeros(6, 3, 8), k_max=torch.zeros(6, 3, 8))
    with refused(FormatError, "page_bounds: seq_lens is torch.int64, expected an int32 tensor"):
        bounds(lens=lens.long())
    with refused(FormatError, "page_bounds: seq_lens is list, expected an int32 tensor"):
        bounds(lens=[9, 12])
    with refused(ShapeError, "page_bounds: seq_lens is [3], expected [2]"):
        bounds(lens=torch.ones(3, dtype=torch.int32))
    for bad in (13, -1):
        with refused(BatchError, f"page_bounds: seq_lens has {bad}, expected from 0 to 12, what the pages hold"):
            bounds(lens=torch.tensor([9, bad], dtype=torch.int32))
    with refused(FormatError, "page_bounds: block_table is torch.int64, expected an int32 tensor"):
        bounds(table=table.long())
    with refused(ShapeError, "page_bounds: block_table is [3, 3], expected [2, any]"):
        bounds(table=torch.zeros(3, 3, dtype=torch.int32))
    with refused(ShapeError, "page_bounds: alibi_slopes is [2], expected [4], one for each query head"):
        bounds(slopes=torch.zeros(2))
    with refused(FormatError, "page_bounds: alibi_slopes is float, expected a floating tensor"):
        bounds(slopes=0.5)
    with refused(ShapeError, "page_moments: k_std is [6, 1, 8], expected [6, 2, 8] as k_mean"):
        page_moments(q, k, torch.zeros(6, 1, 8), lens, 4, table)


def test_refusals_of_statistics():
    with refused(OptionError, "page_stats: stats has 'mean', expected names out of 'topk', 'gaussian'"):
        page_stats(torch.zeros(2, 4, 1, 3), ("topk", "mean"))
    with refused(OptionError, "page_stats: stats is 'topk', expected a sequence of names: ('topk',)"):
        page_stats(torch.zeros(2, 4, 1, 3), "topk")
    with refused(ShapeError, "page_stats: k is [4, 1, 3], expected [num_blocks, page_size, H_kv, D]"):
        page_stats(torch.zeros(4, 1, 3))
    with refused(OptionError, "page_stats: page_size (axis 1 of k) is 3, expected a positive power of two"):
        page_stats(torch.zeros(2, 3, 1, 3))
    with refused(FormatError, "page_stats: k is torch.int64, expected float16, bfloat16, float32 or float64"):
        page_stats(torch.zeros(2, 4, 1, 3, dtype=torch.int64))
