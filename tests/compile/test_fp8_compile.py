"""Kernels with float8 summaries compiled for GPUs with and without float8, on a machine without one."""

from collections import Counter

import pytest
import torch

import flowlib
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report
from tests.compile.test_flows_compile import generated, plan_for

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
FP8 = torch.float8_e4m3fn
ORDINARY = {"group_size": 4, "head_dim": 128, "page_size": 16}
COMPILED = [
    ("gqa_quest_sparse_attention", ORDINARY, "sm_80"),
    ("gqa_quest_sparse_attention", ORDINARY, "sm_90"),
    ("gqa_quest_sparse_attention", ORDINARY, "sm_100"),
    ("gqa_quest_sparse_attention", {"group_size": 16, "head_dim": 128, "page_size": 64}, "sm_90"),
    ("gqa_block_sparse_attention", ORDINARY, "sm_80"),
    ("gqa_block_sparse_attention", ORDINARY, "sm_90"),
    ("gqa_block_sparse_attention", ORDINARY, "sm_100"),
    ("block_sparse_attention", {"group_size": 3, "head_dim": 96, "page_size": 16}, "sm_90"),
    ("quest_sparse_attention", ORDINARY, "sm_90"),
    ("gaussian_sparse_attention", {"group_size": 16, "head_dim": 128, "page_size": 16}, "sm_90"),
    ("h2o_sparse_attention", {"group_size": 3, "head_dim": 96, "page_size": 16}, "sm_90"),
]


def launch(plan: flowlib.Plan, rows: int = 2) -> None:
    """An update, scores and page lists, and the launch that updates and scores."""
    spec, executor = plan.spec, plan._executor
    pool = flowlib.PagedPool(plan, num_pages=4)
    batch = flowlib.Batch(torch.zeros(rows, spec.max_pages, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    q = torch.zeros(rows, spec.num_heads, spec.head_dim, dtype=spec.field_dtype)
    loc = torch.zeros(4, dtype=torch.int64)
    executor.update(pool, loc)
    executor.choose(q, pool, batch, plan.allocate(rows, spec.max_pages, "cpu"))
    if executor.joined is not None:
        executor.choose(q, pool, batch, plan.allocate(rows, spec.max_pages, "cpu"), loc)


@pytest.mark.parametrize(("name", "sizes", "target"), COMPILED)
def test_nothing_spills(name, sizes, target):
    plan = plan_for(name, summary_dtype=FP8, **sizes)
    with compile_only(target) as kernels:
        launch(plan)
    print("\n" + "\n".join(report(kernels)))
    names = Counter(kernel.name for kernel in kernels)
    assert all(names[kernel] == 1 for kernel in generated(plan)), "each generated kernel is compiled once"
    for kernel in kernels:
        assert kernel.name not in generated(plan) or kernel.spills == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel
