"""Every hand-written kernel compiled for three generations of GPU, on a machine without one.

Interpreting and compiling cannot share a process: run this folder by itself.
"""

from dataclasses import dataclass

import pytest
import torch

from flowlib.core.errors import OptionError
from flowlib.kernels import attend, planning, segment, select, select_blocks
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
TARGETS = ["sm_80", "sm_90", "sm_100"]
BS, WIDTH, SELECTED, SLOTS = 2, 512, 130, 4096
FP8 = torch.float8_e4m3fn


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def judge(kernels, target: str, expected: set[str], spill_limit: int = 0) -> None:
    print("\n" + "\n".join(report(kernels)))
    assert {kernel.name for kernel in kernels} == expected
    for kernel in kernels:
        assert kernel.target == target
        assert 0 < kernel.registers <= 255
        assert kernel.spills <= spill_limit, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel


@dataclass(frozen=True)
class Shape:
    heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    splits: int = 1
    per_head: bool = False
    alibi: bool = False
    spills: int = 0  # bytes a thread may spill, where the shape is no ordinary one

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Shape, name)]
        return " ".join(changed).replace("torch.", "") or "default"


SHAPES = [
    Shape(splits=4),
    Shape(dim=64, v_dim=64, per_head=True, alibi=True),
    Shape(group=8, page=1),
    Shape(group=7, dim=96, v_dim=96, heads=4, page=48, splits=3),
    Shape(heads=3, group=3, dim=64, v_dim=64, page=128),
    Shape(kv_dtype=FP8),
    Shape(heads=1, group=16, dim=576, v_dim=512, splits=8),
    Shape(heads=1, group=128, dim=576, v_dim=512),
    Shape(dim=64, v_dim=64, dtype=torch.float32, kv_dtype=torch.float32),
    Shape(dtype=torch.float32, kv_dtype=torch.float32, spills=64),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend(shape, target):
    if shape.kv_dtype == FP8 and target == "sm_80":
        pytest.skip("e4m3 conversions exist from sm_89 on")
    heads, lists = shape.heads * shape.group, shape.heads * (shape.group if shape.per_head else 1)
    with compile_only(target) as kernels:
        attend.launch_attend(
            torch.empty(BS, heads, shape.dim, dtype=shape.dtype),
            torch.empty(SLOTS, shape.heads, shape.dim, dtype=shape.kv_dtype),
            torch.empty(SLOTS, shape.heads, shape.v_dim, dtype=shape.kv_dtype),
            ints(BS, WIDTH), ints(BS), ints(BS, lists, SELECTED), ints(BS, lists),
            torch.empty(BS, heads, shape.v_dim, dtype=shape.dtype), torch.empty(BS, heads),
            torch.empty(BS, heads, shape.splits, shape.v_dim), torch.empty(BS, heads, shape.splits),
            ints(BS * heads), num_kv_heads=shape.heads, group_size=shape.group,
            lanes=shape.group if shape.per_head else 1,
            page_size=shape.page, scale=shape.dim**-0.5, k_scale=1.0, v_scale=1.0,
            alibi_slopes=torch.empty(heads) if shape.alibi else None, num_splits=shape.splits,
        )  # fmt: skip
    judge(kernels, target, {"attend_kernel"}, shape.spills)
    if shape.dtype == torch.bfloat16:
        assert kernels[0].matrix_ops, "16-bit attention runs on tensor cores"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "spills"), [(64, 0), (2048, 0), (8192, 0), (16384, 1024)])
def test_select(width, spills, target):
    options = dict(num_kv_heads=8, lanes=1, page_size=16, bos=1, eos=1, top_k=128, ratio_q16=0, dense_below=0)
    with compile_only(target) as kernels:
        for scored in (True, False):
            buffers = torch.empty(BS * 8, 1, width), ints(BS), ints(BS, 8, SELECTED), ints(BS, 8)
            select.launch_select(*buffers, scored=scored, width=width, **options)
    assert len(kernels) == 2
    judge(kernels, target, {"select_kernel"}, spills)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("width", [32_768, 65_536, 2**20])
def test_select_from_rows_that_programs_search_together(width, rows, target):
    """As dependent launches where the target has them, in small and in large blocks."""
    with compile_only(target) as kernels:
        select.launch_select(
            torch.empty(rows * 8, 1, width), ints(rows), ints(rows, 8, SELECTED), ints(rows, 8),
            num_kv_heads=8, lanes=1, page_size=16, bos=1, eos=1, top_k=9000, ratio_q16=0, dense_below=0, scored=True,
            width=width, page_table=ints(rows, width), physical=ints(rows, 8, SELECTED),
            bins=ints(rows, 8, select.scratch_of(width, 9000)["bins"]), pdl=target != "sm_80",
        )  # fmt: skip
    assert [k.name for k in kernels] == ["select_kernel", *["digit_kernel"] * 4, "count_kernel", "write_kernel"]
    judge(kernels[1:], target, {"digit_kernel", "count_kernel", "write_kernel"})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("width", "top_k"), [(8192, 128), (16_384, 128), (32_768, 2048), (65_536, 2048), (131_072, 128)]
)
def test_select_by_the_best_of_each_block(width, top_k, rows, target, monkeypatch):
    monkeypatch.setattr(select_blocks.Blocks, "pays", lambda *_, **__: True)
    with compile_only(target) as kernels:
        for budget in (top_k, top_k - 1):
            select.launch_select(
                torch.empty(rows * 8, 1, width), ints(rows), ints(rows, 8, SELECTED), ints(rows, 8), num_kv_heads=8,
                lanes=1, page_size=16, bos=1, eos=1, top_k=budget, ratio_q16=0, dense_below=0, scored=True,
                width=width, page_table=ints(rows, width), physical=ints(rows, 8, SELECTED),
                pdl=target != "sm_80",
                **{name: ints(rows, 8, words) for name, words in select.scratch_of(width, top_k).items()},
            )  # fmt: skip
    assert [k.name for k in kernels] == ["best_of_blocks_kernel", "best_of_candidates_kernel"], "whatever the budget"
    judge(kernels[:1], target, {"best_of_blocks_kernel"})
    judge(kernels[1:], target, {"best_of_candidates_kernel"}, 256 if width == 65_536 else 0)


@pytest.mark.parametrize("target", TARGETS)
def test_softmax_and_page_table(target):
    with compile_only(target) as kernels:
        for width in (512, 8192, 70_000):
            x = torch.empty(BS * 8, 4, width)
            segment.launch_softmax(x, x, ints(BS), num_kv_heads=8, page_size=16, bos=1, eos=1, scale=0.1)
        planning.launch_page_table(
            ints(64, 8192), torch.zeros(BS, dtype=torch.int64), ints(BS), ints(BS, WIDTH), page_size=16
        )
    judge(kernels, target, {"softmax_kernel", "page_table_kernel"})


def test_a_budget_or_a_length_is_no_reason_to_compile_again():
    with compile_only("sm_90") as kernels:
        for top_k, bos, eos in ((1, 1, 1), (128, 4, 2), (2051, 0, 3)):
            select.launch_select(
                torch.empty(BS * 8, 1, WIDTH), ints(BS), ints(BS, 8, SELECTED), ints(BS, 8), num_kv_heads=8, lanes=1,
                page_size=16, bos=bos, eos=eos, top_k=top_k, ratio_q16=top_k * 16, dense_below=top_k, scored=True,
            )  # fmt: skip
    assert len(kernels) == 1


def test_an_unknown_target_is_refused():
    with pytest.raises(OptionError, match="'sm_42' is unknown, expected one of sm_80"), compile_only("sm_42"):
        pass
