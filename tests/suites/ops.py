"""Every op, called alone: reference in float64 and fp32, and Triton, against a formula written a second time."""

from itertools import product

import pytest
import torch

import flowlib
from flowlib import FORMAT, ops
from flowlib.core.formats import Side
from flowlib.testing import expect, fill_nan
from tests.suites.op_cases import CASES, base_of, missing, tile_names
from tests.suites.op_run import HEADS, PAGE, ROWS, bench

B, R, P = FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED
FORMATS = {1: [(B,), (R,), (P,)], 2: [(B, B), (B, P), (P, R), (R, B)]}
DTYPES = [torch.float32, torch.bfloat16]
TRIPLES = [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "triton")]
"""(computed in, by)"""


def named(cache: bool):
    pairs = [(n, case) for n in tile_names(cache) for case in CASES[base_of(n)]]
    return pytest.mark.parametrize(("name", "case"), pairs, ids=[f"{n}-{case}" for n, case in pairs])


def test_every_exported_op_has_cases():
    assert missing() == [], "add them to tests/suites/op_cases.py"
    assert tile_names(cache=False)
    assert tile_names(cache=True)


@pytest.mark.parametrize("dtype", DTYPES)
@named(cache=False)
def test_indexer_op(name, case, dtype, device):
    at = bench(device)
    for formats in FORMATS[len(case.shapes)]:
        inputs = [
            at.draw(shape, f, dtype, seed, case.domain == "positive")
            for seed, (shape, f) in enumerate(zip(case.shapes, formats, strict=True))
        ]
        batched = all(f is B for f in formats)
        lined_up = inputs if batched else [x[at.source(f)] for x, f in zip(inputs, formats, strict=True)]
        for compute, impl in TRIPLES:
            ctx = at.context(impl, compute)
            given = [flowlib.as_vtensor(x.to(device), f, ctx) for x, f in zip(inputs, formats, strict=True)]
            out = case.make(name)(*given, ctx=ctx)
            assert out.format is (B if batched else R)
            wanted = expect(
                case.formula, lined_up, dtype=compute, compute=compute, terms=case.terms, independent=True
            )
            assert out.shape == tuple(wanted.truth.shape[1:])
            result = out.data if batched else out.data[at.scored().to(device)]
            verdict = wanted.judge(result)
            assert verdict.ok, f"{[f.name for f in formats]} by {impl} in {compute}: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@named(cache=True)
def test_cache_op(name, case, dtype, device):
    """Written are exactly the pages whose last slot is in loc, in the field's own dtype."""
    at = bench(device)
    finished = [p for own in at.pages for p in own[:2]]
    unfinished = [at.pages[0][4] * PAGE + PAGE - 2, at.pages[0][5] * PAGE]
    loc = torch.tensor([p * PAGE + PAGE - 1 for p in finished] + unfinished, dtype=torch.int64)
    entries = torch.tensor([p * HEADS + h for p in finished for h in range(HEADS)])
    inputs = []
    for seed, shape in enumerate(case.shapes):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(at.entries[P], *shape, generator=generator).to(dtype)
        kept = values.abs() + 0.125 if case.domain == "positive" else values.clone()
        fill_nan(values)
        values[entries] = kept[entries]
        inputs.append(values)
    for compute, impl in TRIPLES:
        ctx = at.context(impl, compute, Side.CACHE)
        given = [flowlib.as_vtensor(x.to(device), P, ctx) for x in inputs]
        lined_up = [x[entries] for x in inputs]
        wanted = expect(case.formula, lined_up, dtype=dtype, compute=compute, terms=case.terms, independent=True)
        field = torch.full((at.entries[P], *wanted.truth.shape[1:]), -77.0, dtype=dtype, device=device)
        case.make(name)(*given, flowlib.as_vtensor(field, P, ctx), loc=loc.to(device), ctx=ctx)
        verdict = wanted.judge(field[entries.to(device)])
        assert verdict.ok, f"by {impl} in {compute}: {verdict}"
        others = torch.ones(at.entries[P], dtype=torch.bool)
        others[entries] = False
        assert (field[others.to(device)] == -77.0).all(), "a page that was not finished is not touched"
        temporary = case.make(name)(*given, None, loc=loc.to(device), ctx=ctx)
        assert wanted.judge(temporary.data[entries.to(device)].to(dtype)).ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3.5, None])
