"""Every flow's kernels compiled for three generations of GPU, on a machine without one: update and step.

Interpreting and compiling cannot share a process: run this folder by itself.
"""

from collections import Counter

import pytest
import torch

import flowlib
from flowlib.attention import Softmax
from flowlib.errors import OptionError
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
TARGETS = ["sm_80", "sm_90", "sm_100"]
SIZES = [
    {"group_size": 4, "head_dim": 128, "page_size": 16},
    {"group_size": 1, "head_dim": 64, "page_size": 1},
    {"group_size": 8, "head_dim": 128, "page_size": 64},
    {"group_size": 3, "head_dim": 96, "page_size": 16},
]
COMPILED = [*((SIZES[0], target) for target in TARGETS), *zip(SIZES[1:], TARGETS, strict=True)]
"""Ordinary sizes for every target, each of the others for one."""


def plan_for(name: str, **sizes: object) -> flowlib.Plan:
    flow = flowlib.build(name)
    try:
        return flowlib.profile(flow, flowlib.Spec(num_kv_heads=2, top_k=64, **sizes))
    except OptionError:
        sizes["page_size"] = flow.default_page_size
        return flowlib.profile(flow, flowlib.Spec(num_kv_heads=2, top_k=64, **sizes))


def launch(plan: flowlib.Plan, rows: int = 2) -> None:
    """Everything a decode step launches."""
    spec, executor = plan.spec, plan._executor
    pool = flowlib.PagedPool(plan, num_pages=4)
    batch = flowlib.Batch(
        torch.zeros(rows, spec.max_pages, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    )
    q = torch.zeros(rows, spec.num_heads, spec.head_dim, dtype=spec.field_dtype)
    loc = torch.zeros(4, dtype=torch.int64)
    executor.update(pool, loc)
    plan.launch(q, pool, batch, plan.allocate(rows, spec.max_pages, "cpu"))
    if executor.joined is not None:
        plan.launch(q, pool, batch, plan.allocate(rows, spec.max_pages, "cpu"), loc)


def spill_limit(kernel: str, target: str, plan: flowlib.Plan) -> int:
    """Bytes a thread may spill: none, but for attention over a head that takes two parts (96 = 64 + 32), and for a word
    or two that ptxas gives up on sm_100 to keep a kernel of three fields at 72 registers."""
    if kernel in generated(plan):
        return 16 if target == "sm_100" and len(plan.fields) > 2 else 0
    return 0 if plan.spec.head_dim & (plan.spec.head_dim - 1) == 0 else 16


def generated(plan: flowlib.Plan) -> set[str]:
    """Names of the kernels in the plan's module."""
    return {line[4:-1] for line in plan.program.source.splitlines() if line.startswith("def ")}


@pytest.mark.parametrize(
    ("sizes", "target"),
    COMPILED,
    ids=[f"g{s['group_size']}-d{s['head_dim']}-p{s['page_size']}-{t}" for s, t in COMPILED],
)
@pytest.mark.parametrize("name", flowlib.list_flows(mla=False))
def test_flow(name, sizes, target):
    plan = plan_for(name, **sizes)
    with compile_only(target) as kernels:
        launch(plan)
    print("\n" + "\n".join(report(kernels)))
    names = Counter(kernel.name for kernel in kernels)
    attention = {"attend_kernel"} if isinstance(plan.attention, Softmax) else {"score_kernel", "value_kernel"}
    assert {"select_kernel"} | attention | generated(plan) <= set(names)
    assert all(names[kernel] == 1 for kernel in generated(plan)), "each generated kernel is compiled once"
    for kernel in kernels:
        assert 0 < kernel.registers <= 255
        assert kernel.spills <= spill_limit(kernel.name, kernel.target, plan), kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel


@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "gqa_quest_sparse_attention"])
def test_a_batch_or_a_table_of_another_size_is_no_reason_to_compile_again(name):
    plan = plan_for(name, group_size=4, head_dim=128, page_size=16)
    with compile_only("sm_90") as kernels:
        launch(plan, rows=2)
        first = Counter(kernel.name for kernel in kernels)
        for rows, width in ((3, 129), (5, 513)):
            store = flowlib.PagedPool(plan, num_pages=4)
            batch = flowlib.Batch(torch.zeros(rows, width, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
            q = torch.zeros(rows, plan.spec.num_heads, plan.spec.head_dim, dtype=plan.spec.field_dtype)
            plan.launch(q, store, batch, plan.allocate(rows, width, "cpu"))
    again = Counter(kernel.name for kernel in kernels)
    assert {n: again[n] for n in generated(plan)} == {n: first[n] for n in generated(plan)}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_float8_pool(target):
    sizes = {"group_size": 8, "head_dim": 128, "page_size": 64}
    plan = plan_for("gqa_quest_sparse_attention", kv_dtype=torch.float8_e4m3fn, **sizes)
    with compile_only(target) as kernels:
        launch(plan)
    assert all(kernel.spills == 0 for kernel in kernels)
