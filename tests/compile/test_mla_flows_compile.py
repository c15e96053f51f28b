"""Kernels of flows over MLA latents compiled for three generations of GPU, on a machine without one."""

import re

import pytest
import torch

import flowlib
from flowlib.kernels import attend_mla
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
TARGETS = ["sm_80", "sm_90", "sm_100"]
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def judge(kernels, target: str) -> None:
    print("\n" + "\n".join(report(kernels)))
    for kernel in kernels:
        assert kernel.target == target
        assert kernel.spills == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel


def copies_ahead(ptx: str) -> bool:
    """Whether a loop waits for a tile while copies of a later one go on."""
    return any(int(n) > 0 for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))


def attend(heads=16, page=16, dtype=BF16, kv_dtype=BF16, rank=512, size=576, splits=4, lanes=1, physical=True, **how):
    rows, slots, selected = 2, 4096, 130
    latent = torch.empty(slots, 1, size, dtype=kv_dtype)
    attend_mla.launch_attend_mla(
        torch.empty(rows, heads, size, dtype=dtype), latent, latent[..., :rank], ints(rows, 512), ints(rows),
        ints(rows, lanes, selected), ints(rows, lanes), torch.empty(rows, heads, rank, dtype=dtype),
        torch.empty(rows, heads), torch.empty(rows, heads, splits, rank), torch.empty(rows, heads, splits),
        num_kv_heads=1, group_size=heads, lanes=lanes, page_size=page, scale=0.1, k_scale=1.0,
        v_scale=1.0, num_splits=splits, physical=ints(rows, lanes, selected) if physical else None, **how,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_attention(heads, target):
    """Tiles of 16, 32 and 64 heads; selected pages of one token and of many, and whole rows."""
    pdl = target != "sm_80"
    with compile_only(target) as kernels:
        for page in (1, 64):
            attend(heads, page, selected=True, pdl=pdl)
        attend(heads, splits=1, physical=False)
        attend(heads, physical=False, every=True, pdl=pdl)
    judge(kernels, target)
    attention = [kernel for kernel in kernels if kernel.name == "attend_mla_kernel"]
    assert len(attention) == 4
    assert all(kernel.matrix_ops for kernel in attention), "16-bit attention runs on tensor cores"
    assert all(copies_ahead(k.ptx) for k in attention if k.num_stages > 2), "the next tile is on its way"


@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_other_sizes_and_dtypes(target):
    with compile_only(target) as kernels:
        attend(20, dtype=FP16, kv_dtype=FP16)
        attend(40, rank=256, size=288)
        attend(16, lanes=16)
        attend(128, dtype=FP32, kv_dtype=FP32)
        if target != "sm_80":  # e4m3 conversions exist from sm_89 on
            attend(16, kv_dtype=FP8)
            attend(128, kv_dtype=FP8)
    judge(kernels, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", flowlib.list_flows(mla=True))
def test_flow(name, target):
    """Everything an update and a decode step launch: 128 heads and pages of 64, 16 heads and pages of 16 and of 1."""
    for heads, page in ((128, 64), (16, 16), (16, 1)) if target == "sm_90" else ((128, 64),):
        flow = flowlib.build(name)
        plan = flowlib.profile(flow, flow.default_spec(group_size=heads, page_size=page, top_k=64))
        pool = flowlib.PagedPool(plan, num_pages=4)
        batch = flowlib.Batch(ints(2, plan.spec.max_pages), ints(2))
        q = torch.zeros(2, heads, 576, dtype=BF16)
        with compile_only(target) as kernels:
            plan._executor.update(pool, torch.zeros(4, dtype=torch.int64))
            plan.launch(q, pool, batch, plan.allocate(2, plan.spec.max_pages, "cpu"))
            plan.launch(q, pool, batch, plan.allocate(2, plan.spec.max_pages, "cpu"), torch.zeros(2, dtype=torch.int64))
        names = {kernel.name for kernel in kernels}
        assert {"update", "score", "select_kernel", "attend_mla_kernel"} <= names
        assert ("merge_mla_kernel" in names) == (page > 1), "66 tokens are one split"
        assert ("rows_and_update" in names) == (page == 1), "large pages are updated in a launch of their own"
        judge(kernels, target)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", flowlib.list_flows(mla=True))
def test_queries_are_reduced_once_per_row(name, heads):
    """Scoring reads no query: 128 heads of 576 channels in each program are more than its registers hold."""
    flow = flowlib.build(name)
    plan = flowlib.profile(flow, flow.default_spec(group_size=heads, page_size=64, top_k=64))
    pool, out = flowlib.PagedPool(plan, num_pages=4), plan.allocate(2, plan.spec.max_pages, "cpu")
    batch = flowlib.Batch(ints(2, plan.spec.max_pages), ints(2))
    with compile_only("sm_90") as kernels:
        plan._executor.choose(torch.zeros(2, heads, 576, dtype=BF16), pool, batch, out)
    judge(kernels, "sm_90")
    rows, score, _ = kernels
    assert (rows.name, score.name) == ("rows", "score")
    assert rows.registers <= 64
    assert score.registers <= 128, "four programs and more on a multiprocessor"
    assert "p_q" not in plan._executor.tiles["score"].kernel.arg_names


def test_rows_of_pages_are_read_without_bank_conflicts():
    """Four rows per page are loaded as a block of two axes: in shared memory one of three axes is not swizzled."""
    flow = flowlib.build("lserve_centroid_mla")
    plan = flowlib.profile(flow, flow.default_spec(group_size=16, page_size=64))
    assert plan.fields["centroid"].shape == (4, 576)
    assert "# centroid [16, 576]" in plan.program.source.split("def score(")[1]


def test_lengths_are_no_reason_to_compile_again():
    with compile_only("sm_90") as kernels:
        for splits in (4, 3):
            attend(splits=splits)
    assert [kernel.name for kernel in kernels] == ["attend_mla_kernel", "merge_mla_kernel"]
