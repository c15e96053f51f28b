"""Exact entmax attention over a paged cache, dense and over selections, against plain loops in float64."""

import math

import pytest
import torch

from flowlib.core.entmax import correct_tau
from flowlib.entmax import entmax, entmax_attention
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.testing.oracles.bisection import attention_scores, entmax_row
from tests.refusals import refused
from tests.suites.entmax_world import World, attention_truth

LENGTHS = [41, 1, 16, 17, 0, 26]
ALPHAS = [1.0, 1.25, 1.5, 1.75, 2.0]


def slopes_of(heads):
    return torch.tensor([(0.25, 0.0, 0.0625, -0.1)[h % 4] for h in range(heads)])


def assert_world(world, out, alpha, slopes=None, pages=None, compute=torch.float32):
    """Every row of `out` is as near to the oracle as its dtype and the dtype computed in allow."""
    for b, n in enumerate(world.lengths):
        keep = None if pages is None else world.kept(pages[b], b)
        listed = None if slopes is None else slopes.tolist()
        truth, tolerance = attention_truth(world.q[b], world.k[b], world.v[b], alpha, listed, keep, compute)
        allowed = tolerance + torch.finfo(out.o.dtype).eps * truth.abs()
        assert (out.o[b].double() - truth).abs().le(allowed).all(), (b, (out.o[b].double() - truth).abs().max())
        if n == 0:
            assert out.o[b].eq(0).all()
            assert out.mass[b].eq(0).all()
            assert out.tau[b].eq(-math.inf).all()


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_dense(alpha, heads):
    world = World(LENGTHS, heads=heads, seed=1)
    for slopes in (None, slopes_of(heads[0])):
        out = entmax_attention(world.q, world.kv, world.table, world.seq_lens, alpha, alibi_slopes=slopes)
        assert_world(world, out, alpha, slopes)
        assert (out.mass[:4] - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_dtypes(alpha, dtype):
    """Products are widened first: 16-bit inputs give float32 results, rounded once."""
    world = World(LENGTHS, dtype=dtype, dim=40, seed=2)
    out = entmax_attention(world.q, world.kv, world.table, world.seq_lens, alpha)
    assert out.o.dtype is dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert out.tau.dtype is wide
    assert_world(world, out, alpha, compute=wide)
    for asked in (torch.float32, torch.float64):
        out = entmax_attention(world.q, world.kv, world.table, world.seq_lens, alpha, dtype=asked)
        assert out.o.dtype is asked
        assert_world(world, out, alpha, compute=asked)


def lists(world, seed, width=6):
    """Random ascending page lists of each row and head, the tail among them, padded with -1."""
    g = torch.Generator().manual_seed(seed)
    rows, heads = world.q.shape[:2]
    pages = torch.full((rows, heads, width), -1, dtype=torch.int32)
    lens = torch.zeros(rows, heads, dtype=torch.int32)
    for b, n in enumerate(world.lengths):
        tail = (n - 1) // world.page_size
        for h in range(heads):
            if n:
                count = int(torch.randint(0, width, (), generator=g))
                chosen = sorted(torch.randperm(max(tail, 0), generator=g)[:count].tolist())
                pages[b, h, : len(chosen) + 1] = torch.tensor([*chosen, tail], dtype=torch.int32)
                lens[b, h] = len(chosen) * world.page_size + n - tail * world.page_size
    return pages, lens


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_selections(alpha, page_size):
    world = World(LENGTHS, page_size=page_size, seed=3)
    slopes = slopes_of(4)
    pages, lens = lists(world, seed=4)
    arguments = (world.q, world.kv, world.table, world.seq_lens, alpha)
    out = entmax_attention(*arguments, pages, lens, slopes)
    assert_world(world, out, alpha, slopes, pages)
    free = entmax_attention(*arguments, pages, None, slopes)
    torch.testing.assert_close(free.o, out.o, rtol=0, atol=0)
    past = (pages >= 0).sum(-1, keepdim=True) <= torch.arange(pages.shape[2])
    rubbish = torch.where(past, 0, pages)  # left from an earlier step; the count of tokens says where the list ends
    torch.testing.assert_close(entmax_attention(*arguments, rubbish, lens, slopes).o, out.o, rtol=0, atol=0)


def test_physical_order_changes_nothing():
    outs = []
    for order in (5, 6):
        world = World(LENGTHS, seed=5, order=order)
        pages, lens = lists(world, seed=6)
        outs.append(entmax_attention(world.q, world.kv, world.table, world.seq_lens, 1.5, pages, lens))
    torch.testing.assert_close(outs[0].o, outs[1].o, rtol=0, atol=0)


def test_values_without_mass_are_not_read():
    world = World([90], heads=(1, 1), seed=7)
    p = entmax(attention_scores(world.q[0], world.k[0]), 2.0)[0]
    for t in (p == 0).nonzero().flatten().tolist():
        world.kv[1, int(world.table[0, t // 4]), t % 4] = math.nan
    assert int((p == 0).sum()) > 40
    assert entmax_attention(world.q, world.kv, world.table, world.seq_lens, 2.0).o.isfinite().all()


def test_one_alpha_for_each_head():
    world = World(LENGTHS, seed=8)
    alphas = torch.tensor([1.0, 1.3, 1.5, 2.0], dtype=torch.float64)
    out = entmax_attention(world.q, world.kv, world.table, world.seq_lens, alphas)
    assert_world(world, out, alphas.tolist())


@pytest.mark.parametrize("alpha", [1.1, 4 / 3, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("off", [0.0, 0.05, -0.3, 20.0, -20.0])
def test_corrected_thresholds(alpha, off):
    world = World(LENGTHS, seed=9)
    pages, lens = lists(world, seed=10)
    arguments = (world.q, world.kv, world.table, world.seq_lens, alpha, pages, lens, slopes_of(4))
    exact = entmax_attention(*arguments)
    estimate = torch.where(exact.tau.isfinite(), exact.tau + off, 0.0)
    out = entmax_attention(*arguments, tau_mode="Corrected", tau_hat=estimate, niter=12)
    assert_world(world, out, alpha, slopes_of(4), pages)
    torch.testing.assert_close(out.tau, exact.tau, rtol=1e-5, atol=1e-5)
    live = [b for b, n in enumerate(LENGTHS) if n]
    assert (out.mass[live] - 1).abs().max() <= 1e-5


def test_three_corrections_are_near_and_none_are_the_estimate():
    world = World(LENGTHS, seed=11)
    arguments = (world.q, world.kv, world.table, world.seq_lens, 1.5)
    exact = entmax_attention(*arguments)
    estimate = torch.where(exact.tau.isfinite(), exact.tau - 0.1, 0.0)
    away = []
    for steps in range(4):
        out = entmax_attention(*arguments, tau_mode="corrected", tau_hat=estimate, niter=steps)
        away.append(float((out.mass - exact.mass).abs().max()))
    assert away[0] > 0.1 > away[1] > away[2]
    assert away[3] <= 1e-4
    by_default = entmax_attention(*arguments, tau_mode="corrected", tau_hat=estimate)
    torch.testing.assert_close(by_default.tau, out.tau, rtol=0, atol=0)


def test_fixed_thresholds_are_not_normalised():
    world = World([33, 0, 5], dtype=torch.float64, seed=12)
    exact = entmax_attention(world.q, world.kv, world.table, world.seq_lens, 1.5)
    estimate = torch.where(exact.tau.isfinite(), exact.tau - 0.25, 7.0)
    out = entmax_attention(
        world.q, world.kv, world.table, world.seq_lens, 1.5, tau_mode="fixed", tau_hat=estimate, niter=9
    )
    for b in (0, 2):
        scores = attention_scores(world.q[b], world.k[b])
        p = (0.5 * scores - estimate[b][:, None]).clamp(min=0) ** 2
        torch.testing.assert_close(out.mass[b], p.sum(-1), rtol=1e-12, atol=0)
        assert (out.mass[b] > 1.2).all()
        for h in range(4):
            torch.testing.assert_close(out.o[b, h], p[h] @ world.v[b][:, h // 2], rtol=1e-11, atol=1e-12)
    assert out.o[1].eq(0).all()
    assert out.mass[1].eq(0).all()
    torch.testing.assert_close(out.tau[[0, 2]], estimate[[0, 2]], rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.6, 1.9, 2.0])
def test_corrections_stay_in_the_bracket_and_converge(alpha, dtype):
    a, n = alpha - 1, 300
    g = torch.Generator().manual_seed(13)
    s = (torch.randn(24, n, generator=g, dtype=torch.float64) * torch.logspace(-3, 1, 24)[:, None]).to(dtype)
    z = a * (s - s.amax(-1, keepdim=True))
    roots = torch.tensor([entmax_row(row, alpha).tau for row in z.double() / a], dtype=torch.float64)[:, None]
    rate = torch.full((24, 1), a, dtype=dtype)
    for start in (-1.0, -0.5, 0.0, 3.0, -math.inf):
        for steps in (0, 1, 2, 5):
            tau = correct_tau(z, torch.full((24, 1), start, dtype=dtype), rate, steps)
            assert (tau >= -1).all()
            assert (tau <= -(n ** (-a)) * (1 - 1e-6)).all()
        tau = correct_tau(z, torch.full((24, 1), start, dtype=dtype), rate, 40)
        assert (tau.double() - roots).abs().max() <= 64 * torch.finfo(dtype).eps


def test_a_long_row():
    """2^16 tokens, dense and over every page: the two agree, and nothing but the support is in the result."""
    n, dim = 1 << 16, 8
    g = torch.Generator().manual_seed(14)
    kv = torch.randn(2, n // 16, 16, 1, dim, generator=g)
    q, lens = torch.randn(1, 2, dim, generator=g), torch.tensor([n - 3], dtype=torch.int32)
    table = torch.randperm(n // 16, generator=g)[None].to(torch.int32)
    dense = entmax_attention(q, kv, table, lens, 1.5)
    pages = torch.arange(n // 16, dtype=torch.int32).expand(1, 2, -1)
    torch.testing.assert_close(entmax_attention(q, kv, table, lens, 1.5, pages).o, dense.o, rtol=0, atol=0)
    k, v = (x[table[0].long()].flatten(0, 1)[: n - 3] for x in (kv[0], kv[1]))
    truth, tolerance = attention_truth(q[0], k, v, 1.5)
    assert (dense.o[0].double() - truth).abs().le(tolerance).all()


def test_refusals():
    world = World([9, 5], seed=15)
    pages, tau = torch.zeros(2, 4, 1, dtype=torch.int32), torch.zeros(2, 4)

    def attend(q=world.q, kv=world.kv, table=world.table, lens=world.seq_lens, alpha=1.5, **more):
        return entmax_attention(q, kv, table, lens, alpha, **more)

    what = "entmax_attention: "
    with refused(ShapeError, what + "q is [2, 4, 1, 12], expected [B, H_q, D]"):
        attend(q=world.q[:, :, None])
    with refused(ShapeError, what + "kv is ", ", expected [2, num_blocks, page_size, H_kv, D]"):
        attend(kv=world.kv[0])
    with refused(ShapeError, what + "axis 0 of kv is 1, expected 2, K and V"):
        attend(kv=world.kv[:1])
    with refused(OptionError, what + "page_size (axis 2 of kv) is 3, expected a positive power of two"):
        attend(kv=world.kv[:, :, :3])
    with refused(ShapeError, what + "axis D of kv is 8, expected 12 as in q"):
        attend(kv=world.kv[..., :8])
    with refused(ShapeError, what + "q has 3 heads, expected a multiple of the 2 kv heads"):
        attend(q=world.q[:, :3])
    with refused(FormatError, what + "block_table is torch.int64, expected an int32 tensor"):
        attend(table=world.table.long())
    with refused(FormatError, what + "seq_lens is torch.int64, expected an int32 tensor"):
        attend(lens=world.seq_lens.long())
    with refused(BatchError, what + "seq_lens has 17, expected from 0 to 16, what the pages hold"):
        attend(lens=torch.tensor([9, 17], dtype=torch.int32))
    with refused(BatchError, what + "block_table has 2147483647 for a page of a row, expected from 0 to"):
        attend(lens=torch.tensor([16, 5], dtype=torch.int32))
    with refused(FormatError, what + "pages is torch.int64, expected an int32 tensor"):
        attend(pages=pages.long())
    with refused(ShapeError, what + "pages is [2, 2, 1], expected [2, 4, any]"):
        attend(pages=pages[:, :2])
    with refused(ShapeError, what + "pages is [2, 4, 0], expected at least one column"):
        attend(pages=pages[..., :0])
    with refused(FormatError, what + "sel_lens is torch.float32, expected an int32 tensor"):
        attend(pages=pages, sel_lens=tau)
    with refused(OptionError, what + "sel_lens is given without pages, whose tokens it counts"):
        attend(sel_lens=pages[..., 0])
    for mode in ("exactly", None, 3):
        with refused(OptionError, what + f"tau_mode is {mode!r}, expected one of 'exact', 'corrected', 'fixed'"):
            attend(tau_mode=mode)
    with refused(OptionError, what + "tau_hat is None, expected a tensor [B, H_q] where tau_mode is 'fixed'"):
        attend(tau_mode="FIXED")
    with refused(ShapeError, what + "tau_hat is [4], expected [2, 4] [B, H_q]"):
        attend(tau_mode="corrected", tau_hat=tau[0])
    with refused(OptionError, what + "niter is -1, expected an integer of at least 0"):
        attend(niter=-1)
    with refused(OptionError, what + "alpha is 1.0, expected a number above 1 and at most 2"):
        attend(alpha=1.0, tau_mode="corrected", tau_hat=tau)
    with refused(OptionError, what + "alpha is 0.9, expected a number from 1 to 2"):
        attend(alpha=0.9)
    with refused(OptionError, what + "dtype is torch.float16, expected torch.float32, torch.float64 or None"):
        attend(dtype=torch.float16)
    with refused(ShapeError, what + "alibi_slopes is [2], expected [4], one for each query head"):
        attend(alibi_slopes=torch.zeros(2))
