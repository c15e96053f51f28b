"""Entmax attention compiled for three generations of GPU, on a machine without one: no spills.

Interpreting and compiling cannot share a process: run this folder by itself.
"""

from dataclasses import dataclass

import pytest
import torch

import flowlib
from flowlib.compiler.emit import leaf_names
from flowlib.compiler.program import TileStage
from flowlib.kernels import entmax, gaussian, select, select_above
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
TARGETS = ["sm_80", "sm_90", "sm_100"]
BS, WIDTH, SLOTS = 2, 512, 4096
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    splits: int = 4
    per_head: bool = True
    alibi: bool = False
    alpha: float = 1.5
    selected: int = 130
    mode: str = "exact"
    bounds: bool = True
    alphas: bool = False

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Shape, name)]
        return " ".join(changed).replace("torch.", "") or "default"


SHAPES = [
    Shape(),
    Shape(dim=64, v_dim=64, alpha=2.0, alibi=True, splits=1, bounds=False),
    Shape(group=8, page=1, per_head=False, alpha=1.25, selected=8192),
    Shape(group=3, dim=96, v_dim=96, page=64, selected=2048),
    Shape(kv_dtype=FP8, alpha=2.0, mode="corrected"),
    Shape(dim=64, v_dim=64, dtype=torch.float32, kv_dtype=torch.float32, alpha=1.75, alphas=True),
    Shape(group=1, selected=65536, page=16, mode="fixed"),
    Shape(group=1, dim=64, v_dim=64, dtype=torch.float16, kv_dtype=torch.float16, selected=65536),
    Shape(per_head=False, dtype=torch.float16, kv_dtype=torch.float16, alpha=1.01, alphas=True, selected=1024),
]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch(shape: Shape) -> None:
    heads, lists, int32 = shape.heads * shape.group, shape.heads * (shape.group if shape.per_head else 1), torch.int32
    scratch = {
        name: zeros(BS, *size, dtype=getattr(torch, dtype))
        for name, (size, dtype) in entmax.workspace(heads, shape.selected, shape.page).items()
    }
    if shape.splits > 1:
        scratch["partial_o"] = zeros(BS, heads, shape.splits, shape.v_dim)
        scratch["partial_mass"] = zeros(BS, heads, shape.splits)
    pages = zeros(BS, lists, shape.selected, dtype=int32)
    entmax.launch_entmax(
        zeros(BS, heads, shape.dim, dtype=shape.dtype), zeros(SLOTS, shape.heads, shape.dim, dtype=shape.kv_dtype),
        zeros(SLOTS, shape.heads, shape.v_dim, dtype=shape.kv_dtype), zeros(BS, WIDTH, dtype=int32),
        zeros(BS, dtype=int32), pages, zeros(BS, lists, dtype=int32), zeros(BS, heads, shape.v_dim, dtype=shape.dtype),
        zeros(BS, heads), zeros(BS, heads), **scratch, arrived=zeros(BS * heads, dtype=int32),
        num_kv_heads=shape.heads, group_size=shape.group, lanes=shape.group if shape.per_head else 1,
        page_size=shape.page, scale=shape.dim**-0.5, k_scale=1.0, v_scale=1.0, alpha=shape.alpha, mode=shape.mode,
        steps=3, estimate=None if shape.mode == "exact" else zeros(BS, heads),
        a_of_head=zeros(heads) if shape.alphas else None,
        bounds=zeros(BS * shape.heads, shape.group, WIDTH) if shape.bounds else None,
        certified=zeros(BS, heads, dtype=torch.int8) if shape.bounds else None,
        alibi_slopes=zeros(heads) if shape.alibi else None, num_splits=shape.splits, physical=pages,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entmax(shape, target):
    if shape.kv_dtype == FP8 and target == "sm_80":
        pytest.skip("e4m3 conversions exist from sm_89 on")
    with compile_only(target) as kernels:
        launch(shape)
    print("\n" + "\n".join(report(kernels)))
    assert [kernel.name for kernel in kernels] == ["score_kernel", "threshold_kernel", "value_kernel"]
    for kernel in kernels:
        assert 0 < kernel.registers <= 255
        assert kernel.spills == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel
        assert kernel.matrix_ops or kernel.name == "threshold_kernel" or shape.dtype == torch.float32


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("alpha", "width", "dim"), [(1.5, 512, 128), (2.0, 8192, 64), (1.25, 300, 96), (4 / 3, 70_000, 256)]
)
def test_gaussian_thresholds(alpha, width, dim, target):
    heads, group, int32 = 8, 4, torch.int32
    mu, sigma = (zeros(BS * heads, group, width) for _ in range(2))
    parts = gaussian.parts_of(width)
    room = zeros(BS * heads, group, parts, 3) if parts else None
    rows = {"num_kv_heads": heads, "page_size": 16, "bos": 0, "eos": 1}
    step = {
        "q": zeros(BS, heads * group, dim, dtype=torch.bfloat16), "k": zeros(SLOTS, heads, dim, dtype=torch.bfloat16),
        "page_table": zeros(BS, width, dtype=int32), "scale": 0.1, "k_scale": 1.0, "alibi_slopes": zeros(heads * group),
    }  # fmt: skip
    with compile_only(target) as kernels:
        options = {"alpha": alpha, "safety_margin_z": 0.0, "excess": 0.1}
        tau = zeros(BS * heads, group)
        for moments in (None, room) if parts else (None,):
            gaussian.launch_gaussian_tau(
                mu, sigma, tau, zeros(BS, dtype=int32), **rows, **options, mixture=False, moments=moments
            )
        gaussian.launch_gaussian_tau(
            mu, sigma, tau, zeros(BS, dtype=int32), **rows, **options, mixture=None, tail=True, **step, estimate=tau
        )
        gaussian.launch_tail_floor(tau, zeros(BS, dtype=int32), **rows, alpha=alpha, **step)
    print("\n" + "\n".join(report(kernels)))
    counted = ["gaussian_moments_kernel", "gaussian_tau_kernel"] if parts else []
    assert [k.name for k in kernels] == ["gaussian_tau_kernel", *counted, "gaussian_tau_kernel", "tail_floor_kernel"]
    for kernel in kernels:
        assert 0 < kernel.registers <= 255
        assert kernel.spills == 0, kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["entmax_gaussian_attention", "entmax_topk_attention"])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (3, 96)])
