"""Decoding over a PagedKVCache: selections, routing by row, certificates and outputs, against plain loops."""

import math

import pytest
import torch

from flowlib.entmax import certified_exact, gaussian_decode, gaussian_tau, page_bounds, page_moments, topk_decode
from flowlib.testing.oracles.bisection import attention_scores, entmax_request, gaussian_threshold
from tests.processes import python
from tests.suites.entmax_cache import BOTH, SLOPES, Scene, assert_rows, kept, pages_before_tail, relative


@pytest.mark.parametrize("slopes", [SLOPES, None])
@pytest.mark.parametrize("alpha", [1.0, 4 / 3, 1.5, 2.0])
def test_topk(alpha, slopes):
    scene = Scene()
    q, out = scene.queries()
    k, v = scene.token()
    scene.remember(k, v)
    info = []
    given = None if slopes is None else torch.tensor(slopes)
    assert topk_decode(q, scene.cache, k, v, out, 20, given, alpha, niter=8, info=info) is out
    assert scene.cache.seq_lens_host == (701, 438)
    assert info[0].exact_rows == (False, False)
    assert info[0].selection.pages.shape == (2, 4, 20)
    for b in range(2):
        hist = pages_before_tail(scene, b)
        for h in range(4):
            keys = scene.k[b][: hist * 16, h // 2].double().unflatten(0, (hist, 16))
            query = q[b, h, 0].double() / math.sqrt(32)
            inner = torch.maximum(query * keys.amin(1), query * keys.amax(1)).sum(-1)
            slope = 0.0 if slopes is None else slopes[h]
            bound = inner + slope * (torch.arange(hist) * 16 + 15 - (len(scene.k[b]) - 1))
            best = sorted(bound.argsort(descending=True)[:19].tolist())
            assert info[0].selection.pages[b, h].tolist() == [*best, hist]
    assert_rows(scene, q, out, alpha, info[0], slopes)


def test_more_pages_than_there_are_decode_exactly(monkeypatch):
    scene = Scene()
    q, out = scene.queries()
    monkeypatch.setattr("flowlib.entmax.decode.topk_select", None)  # whoever selects, fails
    monkeypatch.setattr("flowlib.entmax.decode.page_bounds", None)
    info = []
    topk_decode(q, scene.cache, None, None, out, 64, torch.tensor(SLOPES), append_cache=False, info=info)
    assert info[0].exact_rows == (True, True)
    assert info[0].certified.all()
    assert info[0].selection.counts.tolist() == [[44] * 4, [28] * 4]
    assert_rows(scene, q, out, 1.5, info[0])


@pytest.mark.parametrize("order", [(700, 100, 437, 16, 1), (1, 16, 437, 100, 700)])
def test_rows_are_routed_one_by_one(order):
    """Short rows are decoded exactly; long ones beside them select as if they were alone."""
    scene = Scene(order, seed=3)
    q, out = scene.queries()
    info = []
    options = {"alibi_slopes": torch.tensor(SLOPES), "info": info}
    topk_decode(q, scene.cache, None, None, out, 10, append_cache=False, min_context=438, **options)
    assert info[0].exact_rows == tuple(n < 438 for n in order)
    assert_rows(scene, q, out, 1.5, info[0])
    for b, n in enumerate(order):
        full, _ = entmax_request(q[b, :, 0], scene.k[b], scene.v[b], 1.5, SLOPES)
        same = (out[b, :, 0].double() - full).abs().max() <= 1e-5
        assert same or n == 700
        assert int(info[0].selection.counts[b, 0]) == (10 if n == 700 else -(-n // 16))
    gaussian = []
    gaussian_decode(q, scene.cache, None, None, out, alibi_slopes=torch.tensor(SLOPES), niter=8, info=gaussian)
    assert gaussian[0].exact_rows == tuple(n <= 16 for n in order)
    assert_rows(scene, q, out, 1.5, gaussian[0])


def moments_by_loops(scene, q, b, h):
    """mu, sigma of the pages before the tail of one head, by formula, float64."""
    hist = pages_before_tail(scene, b)
    keys = scene.k[b][: hist * 16, h // 2].double().unflatten(0, (hist, 16))
    query = q[b, h, 0].double() / math.sqrt(32)
    centre = torch.arange(hist, dtype=torch.float64) * 16 + 7.5 - (len(scene.k[b]) - 1)
    sigma = (query**2 * keys.var(1, correction=0)).sum(-1).sqrt()
    return (keys.mean(1) * query).sum(-1) + SLOPES[h] * centre, sigma


@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 2.0])
def test_gaussian_statistics_and_threshold(alpha):
    scene = Scene()
    cache, (q, _) = scene.cache, scene.queries()
    slopes = torch.tensor(SLOPES)
    stats = cache.page_stats
    table = cache.block_table[:, : cache.live_pages]
    mu, sigma = page_moments(q[:, :, 0], stats.k_mean, stats.k_std, cache.seq_lens, 16, table, slopes)
    tau = gaussian_tau(mu, sigma, cache.seq_lens, 16, alpha, slopes != 0)
    for b in range(2):
        hist = pages_before_tail(scene, b)
        for h in range(4):
            m, s = moments_by_loops(scene, q, b, h)
            assert (mu[b, h, :hist].double() - m).abs().max() <= 1e-4
            assert (sigma[b, h, :hist].double() - s).abs().max() <= 1e-4
            count = torch.full((hist,), 16.0, dtype=torch.float64)
            if SLOPES[h] == 0:  # one normal for the row, where there is no slope
                s = ((s * s).mean() + m.var(correction=0)).sqrt()[None]
                m, count = m.mean()[None], count.sum()[None]
            wanted = gaussian_threshold(alpha, m, s, count)
            assert abs(float(tau[b, h]) - wanted) <= 1e-3 * max(1.0, abs(wanted))


@pytest.mark.parametrize("stats", [("gaussian",), BOTH])
@pytest.mark.parametrize("mode", ["exact", "corrected", "Corrected"])
@pytest.mark.parametrize("alpha", [4 / 3, 1.5, 2.0])
def test_gaussian(alpha, mode, stats):
    scene = Scene(seed=4, stats=stats)
    q, out = scene.queries()
    k, v = scene.token()
    scene.remember(k, v)
    info = []
    options = {"alpha": alpha, "niter": 8, "append_cache": True, "tau_mode": mode, "info": info}
    assert gaussian_decode(q, scene.cache, k, v, out, alibi_slopes=torch.tensor(SLOPES), **options) is out
    assert scene.cache.seq_lens_host == (701, 438)
    assert_rows(scene, q, out, alpha, info[0])
    assert (info[0].mass - 1).abs().max() <= 1e-5
    counts = info[0].selection.counts
    assert counts.float().mean() < 30, "pages are left out"
    assert counts.min() < counts.max()


def test_the_fixed_threshold_is_the_estimate():
    scene = Scene(seed=5)
    cache, (q, out) = scene.cache, scene.queries()
    info, slopes = [], torch.tensor(SLOPES)
    gaussian_decode(q, cache, None, None, out, alibi_slopes=slopes, tau_mode="fixed", info=info)
    stats, table = cache.page_stats, cache.block_table[:, : cache.live_pages]
    mu, sigma = page_moments(q[:, :, 0], stats.k_mean, stats.k_std, cache.seq_lens, 16, table, slopes)
    tau = gaussian_tau(mu, sigma, cache.seq_lens, 16, 1.5, slopes != 0)
    torch.testing.assert_close(info[0].tau, tau, rtol=1e-6, atol=1e-6)
    for b in range(2):
        keep = kept(info[0], b, len(scene.k[b]))
        s = attention_scores(q[b, :, 0], scene.k[b], SLOPES).masked_fill(~keep, -math.inf)
        p = (0.5 * s - tau[b].double()[:, None]).clamp(min=0) ** 2
        torch.testing.assert_close(info[0].mass[b].double(), p.sum(-1), rtol=1e-4, atol=1e-4)
        for h in range(4):
            truth = p[h] @ scene.v[b][:, h // 2].double()
            assert (out[b, h, 0].double() - truth).abs().max() <= 1e-4 * (1 + float(p[h].sum()))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_certified_heads_lose_nothing(alpha):
    """Keys that differ from page to page: bounds tell pages apart, and some selections are proven exact."""
    flags, dropped = set(), []
    for seed in range(3):
        scene = Scene((333, 129), seed=seed, shared=2.0)
        q, out = scene.queries()
        for topk_pages in (None, 2, 7):
            info, options = [], {"alpha": alpha, "niter": 8, "append_cache": False}
            if topk_pages is None:
                gaussian_decode(q, scene.cache, None, None, out, info=info, **options)
            else:
                topk_decode(q, scene.cache, None, None, out, topk_pages, info=info, **options)
            for b in range(2):
                keep = kept(info[0], b, len(scene.k[b]))
                full, p = entmax_request(q[b, :, 0], scene.k[b], scene.v[b], alpha)
                for h in range(4):
                    lost = float(p[h][~keep[h]].sum())
                    if info[0].certified[b, h]:
                        assert lost == 0.0
                        assert (out[b, h, 0].double() - full[h]).abs().max() <= 1e-5
                    away = (out[b, h, 0].double() - full[h]).norm()
                    assert away <= 2 * lost * scene.v[b][:, h // 2].double().norm(dim=-1).max() + 1e-4
                    flags.add(bool(info[0].certified[b, h]))
                    dropped.append(lost)
    assert flags == {True, False}
    assert max(dropped) > 0.0


def test_without_bounds_nothing_is_certified():
    scene = Scene(stats=("gaussian",))
    q, out = scene.queries()
    info = []
    gaussian_decode(q, scene.cache, None, None, out, info=info)
    assert not info[0].certified.any()


def test_a_threshold_that_is_too_high_certifies_nothing():
    """An estimate above the selection's own threshold leaves less mass than 1, and bounds below it prove nothing."""
    refused_flags = 0
    for seed in range(4):
        scene = Scene((333, 129), seed=seed, shared=2.0)
        cache, (q, out) = scene.cache, scene.queries()
        gaussian_decode(q, cache, None, None, out, tau_mode="fixed", info=(info := []))
        stats, table = cache.page_stats, cache.block_table[:, : cache.live_pages]
        bounds = page_bounds(q[:, :, 0], stats.k_min, stats.k_max, cache.seq_lens, 16, table)
        taken_at_its_word = certified_exact(bounds, info[0].selection, info[0].tau, 1.5, cache.seq_lens, 16)
        high = info[0].mass < 0.999
        assert not (info[0].certified & high).any()
        refused_flags += int((taken_at_its_word & high).sum())
    assert refused_flags > 0


def test_the_certificate_is_that_of_the_functions():
    scene = Scene(shared=2.0, seed=6)
    cache, (q, out) = scene.cache, scene.queries()
    info = []
    topk_decode(q, cache, None, None, out, 6, torch.tensor(SLOPES), append_cache=False, info=info)
    stats, table = cache.page_stats, cache.block_table[:, : cache.live_pages]
    bounds = page_bounds(q[:, :, 0], stats.k_min, stats.k_max, cache.seq_lens, 16, table, torch.tensor(SLOPES))
    wanted = certified_exact(bounds, info[0].selection, info[0].tau, 1.5, cache.seq_lens, 16)
    assert info[0].certified.equal(wanted)


def test_a_steep_slope_selects_few_pages():
    """The estimate ignores the tail and is far too low; the tail's exact scores raise it."""
    scene = Scene((700,), seed=7)
    q, out = scene.queries()
    info = []
    gaussian_decode(q, scene.cache, None, None, out, alibi_slopes=torch.full((4,), 2.0), niter=8, info=info)
    assert (info[0].selection.counts <= 3).all()
    assert_rows(scene, q, out, 1.5, info[0], [2.0] * 4)
    full, _ = entmax_request(q[0, :, 0], scene.k[0], scene.v[0], 1.5, [2.0] * 4)
    assert (out[0, :, 0].double() - full).abs().max() <= 1e-5


def test_seventy_steps_across_pages():
    """Appending and decoding in turn, every length modulo the page size; every step right on its selection."""
    scene = Scene((50, 33, 16), heads=(2, 1), dim=8, seed=8, max_seq_len=60)
    for step in range(70):
        q, out = scene.queries()
        info = []
        if step % 2:
            k, v = scene.token()
            scene.remember(k, v)
            topk_decode(q, scene.cache, k, v, out, 3, torch.tensor([0.1, 0.0]), info=info)
        else:
            scene.append()
            gaussian_decode(q, scene.cache, None, None, out, alibi_slopes=torch.tensor([0.1, 0.0]), niter=8, info=info)
        assert_rows(scene, q, out, 1.5, info[0], [0.1, 0.0])
    assert scene.cache.seq_lens_host == (120, 103, 86)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    scene = Scene((130, 77), dtype=dtype, seed=9)
    q, out = scene.queries()
    for run in (
        lambda info: topk_decode(q, scene.cache, None, None, out, 4, None, 1.5, None, False, info=info),
        lambda info: gaussian_decode(q, scene.cache, None, None, out, niter=8, info=info),
    ):
        info = []
        run(info)
        assert_rows(scene, q, out, 1.5, info[0], None)
    mixed = q.double() if dtype is torch.bfloat16 else q
    topk_decode(mixed, scene.cache, None, None, torch.empty_like(mixed), 4, None, 1.5, None, False)


def test_rounded_statistics_select_almost_the_same():
    """What is attended to is attended to exactly, whatever it was selected by."""
    counts = []
    for dtype in (None, torch.bfloat16):
        scene = Scene((333, 129), seed=14, shared=1.0, stats_dtype=dtype)
        q, out = scene.queries()
        gaussian_decode(q, scene.cache, None, None, out, niter=8, info=(info := []))
        assert_rows(scene, q, out, 1.5, info[0], None)
        counts.append(info[0].selection.counts)
    assert (counts[0] - counts[1]).abs().max() <= 2


def test_slots_nobody_wrote_are_never_read():
    scene = Scene((130, 77), seed=10)
    q, out = scene.queries()
    clean = out.clone()
    topk_decode(q, scene.cache, None, None, clean, 4, None, 1.5, None, False)
    for b, n in enumerate((130, 77)):
        first = b * scene.cache.max_pages
        for t in range(n, scene.cache.max_pages * 16):
            scene.cache.kv[:, first + t // 16, t % 16] = math.nan
    topk_decode(q, scene.cache, None, None, out, 4, None, 1.5, None, False)
    assert out.equal(clean)
    k, _ = scene.cache.dense()
    assert k.isfinite().all()
    scene.append()
    gaussian_decode(q, scene.cache, None, None, out)
    assert out.isfinite().all()


def test_one_alpha_for_each_head():
    scene = Scene((210, 90), seed=11)
    q, out = scene.queries()
    alphas = torch.tensor([1.25, 1.5, 1.75, 2.0], dtype=torch.float64)
    options = {"alpha": alphas, "alibi_slopes": torch.tensor(SLOPES), "niter": 9, "append_cache": False}
    topk_decode(q, scene.cache, None, None, out, 5, info=(info := []), **options)
    assert_rows(scene, q, out, alphas.tolist(), info[0])
    gaussian_decode(q, scene.cache, None, None, out, info=(info := []), **options)
    assert_rows(scene, q, out, alphas.tolist(), info[0])


@pytest.mark.parametrize("shared", [0.0, 1.0])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize(("tokens", "heads", "dtype"), [(1024, (8, 8), torch.float32), (2048, (16, 8), torch.float16)])
def test_sweep(tokens, heads, dtype, alpha, alibi, shared):
    """Random keys, which no small selection can serve, and keys that differ from page to page, which one can."""
    scene = Scene((tokens,), heads=heads, dim=64, dtype=dtype, seed=12, shared=shared)
    half = heads[0] // 2
    slopes = [2.0 ** (-8.0 * i / half) for i in range(1, half + 1)] + [0.0] * half if alibi else None
    given = None if slopes is None else torch.tensor(slopes)
    q, out = scene.queries()
    errors = []
    for coverage in (0.25, 0.5):
        pages = max(2, round(coverage * tokens / 16))
        topk_decode(q, scene.cache, None, None, out, pages, given, alpha, append_cache=False)
        errors.append(relative(out, scene, q, alpha, slopes))
        assert errors[-1] < (0.05 if shared else 2 * (1 - coverage))
    assert errors[1] < errors[0] + 1e-3
    for mode in ("exact", "corrected"):
        info = []
        gaussian_decode(q, scene.cache, None, None, out, alpha, alibi_slopes=given, tau_mode=mode, niter=8, info=info)
        assert relative(out, scene, q, alpha, slopes) < 0.25
        assert info[0].selection.counts.float().mean() < tokens / 16 or not shared


def test_a_long_row():
    """64000 tokens: a small share of the pages gives the output of them all."""
    scene = Scene((64000,), heads=(2, 1), dim=64, dtype=torch.float16, seed=13, shared=1.0)
    slopes = [2.0**-8, 0.0]
    q, out = scene.queries()
    for decode, options in ((topk_decode, {"topk_pages": 1000}), (gaussian_decode, {"niter": 8})):
        info, options = [], {"alibi_slopes": torch.tensor(slopes), "append_cache": False, **options}
        decode(q, scene.cache, None, None, out, info=info, **options)
        assert info[0].selection.counts.max() <= 1000
        assert relative(out, scene, q, 1.5, slopes) < 0.01


REFERENCE = """
import sys
sys.modules["triton"] = None
import torch, flowlib
from flowlib.entmax import topk_decode, gaussian_decode
cache = flowlib.PagedKVCache(stats=("topk", "gaussian"))
k = torch.randn(1, 1, 90, 8)
cache.initialize(k, k)
q = torch.randn(1, 2, 1, 8)
print(topk_decode(q, cache, k[:, :, :1], k[:, :, :1], q.clone(), 3).isfinite().all().item())
print(gaussian_decode(q, cache, None, None, q.clone()).isfinite().all().item(), flowlib.entmax.entmax(q, 1.5).shape)
"""


def test_nothing_here_needs_triton():
    assert python("-c", REFERENCE).split("\n")[:2] == ["True", "True torch.Size([1, 2, 1, 8])"]
