"""Statistics of pages in float8: bounds that stay bounds, room above the prompts, and what is cut told."""

import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flowlib
from flowlib.entmax import gaussian_decode, page_bounds, page_stats, topk_decode
from flowlib.errors import FormatError, OptionError
from flowlib.runtime import interpreter
from flowlib.testing import gamma
from tests.refusals import refused
from tests.suites.e4m3 import CODES, half_step, searched
from tests.suites.entmax_cache import BOTH, SLOPES, Scene, assert_rows, relative

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_entmax
import bench_entmax_gate
from bench_entmax_scene import Options, Work
from bench_entmax_scene import Scene as BenchScene

F8 = torch.float8_e4m3fn
DECODERS = {"topk": (topk_decode, {"topk_pages": 6}), "gaussian": (gaussian_decode, {"niter": 8})}


def both(scene, decode, **options):
    """((out, info) by the reference, (out, info) by kernels) of the same step, and its queries."""
    interpreter.install()
    q, out = scene.queries()
    found = []
    for impl in ("reference", "triton"):
        info, own = [], out.clone()
        decode(q, scene.cache, None, None, own, append_cache=False, impl=impl, info=info, **options)
        found.append((own, info[0]))
    return q, *found


def assert_statistics(cache, pages, scale):
    """Those of the physical pages: bounds the next code outwards, estimates within half a step."""
    stats, keys = cache.page_stats, cache.kv[0, pages].double()
    unit = torch.as_tensor(scale)[:, None]
    assert torch.equal(stats.k_max[pages].double(), searched(keys.amax(1), unit, "up"))
    assert torch.equal(stats.k_min[pages].double(), searched(keys.amin(1), unit, "down"))
    for name, truth in (
        ("k_mean", keys.mean(1)),
        ("k_std", (keys - keys.mean(1, keepdim=True)).square().mean(1).sqrt()),
    ):
        for head, own in enumerate(scale):
            away = (getattr(stats, name)[pages, head].double() - truth[:, head]).abs()
            computed = gamma(keys.shape[1] + 8) * keys[:, :, head].abs().sum(1)
            assert away.le(half_step(truth[:, head], F8, own) + computed).all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_write_keeps_them(dtype):
    scene = Scene((61, 40), dtype=dtype, stats_dtype=F8, max_seq_len=62)
    cache, homes = scene.cache, set()
    assert {x.dtype for x in cache.stored_stats} == {F8}
    assert {x.dtype for x in cache.page_stats} == {torch.float64 if dtype is torch.float64 else torch.float32}
    scale = cache.stats_scales.tolist()
    for _ in range(20):
        scene.append()
        homes.add(cache.max_pages)
    assert homes == {4, 6}, "the pool grew"
    slots = torch.tensor([1, 33, -1, 6 * 16])
    k = torch.randn(4, 2, 32, generator=scene.g).to(dtype)
    cache.write(k, k, slots)
    assert_statistics(cache, torch.tensor([0, 1, 2, 3, 4, 6, 7, 8]), scale)
    assert cache.stats_scales.tolist() == scale
    assert cache.saturated.tolist() == [False, False]


def test_the_scale_leaves_room_for_sixteen_times_the_largest_key():
    k = torch.zeros(1, 5, 20, 4)
    k[0, 0, 3, 1], k[0, 1, 19, 0], k[0, 2, 0, 0], k[0, 3, 7, 2] = 28.0, -28.1, math.inf, math.nan
    cache = flowlib.PagedKVCache(stats=BOTH, stats_dtype=F8)
    cache.initialize(k, k)
    assert cache.stats_scales.tolist() == [1.0, 2.0, 2.0**-4, 2.0**-4, 2.0**-4], "448 times it is 16 times the key"
    assert cache.saturated.tolist() == [False, False, True, False, False], "no code is infinite"
    assert cache.page_stats.k_max[0, 2, 0] == 28.0
    assert cache.page_stats.k_max[0, 3, 2].isnan()
    tiny = flowlib.PagedKVCache(stats=BOTH, stats_dtype=F8)
    tiny.initialize(1e-30 * k[:, :1], k[:, :1])
    assert tiny.stats_scales.tolist() == [2.0**-64]


