"""Every tile op alone compiled for a GPU, on a machine without one; its sizes are those it is checked with."""

import pytest
import torch

import flowlib
from flowlib import FORMAT
from flowlib.compiler.emit import emit
from flowlib.compiler.program import Output, TileStage
from flowlib.core.graph import Node
from flowlib.core.op import LEAF
from flowlib.runtime import interpreter
from flowlib.runtime.execute import TileKernel
from flowlib.testing.compile_only import compile_only
from tests.suites.op_cases import CASES, tile_names
from tests.suites.op_run import ROWS, WIDTH, bench

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
B, R, P = FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED
FORMATS = {1: [(P,), (R,), (B,)], 2: [(B, P), (P, R), (R, B), (B, B)]}
SPILLS = {"GeMM": 1024}
"""Bytes a thread may spill where it is more than 16: two operands that both change from page to page."""


def one_op(op, shapes, formats, dtype: torch.dtype, spec: flowlib.Spec) -> TileKernel:
    """The kernel of an op over inputs of some formats."""
    leaves = tuple(
        Node(LEAF, (), f, s, dtype=dtype, name=f"x{i}") for i, (f, s) in enumerate(zip(formats, shapes, strict=True))
    )
    rows = all(f is B for f in formats)
    node = Node(op, leaves, B if rows else R, op.infer(*shapes))
    stage = TileStage("one_op", (Output(node, "y", "rows" if rows else "entries"),))
    return TileKernel(stage, emit([stage], spec, title="OneOp"), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tile_names(cache=False))
def test_op(name, dtype):
    at = bench("cpu")
    for i, case in enumerate(CASES[name]):
        turns = case.formats or FORMATS[len(case.shapes)]
        op, formats = case.make(name), turns[i % len(turns)]
        kernel = one_op(op, case.shapes, formats, dtype, at.plan.spec)
        tensors = {f"x{i}": torch.zeros(ROWS, WIDTH, *shape, dtype=dtype) for i, shape in enumerate(case.shapes)}
        tensors["y"] = torch.zeros(ROWS, WIDTH, *op.infer(*case.shapes))
        with compile_only("sm_90") as kernels:
            kernel.on_rows(tensors, at.batch)
        assert len(kernels) == 1
        assert kernels[0].spills <= SPILLS.get(name, 16), f"{case}, {formats}: {kernels[0]}"
