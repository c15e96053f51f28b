"""Ops that work across the pages of a row, and those without inputs, called alone."""

import math
from itertools import product

import pytest
import torch

import flowlib
from flowlib import FORMAT, ops
from flowlib.core.formats import Side
from flowlib.testing import expect
from tests.suites.op_run import COUNTS, HEADS, PAGE, ROWS, bench, draw
from tests.suites.ops import DTYPES, TRIPLES

R, P = FORMAT.RAGGED, FORMAT.PAGED
BOTH = ("reference", "triton")


def convolved(x: torch.Tensor, weight: tuple[float, ...]) -> torch.Tensor:
    half, rows = len(weight) // 2, []
    for i in range(len(x)):
        terms = [w * x[i + t - half] for t, w in enumerate(weight) if 0 <= i + t - half < len(x)]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


SEGMENTS = {
    "softmax": (lambda: ops.Softmax(dim=0), lambda x: x.softmax(0), "real"),
    "softmax-scaled": (lambda: ops.Softmax(dim=0, scale=3.5), lambda x: (3.5 * x).softmax(0), "real"),
    "softmax-of-attention": (lambda: ops.Softmax(dim=0, scale=None), lambda x: (x / 4).softmax(0), "real"),
    "normalize": (lambda: ops.Normalize(), lambda x: x / x.sum(0), "positive"),
    "l2normalize": (lambda: ops.L2Normalize(), lambda x: x / x.square().sum(0).sqrt(), "real"),
    "conv1d": (lambda: ops.Conv1d((0.5, -1.0, 2.0)), lambda x: convolved(x, (0.5, -1.0, 2.0)), "real"),
    "conv1d-wide": (lambda: ops.Conv1d((1.0,) * 9), lambda x: convolved(x, (1.0,) * 9), "real"),
}
"""name: (op, formula over the scored pages ``[n, r, c]`` of a row, domain)"""
REDUCTIONS = {
    "Sum": (lambda x: x.sum(0), 0.0),
    "Mean": (lambda x: x.mean(0), 0.0),
    "Max": (lambda x: x.max(0).values, -math.inf),
    "Min": (lambda x: x.min(0).values, math.inf),
    "L2Norm": (lambda x: torch.linalg.vector_norm(x, dim=0), 0.0),
}
"""name: (formula over the scored pages of a row, what a row without any gets)"""


def of_row(at, entries: torch.Tensor, row: int) -> torch.Tensor:
    """Which of the scored pages' `entries` belong to a row."""
    return entries[torch.div(at.scored(), at.batch.width, rounding_mode="floor") == row]


@pytest.mark.parametrize(
    ("shape", "format", "dtype"), [((1, 1), R, DTYPES[0]), ((3, 1), P, DTYPES[1]), ((2, 5), R, DTYPES[0])],
    ids=["1x1-R-float32", "3x1-P-bfloat16", "2x5-R-float32"],
)  # fmt: skip
@pytest.mark.parametrize("name", SEGMENTS)
def test_along_the_pages(name, shape, format, dtype, device):
    at, (make, formula, domain) = bench(device), SEGMENTS[name]
    x = at.draw(shape, format, dtype, 3, domain)
    for compute, impl in TRIPLES:
        ctx = at.context(impl, compute)
        out = make()(flowlib.as_vtensor(x.to(device), format, ctx), ctx=ctx).data.cpu()
        for row in range(ROWS):
            own = of_row(at, at.scored(), row)
            if len(own):
                mine = x[of_row(at, at.source(format), row)]
                wanted = expect(formula, [mine], dtype=compute, compute=compute, terms=len(own) + 8)
                verdict = wanted.judge(out[own])
                assert verdict.ok, f"row {row} by {impl} in {compute}: {verdict}"


@pytest.mark.parametrize(
    ("shape", "format", "dtype"), [((1, 1), P, DTYPES[1]), ((3, 7), R, DTYPES[0])],
    ids=["1x1-P-bfloat16", "3x7-R-float32"],
)  # fmt: skip
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_over_the_pages(name, shape, format, dtype, device):
    at, (formula, identity) = bench(device), REDUCTIONS[name]
    x = at.draw(shape, format, dtype, seed=3)
    for compute, impl in TRIPLES:
        ctx = at.context(impl, compute)
        out = getattr(ops, name)(dim=0)(flowlib.as_vtensor(x.to(device), format, ctx), ctx=ctx)
        assert out.format is FORMAT.BATCHED
        assert out.data.shape == (ROWS, *shape)
        for row in range(ROWS):
            mine = x[of_row(at, at.source(format), row)]
            if not len(mine):
                assert (out.data[row] == identity).all()
                continue
            wanted = expect(formula, [mine], dtype=compute, compute=compute, terms=2 * len(mine) + 2)
            verdict = wanted.judge(out.data[row])
            assert verdict.ok, f"row {row} by {impl} in {compute}: {verdict}"