@pytest.mark.parametrize("name", DECODERS)
def test_a_bound_that_is_cut_certifies_nothing(name):
    """Outputs of the head that a key of 1,000 got are not certified, save those of all pages."""
    scene = Scene((333, 129, 40), stats_dtype=F8, shared=4.0, seed=1)
    decode, options = DECODERS[name]
    options = options | ({"topk_pages": 12} if name == "topk" else {"safety_margin_z": 1.0})
    q, (_, before), _ = both(scene, decode, **options)
    k, v = scene.token()
    k[:2, 0, 0, 0] = 1000.0
    scene.cache.append(k, v)
    scene.remember(k, v)
    for _ in range(20):  # the page of that key is no tail any more
        scene.append()
    assert scene.cache.saturated.tolist() == [True, False]
    assert scene.cache.page_stats.k_max[333 // 16, 0, 0] == 448 * scene.cache.stats_scales[0]
    q, reference, kernels = both(scene, decode, **options)
    for out, info in (reference, kernels):
        everything = info.selection.counts > (scene.cache.seq_lens[:, None] - 1) // 16
        assert not (info.certified & ~everything)[:, :2].any(), "query heads of the kv head"
        assert info.certified[everything].all()
        assert (info.certified & ~everything)[:, 2:].any()
        assert_rows(scene, q, out, 1.5, info, [0.0] * 4)
    assert before.certified[:2, :2].any()
    scene.cache.initialize(torch.stack([scene.k[2].transpose(0, 1)]), torch.stack([scene.v[2].transpose(0, 1)]))
    assert not scene.cache.saturated.any(), "it starts anew"


def test_certificates_are_true():
    """What is certified by float8 bounds is full entmax's output; they are fewer than by the cache's own dtype."""
    counts = []
    for dtype in (None, F8):
        scene = Scene((600, 333), stats_dtype=dtype, shared=2.0, seed=6)
        certified = 0
        for pages in (8, 14, 20):
            q, out = scene.queries()
            topk_decode(q, scene.cache, None, None, out, pages, append_cache=False, info=(info := []))
            sure = info[0].certified
            certified += int(sure.sum())
            full = torch.empty_like(out)
            topk_decode(q, scene.cache, None, None, full, 100, append_cache=False)
            if sure.any():
                assert (out - full)[sure].abs().max() <= gamma(600) * scene.cache.kv[1].abs().max()
        counts.append(certified)
    assert 0 < counts[1] <= counts[0]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [
        (torch.float16, (2, 2), 64),
        (torch.float32, (4, 2), 32),
        (torch.bfloat16, (6, 2), 96),
        (torch.float16, (2, 2), 8),
    ],
)
def test_kernels_do_as_the_reference(dtype, heads, dim, name):
    scene = Scene((333, 16, 129, 1, 48), dtype=dtype, heads=heads, dim=dim, stats_dtype=F8, shared=1.0, seed=2)
    slopes = (SLOPES * 2)[: heads[0]]
    decode, options = DECODERS[name]
    for given in (None, torch.tensor(slopes)):
        q, (out, told), (there, got) = both(scene, decode, alibi_slopes=given, **options)
        for x, y in zip(told.selection[1:], got.selection[1:], strict=True):
            assert torch.equal(x, y)
        assert torch.equal(told.certified, got.certified)
        assert (told.tau - got.tau).abs().max() <= 1e-5
        away = (out - there).abs().max()
        assert away <= 16 * torch.finfo(dtype).eps * (1 if dtype is not torch.float32 else 8)
        if dtype is torch.float32:
            assert_rows(scene, q, there, 1.5, got, [0.0] * 4 if given is None else slopes)


