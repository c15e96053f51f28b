"""Adding an op is one file and one line; adding a flow is one file: done here in a package of somebody else's."""

import os
import sys
from pathlib import Path

import pytest
import torch

import flowlib
from flowlib.core import registry
from flowlib.errors import ShapeError
from flowlib.testing import Case, scene, verify_flow
from tests.processes import ROOT, python
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS

OP = '''
"""Soft threshold: shrinks a value towards 0."""

from __future__ import annotations

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side


class Shrink(TileOp):
    """sign(x) · max(|x| − by, 0)."""

    def __init__(self, by: float = 0.0) -> None:
        self.by = float(by)

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.sign() * (x.abs() - self.by).clamp(min=0.0)

    def emit(self, e: Emitter, x: Block) -> Block:
        x = e.let(e.fp32(x), x.shape, x)
        return e.let(f"tl.where({x.name} > 0, 1.0, -1.0) * tl.maximum(tl.abs({x.name}) - {self.by}, 0.0)", x.shape, x)


CShrink = cache_side(Shrink)
'''
LINE = "from {package}.shrink import CShrink, Shrink\n"
FLOW = '''
"""Block-sparse attention that ignores the small channels of a page's mean key."""

from __future__ import annotations

from flowlib import register, vFlow
from flowlib.ops import CMean, GeMM, Max, topK
from {package} import CShrink, Shrink


@register("{package}_flow")
class ShrunkCentroid(vFlow):
    """The largest score of the group; scores near 0 count as 0."""

    def __init__(self, by: float = 0.05) -> None:
        self.cmean, self.cshrink = CMean(dim=1), CShrink(by)
        self.gemm, self.max, self.shrink, self.topk = GeMM(), Max(dim=2), Shrink(0.25), topK()

    def create_cache(self, page_size, head_dim):
        return {{"centroid": (1, head_dim)}}

    def forward_cache(self, cache, loc, ctx):
        self.cshrink(self.cmean(cache["k"], None, loc=loc, ctx=ctx), cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        scores = self.shrink(self.max(self.gemm(q, cache["centroid"], ctx=ctx), ctx=ctx), ctx=ctx)
        self.topk(scores, o, ctx=ctx)
'''
PACKAGE = "somebodys_ops"
SPEC = flowlib.Spec(page_size=8, head_dim=24, v_head_dim=40, group_size=3, top_k=2, max_pages=14, max_batch=4)
FP32 = SPEC.replace(kv_dtype=torch.float32, group_size=7, num_kv_heads=1, head_dim=80)
LENGTHS = (93, 41, 0, 25)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one op: one file, and one line in its ``__init__.py``. And a flow file beside it."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "shrink.py").write_text(OP)
    (folder / "__init__.py").write_text(LINE.format(package=PACKAGE))
    (tmp_path / "shrunk.py").write_text(FLOW.format(package=PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_FLOWS", dict(registry._FLOWS))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith((PACKAGE, "flowlib_user_shrunk"))]:
        del sys.modules[name]


def build(package: Path, **options: object) -> flowlib.vFlow:
    return flowlib.build(f"{PACKAGE}_flow", module_path=package / "shrunk.py", **options)


def test_it_is_one_file_and_one_line(package):
    assert sorted(p.name for p in (package / PACKAGE).iterdir() if p.is_file()) == ["__init__.py", "shrink.py"]
    assert len((package / PACKAGE / "__init__.py").read_text().splitlines()) == 1
    assert f"{PACKAGE}_flow" not in flowlib.list_flows()
    build(package)
    assert f"{PACKAGE}_flow" in flowlib.list_flows()


def test_it_profiles_and_fuses(package):
    plan = flowlib.profile(build(package), SPEC)
    assert plan.fields["centroid"].shape == (1, SPEC.head_dim)
    assert len(plan.program.stages) == len(
        flowlib.profile(flowlib.build("quest_sparse_attention"), SPEC).program.stages
    )
    assert "tl.maximum(tl.abs(" in plan.program.source


@pytest.mark.parametrize("spec", [SPEC, FP32], ids=["bf16", "fp32"])
def test_reference_and_triton_agree_with_its_own_meaning(package, spec):
    build(package)
    report = verify_flow(f"{PACKAGE}_flow", cases=[Case("small", spec, LENGTHS)])
    assert report.ok, str(report)
    assert report.oracle == "own reference"
    assert {r.impl for r in report.results} == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_its_field_is_what_the_formula_says(package, impl):
    """Against the formula written here: by hand, not by the op's own code."""
    made = scene(flowlib.profile(build(package, by=0.125), FP32), LENGTHS)
    keys = torch.stack([made.k[0][8 * j : 8 * j + 8, 0].double().mean(0) for j in range(len(made.k[0]) // 8)])
    shrunk = torch.where(keys.abs() > 0.125, keys - keys.sign() * 0.125, 0.0)
    got = made.pool_by(impl).fields["centroid"][list(made.pages[0][: len(keys)]), 0, 0]
    torch.testing.assert_close(got.double(), shrunk, rtol=0, atol=1e-6)
    assert (shrunk == 0).any()
    assert (shrunk != 0).any()


def test_a_wrong_call_of_it_names_the_line_of_the_flow(package):
    text = (package / "shrunk.py").read_text().replace("self.topk(scores, o", "self.topk(self.shrink(q, ctx=ctx), o")
    (package / "shrunk.py").write_text(text)
    with refused(ShapeError, "topK: axis 2 of 'x' is 24, expected 1", "shrunk.py:", "self.topk(self.shrink(q"):
        flowlib.profile(build(package), SPEC)


def test_the_command_line_takes_the_flow_file(package):
    path = f"{ROOT}{os.pathsep}{package}"
    shown = python("-m", "flowlib", "list", "--flow-file", package / "shrunk.py", PYTHONPATH=path)
    assert f"{PACKAGE}_flow" in shown