# -- selections


def best(scores: list[float], pages: range, budget: int) -> set[int]:
    """The best `budget` pages by plain sorting: ties to the lower page, -inf and NaN never."""
    ranked = sorted((-scores[p] + 0.0, p) for p in pages if scores[p] > -math.inf)
    return {page for _, page in ranked[:budget]}


def nucleus(scores: list[float], pages: range, p: float) -> set[int]:
    """The fewest best pages whose softmax mass is at least `p`."""
    mass = {page: math.exp(scores[page]) for page in pages if scores[page] > -math.inf}
    chosen, total = set(), 0.0
    for page in sorted(mass, key=lambda page: (-scores[page] + 0.0, page)):
        if total < p * sum(mass.values()):
            chosen.add(page)
            total += mass[page]
    return chosen


def select(at, impl: str, device: str, op, *values: tuple[torch.Tensor, FORMAT]) -> flowlib.SelectionHandle:
    ctx = at.context(impl)
    handle = flowlib.SelectionHandle(ctx)
    assert op(*(flowlib.as_vtensor(x.to(device), f, ctx) for x, f in values), handle, ctx=ctx) is None
    return handle


def assert_lists(at, handle, lanes: int, wanted) -> None:
    """Page lists: ascending, -1 padded, the reserved pages and ``wanted(row, lane, scored pages)`` of each row."""
    spec = at.plan.spec
    for request, head, lane in product(range(len(COUNTS)), range(HEADS), range(lanes)):
        count = COUNTS[request]
        scored = range(spec.bos, max(spec.bos, count - spec.eos))
        reserved = {p for p in range(count) if p not in scored}
        pages = sorted(reserved | wanted(request * HEADS + head, lane, scored))
        listed = handle.pages[request, head * lanes + lane].tolist()
        assert listed == pages + [-1] * (len(listed) - len(pages)), (request, head, lane)
        assert int(handle.lengths[request, head * lanes + lane]) == len(pages)


def hostile_scores(at, lanes: int, seed: int) -> torch.Tensor:
    """Many ties, -inf, +inf and NaN: RAGGED ``[L, lanes, 1]``."""
    x = draw((at.entries[R], lanes, 1), torch.float32, seed, "integers")
    x[::5], x[1::7], x[2::11] = -math.inf, math.nan, math.inf
    return x