@pytest.mark.parametrize("heads", [1, 2])
def test_every_code_is_squared_exactly(heads):
    """Estimated thresholds of kernels, where deviations are every code that is no NaN, and means every one."""
    interpreter.install()
    k = torch.randn(1, 1, 16 * 9, 16, generator=torch.Generator().manual_seed(1)).half()
    cache = flowlib.PagedKVCache(stats=("gaussian",), stats_dtype=F8, stats_scale=2.0**-5)
    cache.initialize(k, k)
    codes = CODES.view(torch.uint8)
    means, deviations = codes[~CODES.float().isnan()][:128], codes[:127].repeat(2)[:128]
    for stat, given in ((cache.stored_stats.k_mean, means), (cache.stored_stats.k_std, deviations)):
        stat.view(torch.uint8)[:8] = given.view(8, 1, 16)
    q, taus = torch.linspace(-1, 1, heads * 16).view(1, heads, 1, 16).half(), []
    for impl in ("reference", "triton"):
        gaussian_decode(q, cache, None, None, torch.empty_like(q), tau_mode="fixed", impl=impl, info=(info := []))
        taus.append(info[0].tau)
    torch.testing.assert_close(taus[1], taus[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stats", [("gaussian",), BOTH])
def test_float8_selects_almost_the_same(stats):
    """The weight that is left out grows little, and what is attended to is attended to exactly."""
    found = []
    for dtype in (None, F8):
        scene = Scene((1024, 700), seed=14, shared=1.0, stats=stats, stats_dtype=dtype)
        q, out = scene.queries()
        gaussian_decode(q, scene.cache, None, None, out, niter=8, info=(info := []))
        assert_rows(scene, q, out, 1.5, info[0], [0.0] * 4)
        found.append((info[0].selection.counts, relative(out, scene, q, 1.5, None)))
    assert (found[0][0] - found[1][0]).abs().max() <= 3
    assert found[1][1] <= found[0][1] + 0.01


def test_refusals():
    for scale in (3.0, 0.0, -1.0, 2.0**65, 10**400, math.nan, True, "1"):
        with refused(
            OptionError, f"PagedKVCache: stats_scale is {scale!r}, expected a power of two from 2**-64 to 2**64"
        ):
            flowlib.PagedKVCache(stats_dtype=F8, stats_scale=scale)
    with refused(OptionError, "stats_scale is 2.0, expected None beside stats_dtype torch.float16: only float8_e4m3fn"):
        flowlib.PagedKVCache(stats_dtype=torch.float16, stats_scale=2.0)
    with refused(
        OptionError, "PagedKVCache: stats_dtype is torch.float8_e5m2, expected", "torch.float8_e4m3fn or None"
    ):
        flowlib.PagedKVCache(stats_dtype=torch.float8_e5m2)
    scene = Scene((40,), stats_dtype=F8, stats_scale=0.5)
    assert scene.cache.stats_scales.tolist() == [0.5, 0.5]
    q, codes = scene.queries()[0], scene.cache.stored_stats
    with refused(FormatError, "page_bounds: k_min is torch.float8_e4m3fn, expected float16"):
        page_bounds(q[:, :, 0], codes.k_min, codes.k_max, scene.cache.seq_lens, 16)
    plain = Scene((40,)).cache
    assert plain.stats_scales is plain.saturated is None
    assert plain.stored_stats is plain.page_stats
    assert page_stats(plain.kv[0], ("topk",)).k_mean is None


# -- the benchmark


@pytest.mark.parametrize(
    "options", [{"method": "gaussian"}, {"method": "gaussian", "certify": True}, {"method": "topk"}]
)
def test_the_gate_is_green_and_a_bound_rounded_inwards_is_not(options):
    numbers = Options(kv_heads=1, query_heads=2, head_dim=16, stats_dtype=F8, tau_mode="exact", **options)
    interpreter.install()
    scene = BenchScene(numbers, Work(1, 330), "cpu")
    cache = scene.add_cache()
    kept = sum(x.nbytes for x in cache.stored_stats if x is not None)
    assert scene.cache_bytes == cache.kv.nbytes + kept, "a byte an element"
    verdicts, _ = bench_entmax_gate.gate(scene)
    assert all(v.ok for v in verdicts), verdicts
    for name in ("k_max", "k_mean"):
        stat = getattr(cache.stored_stats, name)
        if stat is not None:
            codes = stat.view(torch.uint8)[2]
            right = codes.clone()
            for wrong in (right - 1, torch.full_like(right, 0x7F)):  # the next code, and NaN
                codes.copy_(wrong)
                found = {v.stage: v.ok for v in bench_entmax_gate.gate(scene)[0]}
                assert not found["statistics"]
            codes.copy_(right)


def test_a_table_of_dtypes_on_the_command_line():
    sizes = ["--kv-len", "300", "--batch", "2", "--kv-heads", "1", "--heads", "2", "--head-dim", "16"]
    arguments = ["statistics", *sizes, "--offset", "2", "--certify"]
    done = CliRunner().invoke(bench_entmax.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines() if line.strip().startswith("2 x 300")]
    assert [line[4] for line in lines] == ["float16", "bfloat16", "float32", "float8_e4m3fn"]
    assert all(0.9 < float(line[5]) <= 1.0 and float(line[7]) < 0.5 and line[10] == "19" for line in lines)
    bounds = CliRunner().invoke(bench_entmax.app, [*arguments, "--select", "topk"], env={"COLUMNS": "200"})
    assert bounds.output.count("2 x 300") == 2
    for wrong in (["--heads", "3"], ["--select", "best"]):
        assert CliRunner().invoke(bench_entmax.app, ["statistics", *wrong], env={"COLUMNS": "200"}).exit_code == 2
