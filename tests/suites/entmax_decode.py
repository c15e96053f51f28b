"""Decoding over a PagedKVCache by kernels: what the reference selects, what its oracle gives, and no waiting."""

from __future__ import annotations

import math

import pytest
import torch

import flowlib
from flowlib.entmax import checks, gaussian_decode, topk_decode
from flowlib.errors import FormatError, OptionError
from flowlib.runtime import interpreter
from flowlib.testing.oracles.bisection import attention_scores
from tests.refusals import refused
from tests.suites.entmax_cache import BOTH, SLOPES, Scene, assert_rows, kept

LENGTHS = (333, 16, 129, 1, 48)
"""A long row, two that end with their page, one of a single token."""


def moved(scene: Scene, device: str) -> flowlib.PagedKVCache:
    """The scene's cache on a device."""
    if device == "cpu":
        interpreter.install()
    old = scene.cache
    cache = flowlib.PagedKVCache(old.page_size, old.stats, old.max_seq_len, old.stats_dtype)
    k, v = old.dense()
    cache.initialize(k.to(device), v.to(device), old.seq_lens_host)
    return cache


def both(scene: Scene, device: str, decode, *options, **named):
    """(out, info) by reference on the CPU and by kernels on the device, of the same step."""
    q, out = scene.queries()
    k, v = scene.token()
    told, given = [], dict(named)
    decode(q, scene.cache, k, v, out, *options, append_cache=True, info=told, **given)
    cache = given.pop("cache", None) or scene.twin
    there = torch.full_like(out, math.nan).to(device)
    slopes = given.get("alibi_slopes")
    if slopes is not None:
        given["alibi_slopes"] = slopes.to(device)
    decode(
        q.to(device), cache, k.to(device), v.to(device), there, *options, append_cache=True, info=told, impl="triton",
        **given,
    )  # fmt: skip
    scene.remember(k, v)
    return q, (out, told[0]), (there.cpu(), told[1])


def on_cpu(info):
    selection = type(info.selection)(*(x.cpu() for x in info.selection))
    return info._replace(selection=selection, tau=info.tau.cpu(), mass=info.mass.cpu(), certified=info.certified.cpu())


def assert_same(reference, kernels):
    """The same pages, flags and routing; thresholds, of which t is at most 1, to ten of the solvers' last steps."""
    (_, told), (_, got) = reference, kernels
    got = on_cpu(got)
    width = min(told.selection.pages.shape[2], got.selection.pages.shape[2])
    for x, y in zip(told.selection[1:], got.selection[1:], strict=True):
        assert torch.equal(x, y)
    assert torch.equal(told.selection.pages[..., :width], got.selection.pages[..., :width])
    assert got.exact_rows == told.exact_rows
    assert torch.equal(got.certified, told.certified)
    assert (got.tau - told.tau).abs().max() <= 1e-5
    assert (got.mass - told.mass).abs().max() <= 1e-4
    return got


def world(device: str, lengths=LENGTHS, **options) -> Scene:
    scene = Scene(lengths, **options)
    scene.twin = moved(scene, device)
    return scene


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0, (1.5, 2.0, 1.25, 1.75)], ids=str)
def test_topk(alpha, device):
    scene, slopes = world(device), SLOPES
    given = alpha if isinstance(alpha, float) else torch.tensor(alpha)
    for min_context in (0, 130):
        options = {"alpha": given, "alibi_slopes": torch.tensor(slopes), "min_context": min_context}
        q, reference, kernels = both(scene, device, topk_decode, 6, **options)
        got = assert_same(reference, kernels)
        assert got.exact_rows == tuple(len(k) < min_context or len(k) <= 96 for k in scene.k)
        assert_rows(scene, q, kernels[0], alpha, got, slopes)


@pytest.mark.parametrize(
    ("alpha", "mode", "stats"),
    [(1.5, "exact", ("gaussian",)), (1.5, "corrected", BOTH), (2.0, "corrected", BOTH), (4 / 3, "exact", BOTH)],
)
def test_gaussian(alpha, mode, stats, device):
    scene = world(device, stats=stats, shared=1.0)
    for slopes in (SLOPES, None):
        given = None if slopes is None else torch.tensor(slopes)
        options = {"alpha": alpha, "tau_mode": mode, "niter": 8, "alibi_slopes": given}
        q, reference, kernels = both(scene, device, gaussian_decode, **options)
        got = assert_same(reference, kernels)
        assert_rows(scene, q, kernels[0], alpha, got, slopes or [0.0] * 4)
        assert float(got.selection.counts[0].float().mean()) < 20, "pages are left out"