@pytest.mark.parametrize(("shape", "format"), list(product([(1, 1), (3, 1), (2, 5)], [R, P])), ids=str)
def test_softmax(shape, format, scale, dtype, device):
    at = bench(device)
    factor = 16**-0.5 if scale is None else scale
    x = at.draw(shape, format, dtype, seed=3) * 4
    rows = torch.div(at.scored(), at.batch.width, rounding_mode="floor")
    for compute, impl in TRIPLES:
        ctx = at.context(impl, compute)
        given = flowlib.as_vtensor(x.to(device), format, ctx)
        out = ops.Softmax(dim=0, scale=scale)(given, ctx=ctx).data.cpu()
        for row in range(ROWS):
            own = at.scored()[rows == row]
            wanted = expect(
                lambda x: (factor * x).softmax(0), [x[at.source(format)[rows == row]]],
                dtype=compute, compute=compute, terms=len(own) + 6,
            )  # fmt: skip
            verdict = wanted.judge(out[own])
            assert verdict.ok, f"row {row} by {impl} in {compute}: {verdict}"


def chosen_by_sort(scores: list[float], pages: int, budget: int, bos: int, eos: int) -> list[int]:
    """The best `budget` pages of a row by plain sorting, the reserved ones added."""
    best = sorted((-s + 0.0, page) for page, s in enumerate(scores) if bos <= page < pages - eos and s > float("-inf"))
    reserved = [p for p in range(pages) if p < bos or p >= pages - eos]
    return sorted({*reserved, *(page for _, page in best[:budget])})


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("top_k", "ratio"), [(2, 0.0), (0, 0.0), (1, 0.5), (99, 0.0)])
def test_top_k(top_k, ratio, lanes, device):
    """Ties go to the lower page; -inf and NaN are never chosen, not even to fill the budget."""
    at = bench(device, top_k=top_k, top_k_ratio=ratio)
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randint(-2, 3, (at.entries[R], lanes, 1), generator=generator).float()
    x[::5], x[1::7], x[2::11] = float("-inf"), float("nan"), float("inf")
    pages, counts = {}, at.batch.seq_lens.cpu().add(PAGE - 1).div(PAGE, rounding_mode="floor").tolist()
    for impl in ("reference", "triton"):
        ctx = at.context(impl)
        handle = flowlib.SelectionHandle(ctx)
        assert ops.topK()(flowlib.as_vtensor(x.to(device), R, ctx), handle, ctx=ctx) is None
        pages[impl] = handle.pages.cpu()
        for request, count in enumerate(counts):
            for head, lane in product(range(HEADS), range(lanes)):
                row = (request * HEADS + head) * at.batch.width
                scores = x[row : row + at.batch.width, lane, 0].tolist()
                budget = max(top_k, (count * round(ratio * 65536)) >> 16)
                wanted = chosen_by_sort(scores, count, budget, at.plan.spec.bos, at.plan.spec.eos)
                listed = handle.pages[request, head * lanes + lane].tolist()
                assert listed == wanted + [-1] * (len(listed) - len(wanted)), (impl, request, head, lane)
                assert int(handle.lengths[request, head * lanes + lane]) == len(wanted)
    assert torch.equal(pages["reference"], pages["triton"])


def test_reserved(device):
    at = bench(device, bos=2, eos=3)
    for impl in ("reference", "triton"):
        ctx = at.context(impl)
        handle = flowlib.SelectionHandle(ctx)
        ops.Reserved()(handle, ctx=ctx)
        for request, lists in enumerate(handle.pages.tolist()):
            count = -(-int(at.batch.seq_lens[request]) // PAGE)
            wanted = [p for p in range(count) if p < 2 or p >= count - 3]
            assert lists == [wanted + [-1] * (5 - len(wanted))] * HEADS
            assert handle.lengths[request].tolist() == [len(wanted)] * HEADS