def test_float8_statistics(group, dim, name, target):
    """Kernels that read them multiply on tensor cores and copy ahead; a group of one leaves room for eight programs."""
    flow = flowlib.build(name, certify=True, tau_mode="corrected") if "gaussian" in name else flowlib.build(name)
    spec = flowlib.Spec(
        page_size=16, head_dim=dim, group_size=group, num_kv_heads=8, kv_dtype=torch.float16, bos=0, top_k=64,
        max_pages=WIDTH, summary_dtype=FP8,
    )  # fmt: skip
    plan = flowlib.profile(flow, spec)
    pool = flowlib.PagedPool(plan, num_pages=4)
    batch = flowlib.Batch(zeros(BS, WIDTH, dtype=torch.int32), zeros(BS, dtype=torch.int32))
    with compile_only(target) as kernels:
        q = zeros(BS, spec.num_heads, dim, dtype=torch.float16)
        plan._executor.choose(q, pool, batch, plan.allocate(BS, WIDTH, "cpu"))
    print("\n" + "\n".join(report(kernels)))
    made = {kernel.name: kernel for kernel in kernels}
    readers = [made[stage.name] for stage in plan.program.stages if _reads(stage, plan.fields)]
    assert len(readers) == len(plan.fields) // 2
    for kernel in readers:
        assert kernel.spills == 0, kernel
        assert kernel.matrix_ops, "no product of fp32 elements"
        assert "cp.async" in kernel.ptx
        assert kernel.registers <= (64 if group == 1 else 80), kernel


def _reads(stage, fields):
    return isinstance(stage, TileStage) and not stage.on_write and not set(leaf_names(stage)).isdisjoint(fields)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("width", [4096, 8192, 65536, 2**20])
def test_selection_without_a_budget(width, counted, target):
    """In one launch, or counted by a kernel before it, as dependent launches where the target has them."""
    heads, int32 = 8, torch.int32
    lists, blocks = [zeros(BS, heads, width, dtype=int32) for _ in range(2)], select_above.counted_blocks(width)
    with compile_only(target) as kernels:
        select.launch_select(
            zeros(BS * heads, 1, width), zeros(BS, dtype=int32), lists[0], zeros(BS, heads, dtype=int32),
            num_kv_heads=heads, lanes=1, page_size=16, bos=0, eos=1, top_k=1 << 30, ratio_q16=0, dense_below=0,
            scored=True, page_table=zeros(BS, width, dtype=int32), physical=lists[1],
            counts=zeros(BS, heads, blocks, dtype=int32) if counted and blocks else None, pdl=target != "sm_80",
        )  # fmt: skip
    print("\n" + "\n".join(report(kernels)))
    first = ["count_kept_kernel"] if counted and blocks else []
    assert [k.name for k in kernels] == [*first, "select_above_kernel"]
    for kernel in kernels:
        assert kernel.spills == 0, kernel


def test_only_the_counts_are_waited_for():
    """The kernel that writes lists reads scores, lengths and the page table before it waits, and writes nothing."""
    width, int32 = 8192, torch.int32
    with compile_only("sm_90") as kernels:
        select.launch_select(
            zeros(BS, 1, width), zeros(BS, dtype=int32), zeros(BS, 1, width, dtype=int32), zeros(BS, 1, dtype=int32),
            num_kv_heads=1, lanes=1, page_size=16, bos=0, eos=1, top_k=1 << 30, ratio_q16=0, dense_below=0, scored=True,
            page_table=zeros(BS, width, dtype=int32), physical=zeros(BS, 1, width, dtype=int32),
            counts=zeros(BS, 1, select_above.counted_blocks(width), dtype=int32), pdl=True,
        )  # fmt: skip
    for kernel, early in zip(kernels, (1, 1 + 8 + 8), strict=True):  # eight pages a thread
        lines = kernel.ptx.splitlines()
        wait = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
        assert len(wait) == 1
        assert wait[0] < min(i for i, line in enumerate(lines) if "st.global" in line)
        assert sum("ld.global" in line for line in lines[: wait[0]]) == early, kernel.name
        assert any("ld.global" in line for line in lines[wait[0] :])
