"""Ops with an entry per row: what a row is beside its pages."""

import pytest
import torch

import flowlib
from flowlib import FORMAT, ops
from flowlib.errors import FormatError
from tests.suites.op_run import HEADS, PAGE, ROWS, WIDTH, bench

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


@impls
def test_query_position(impl, device):
    at = bench(device)
    out = ops.QueryPosition()(ctx=at.context(impl))
    assert (out.format, out.shape) == (FORMAT.BATCHED, (1, 1))
    lengths = at.batch.seq_lens.cpu().repeat_interleave(HEADS)
    assert out.data.flatten().tolist() == (lengths - 1).tolist()
    assert int(lengths[0]) % PAGE


@impls
@pytest.mark.parametrize("given", [True, False])
def test_alibi_slopes(impl, given, device):
    slopes = (0.5, 0.0, -0.25, 2.0, 1e-3, 0.125)
    at = bench(device, group_size=3, alibi_slopes=slopes if given else None)
    out = ops.AlibiSlopes()(ctx=at.context(impl))
    assert (out.format, out.shape) == (FORMAT.BATCHED, (3, 1))
    wanted = torch.tensor(slopes if given else (0.0,) * 6).view(HEADS, 3).repeat(ROWS // HEADS, 1)
    assert torch.equal(out.data.cpu().view(ROWS, 3), wanted)


@impls
def test_a_row_op_joins_page_ops(impl, device):
    """BATCHED beside RAGGED, as a flow uses it: the distance of a page's first token from the query."""
    at = bench(device)
    ctx = at.context(impl)
    first = ops.Add_Mul(0.0, float(PAGE))(ops.PagePosition()(ctx=ctx))
    out = ops.Add(1.0, -1.0)(first, ops.QueryPosition()(ctx=ctx), ctx=ctx)
    lengths = at.batch.seq_lens.cpu().repeat_interleave(HEADS)
    for entry in at.scored().tolist():
        row, page = divmod(entry, WIDTH)
        assert float(out.data.flatten()[entry]) == page * PAGE - (int(lengths[row]) - 1)


@impls
def test_a_normal_per_page_where_there_is_a_slope(impl, device):
    """GaussianTau of each head is that of the model its slope asks for."""
    slopes = (0.5, 0.0, -0.25, 0.0, 0.0, 0.125)
    at = bench(device, group_size=3, alibi_slopes=slopes)
    ctx, g = at.context(impl), torch.Generator().manual_seed(0)
    mu = torch.randn(ROWS * WIDTH, 3, 1, generator=g) * 3
    sigma = torch.rand(ROWS * WIDTH, 3, 1, generator=g) + 0.1
    moments = [flowlib.as_vtensor(x.to(device), FORMAT.RAGGED, ctx) for x in (mu, sigma)]
    by_slope, pages, row = (ops.GaussianTau(1.5, mixture=m)(*moments).data.cpu() for m in (None, True, False))
    mixed = (torch.tensor(slopes) != 0).view(HEADS, 3).repeat(ROWS // HEADS, 1)[..., None]
    torch.testing.assert_close(by_slope, torch.where(mixed, pages, row), rtol=1e-6, atol=1e-6)
    scored = [r for r in range(ROWS) if any(e // WIDTH == r for e in at.scored().tolist())]
    assert ((pages - row).abs()[scored] > 1e-3).any()


@impls
@pytest.mark.parametrize("name", ["GaussianFloor", "TailFloor"])
def test_what_reads_a_steps_queries_is_not_called_alone(name, impl, device):
    ctx = bench(device, group_size=3).context(impl)
    x = flowlib.as_vtensor(torch.zeros(ROWS * WIDTH, 3, 1, device=device), FORMAT.RAGGED, ctx)
    with pytest.raises(FormatError, match=f"{name}: can't be called alone, it reads the queries of a step"):
        getattr(ops, name)(1.5)(*((x, x) if name == "GaussianFloor" else ()), ctx=ctx)
