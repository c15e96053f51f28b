"""Every op, called alone: reference in float64 and fp32, and Triton, against a formula written a second time."""

from itertools import product

import pytest
import torch

import flowlib
from flowlib import FORMAT
from flowlib.core.formats import Side
from flowlib.testing import expect, fill_nan
from tests.suites.op_cases import CASES, base_of, missing, tile_names
from tests.suites.op_run import HEADS, PAGE, bench, draw

B, R, P = FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED
FORMATS = {1: [(P,), (R,), (B,)], 2: [(B, P), (P, R), (R, B), (B, B)]}
DTYPES = [torch.float32, torch.bfloat16]
TRIPLES = [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "triton")]
"""(computed in, by)"""


def indexer_runs():
    """(name, case, formats, dtype): formats take turns over an op's cases and dtypes; each op meets all of them."""
    for name in tile_names(cache=False):
        for i, (case, dtype) in enumerate(product(CASES[name], DTYPES)):
            turns = case.formats or FORMATS[len(case.shapes)]
            formats = turns[(i + i // len(turns)) % len(turns)]
            label = "".join(f.value for f in formats)
            yield pytest.param(name, case, formats, dtype, id=f"{name}-{case}-{label}-{dtype}".replace("torch.", ""))


def cache_runs():
    """(name, case, dtype): the op is its indexer-side twin, so dtypes take turns over its cases."""
    for name in tile_names(cache=True):
        for i, case in enumerate(CASES[base_of(name)]):
            dtype = DTYPES[i % 2]
            yield pytest.param(name, case, dtype, id=f"{name}-{case}-{dtype}".replace("torch.", ""))


def test_every_exported_op_has_cases():
    assert missing() == [], "add them to tests/suites/op_cases.py"
    assert tile_names(cache=False)
    assert tile_names(cache=True)


@pytest.mark.parametrize(("name", "case", "formats", "dtype"), list(indexer_runs()))
def test_indexer_op(name, case, formats, dtype, device):
    at = bench(device)
    inputs = [
        at.draw(shape, f, dtype, seed, case.domain)
        for seed, (shape, f) in enumerate(zip(case.shapes, formats, strict=True))
    ]
    batched = all(f is B for f in formats)
    lined_up = inputs if batched else [x[at.source(f)] for x, f in zip(inputs, formats, strict=True)]
    for compute, impl in TRIPLES:
        ctx = at.context(impl, compute)
        given = [flowlib.as_vtensor(x.to(device), f, ctx) for x, f in zip(inputs, formats, strict=True)]
        out = case.make(name)(*given, ctx=ctx)
        assert out.format is (B if batched else R)
        wanted = expect(case.formula, lined_up, dtype=compute, compute=compute, terms=case.terms, independent=True)
        assert out.shape == tuple(wanted.truth.shape[1:])
        verdict = wanted.judge(out.data if batched else out.data[at.scored().to(device)])
        assert verdict.ok, f"by {impl} in {compute}: {verdict}"


@pytest.mark.parametrize(("name", "case", "dtype"), list(cache_runs()))
def test_cache_op(name, case, dtype, device):
    """Written are exactly the pages whose last slot is in loc, in the field's own dtype."""
    at = bench(device)
    finished = [p for own in at.pages for p in own[:2]]
    unfinished = [at.pages[0][4] * PAGE + PAGE - 2, at.pages[0][5] * PAGE]
    loc = torch.tensor([p * PAGE + PAGE - 1 for p in finished] + unfinished, dtype=torch.int64)
    entries = torch.tensor([p * HEADS + h for p in finished for h in range(HEADS)])
    inputs = []
    for seed, shape in enumerate(case.shapes):
        kept = draw((at.entries[P], *shape), dtype, seed, case.domain)
        values = torch.empty_like(kept)
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