@pytest.mark.parametrize("op_type", ["topK", "approxTopK"])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("top_k", "ratio"), [(2, 0.0), (0, 0.0), (1, 0.5), (99, 0.0)])
def test_top_k(top_k, ratio, lanes, op_type, device):
    at = bench(device, top_k=top_k, top_k_ratio=ratio)
    x = hostile_scores(at, lanes, top_k)

    def wanted(row, lane, scored):
        budget = max(top_k, (COUNTS[row // HEADS] * round(ratio * 65536)) >> 16)
        return best(x.view(ROWS, -1, lanes)[row, :, lane].tolist(), scored, budget)

    handles = [select(at, impl, device, getattr(ops, op_type)(), (x, R)) for impl in BOTH]
    for handle in handles:
        assert_lists(at, handle, lanes, wanted)
    assert torch.equal(handles[0].pages, handles[1].pages)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("k", [0, 1, 3, 50])
def test_a_selection_with_a_budget_of_its_own(k, lanes, impl, device):
    at = bench(device, top_k=2)
    x = hostile_scores(at, lanes, seed=k).view(ROWS, -1, lanes)
    handle = select(at, impl, device, ops.TopK(k), (x.view(-1, lanes, 1), R))
    assert_lists(at, handle, lanes, lambda row, lane, scored: best(x[row, :, lane].tolist(), scored, k))


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize(("p", "max_k"), [(0.5, None), (0.9, None), (0.95, 2), (1.0, None)])
def test_top_p(p, max_k, impl, device):
    at = bench(device, top_k=2)
    x = draw((at.entries[R], 1, 1), torch.float32, seed=2).view(ROWS, -1, 1)
    x[0, 3] = -math.inf

    def wanted(row, lane, scored):
        scores = x[row, :, lane].tolist()
        chosen = nucleus(scores, scored, p)
        return best([s if i in chosen else -math.inf for i, s in enumerate(scores)], scored, max_k or 99)

    assert_lists(at, select(at, impl, device, ops.topP(p, max_k), (x.view(-1, 1, 1), R)), 1, wanted)
    mass = torch.softmax(x.nan_to_num(neginf=-1e30), 1).view(-1, 1, 1)
    handle = select(at, impl, device, ops.topP(p, max_k, input="mass"), (mass, R))
    shares = mass.view(ROWS, -1)

    def by_mass(row, lane, scored):
        logs = [math.log(s) if s > 0 else -math.inf for s in shares[row].tolist()]
        chosen = nucleus(logs, scored, p)
        return best([s if i in chosen else -math.inf for i, s in enumerate(shares[row].tolist())], scored, max_k or 99)

    if p < 1.0:  # at 1 a share that rounds to nothing may or may not be counted
        assert_lists(at, handle, 1, by_mass)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("max_k", [None, 2])
def test_threshold(max_k, lanes, impl, device):
    at = bench(device, top_k=2)
    x = hostile_scores(at, lanes, seed=1).view(ROWS, -1, lanes)
    tau = draw((ROWS, lanes, 1), torch.float32, seed=2, domain="integers")

    def wanted(row, lane, scored):
        above = [s if s > float(tau[row, lane]) else -math.inf for s in x[row, :, lane].tolist()]
        return best(above, scored, max_k or 99)

    handle = select(at, impl, device, ops.Threshold(max_k), (x.view(-1, lanes, 1), R), (tau, FORMAT.BATCHED))
    assert_lists(at, handle, lanes, wanted)


@pytest.mark.parametrize("impl", BOTH)
def test_union(impl, device):
    at = bench(device, top_k=1)
    x, y = (hostile_scores(at, 1, seed) for seed in (1, 2))
    ctx = at.context(impl)
    handle = flowlib.SelectionHandle(ctx)
    one, other = (flowlib.as_vtensor(value.to(device), R, ctx) for value in (x, y))
    ops.Union()(ops.TopK(2)(one, ctx=ctx), ops.TopK(3)(other, ctx=ctx), handle, ctx=ctx)

    def wanted(row, lane, scored):
        return best(x.view(ROWS, -1)[row].tolist(), scored, 2) | best(y.view(ROWS, -1)[row].tolist(), scored, 3)

    assert_lists(at, handle, 1, wanted)


@pytest.mark.parametrize("impl", BOTH)
def test_reserved(impl, device):
    at = bench(device, bos=2, eos=3)
    handle = select(at, impl, device, ops.Reserved())
    assert_lists(at, handle, 1, lambda row, lane, scored: set())


# -- constants and state


@pytest.mark.parametrize("impl", BOTH)
def test_page_position(impl, device):
    at = bench(device)
    ctx = at.context(impl)
    out = ops.PagePosition()(ctx=ctx)
    assert (out.format, out.shape) == (R, (1, 1))
    assert out.data.flatten()[at.scored().to(device)].tolist() == [e % at.batch.width for e in at.scored().tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("name", ["Fill", "CFill"])
def test_fill(name, impl, dtype, device):
    at = bench(device)
    ctx = at.context(impl, side=Side.CACHE)
    field = torch.full((at.entries[P], 3, 5), -77.0, dtype=dtype, device=device)
    loc = torch.tensor([2 * PAGE - 1, 2 * PAGE, 5 * PAGE - 1], device=device)
    getattr(ops, name)(1.5)(flowlib.as_vtensor(field, P, ctx), loc=loc, ctx=ctx)
    filled = (field.view(-1, HEADS, 3, 5) == 1.5).flatten(1)
    assert filled.all(1).nonzero().flatten().tolist() == [1, 4], "the pages that were finished"
    assert (field == -77.0).sum() == (at.store.num_pages - 2) * HEADS * 15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [R, P, FORMAT.BATCHED], ids=lambda f: f.name)
@pytest.mark.parametrize("impl", BOTH)
def test_save(impl, format, dtype, device):
    """Written are the scored pages of every row, nothing else."""
    at = bench(device)
    ctx, x = at.context(impl), at.draw((3, 5), format, torch.float32, seed=1)
    field = torch.full((at.entries[P], 3, 5), -77.0, dtype=dtype, device=device)
    ops.Save()(flowlib.as_vtensor(x.to(device), format, ctx), flowlib.as_vtensor(field, P, ctx), ctx=ctx)
    wanted = torch.full_like(field, -77.0).cpu()
    wanted[at.source(P)] = x[at.source(format)].to(dtype)
    assert torch.equal(field.cpu(), wanted)