def test_the_fixed_threshold_is_the_estimate(device):
    scene = world(device, (333, 129), stats=("gaussian",))
    q, (_, told), (out, info) = both(scene, device, gaussian_decode, tau_mode="fixed")
    info = on_cpu(info)
    torch.testing.assert_close(info.tau, told.tau, rtol=1e-5, atol=1e-5)
    for b in range(2):
        s = attention_scores(q[b, :, 0], scene.k[b], [0.0] * 4).masked_fill(~kept(info, b, len(scene.k[b])), -math.inf)
        p = (0.5 * s - info.tau[b].double()[:, None]).clamp(min=0) ** 2
        torch.testing.assert_close(info.mass[b].double(), p.sum(-1), rtol=1e-3, atol=1e-3)
        for h in range(4):
            truth = p[h] @ scene.v[b][:, h // 2].double()
            assert (out[b, h, 0].double() - truth).abs().max() <= 1e-3 * (1 + float(p[h].sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_of_16_bits(dtype, device):
    scene = world(device, (100, 40), dtype=dtype, dim=64, heads=(6, 2))
    slopes = [0.25, 0.0, 0.0625, 0.0, 0.5, 0.0]
    q, _, (out, info) = both(scene, device, topk_decode, 4, alibi_slopes=torch.tensor(slopes))
    away = torch.cat([x.flatten() for x in _errors(scene, q, out, on_cpu(info), slopes)])
    assert away.max() <= 4 * torch.finfo(dtype).eps * 4, "weights and outputs are rounded to 16 bits, values below 4"


@pytest.mark.parametrize(("decode", "options"), [(topk_decode, {"topk_pages": 6}), (gaussian_decode, {"niter": 8})])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_statistics_of_8_bits(decode, options, dtype, device):
    scene = world(device, dtype=dtype, dim=64, stats_dtype=torch.float8_e4m3fn, shared=1.0, seed=2)
    q, reference, kernels = both(scene, device, decode, **options)
    got = assert_same(reference, kernels)
    if dtype is torch.float32:
        assert_rows(scene, q, kernels[0], 1.5, got, [0.0] * 4)
    else:
        away = (kernels[0] - reference[0]).abs().max()
        assert away <= 4 * torch.finfo(dtype).eps * 4, "as for caches of 16 bits"


def _errors(scene, q, out, info, slopes):
    from flowlib.testing.oracles.bisection import entmax_request

    for b in range(len(scene.k)):
        keep = kept(info, b, len(scene.k[b]))
        truth, _ = entmax_request(q[b, :, 0], scene.k[b], scene.v[b], 1.5, slopes, keep)
        yield (out[b, :, 0].double() - truth).abs()


def test_a_cache_that_grows_drops_what_kernels_worked_in(device):
    scene = Scene((30, 17), max_seq_len=31)
    scene.twin = moved(scene, device)
    for _ in range(4):  # the third token does not fit
        q, reference, kernels = both(scene, device, topk_decode, 2)
        assert_rows(scene, q, kernels[0], 1.5, assert_same(reference, kernels), [0.0] * 4)
    assert scene.twin.max_pages == 3
    assert len(scene.twin.scratch) == 1


def test_a_tensor_alpha_is_checked_once_a_step(device, monkeypatch):
    """Where it lies on a GPU, a check waits for it."""
    scene, checked = world(device, (40, 33)), []
    alphas = checks.alphas
    monkeypatch.setattr(checks, "alphas", lambda *given, **more: checked.append(given[0]) or alphas(*given, **more))
    q, out = (x.to(device) for x in scene.queries())
    given = torch.tensor([1.25, 1.5, 1.75, 2.0], device=device)
    topk_decode(q, scene.twin, None, None, out, 2, alpha=given, append_cache=False, impl="triton")
    assert checked == ["topk_decode"]


def test_refusals_of_kernels(device):
    scene = world(device, (40, 33))
    q, out = (x.to(device) for x in scene.queries())
    k, v = (x.to(device) for x in scene.token())
    before = scene.twin.seq_lens_host

    def decode(function, alpha=1.5, q=q, out=out):
        options = {"topk_pages": 2} if function is topk_decode else {}
        function(q, scene.twin, k, v, out, alpha=alpha, append_cache=True, impl="triton", **options)

    with refused(FormatError, "topk_decode: q is torch.bfloat16 and the cache torch.float32", "where impl is 'triton'"):
        decode(topk_decode, q=q.bfloat16(), out=out.bfloat16())
    with refused(OptionError, "topk_decode: alpha is [1.0, 1.5, 1.5, 2.0], expected no 1 among others"):
        decode(topk_decode, torch.tensor([1.0, 1.5, 1.5, 2.0]))
    with refused(OptionError, "gaussian_decode: alpha is [1.5, 1.5, 1.5, 2.0], expected one for all heads"):
        decode(gaussian_decode, torch.tensor([1.5, 1.5, 1.5, 2.0]))
    assert scene.twin.seq_lens_host == before, "nothing was stored"
