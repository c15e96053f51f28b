"""The kernels of latent prefill compiled for three generations of GPU, on a machine without one."""

import pytest
import torch

from flowlib.kernels import mla_attend, mla_gather, mla_merge
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only, report

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
TARGETS = ["sm_80", "sm_90", "sm_100"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def judge(kernels, target, count):
    print("\n" + "\n".join(report(kernels)))
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel.target == target
        assert kernel.spills == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT[target], kernel


def attend(dtype=BF16, out=FP32, rows=300, longest=128, causal=True, heads=16, size=192, v_size=128, padded=0):
    index = torch.zeros(4, dtype=torch.int32)
    q, k = (torch.empty(rows, heads, size, dtype=dtype) for _ in range(2))
    v = torch.empty(rows, heads, v_size + padded, dtype=dtype)[..., :v_size]
    mla_attend.launch_attend_ragged(
        q, k, v, index, index, torch.empty(rows, heads, v_size, dtype=out), torch.empty(rows, heads), scale=0.1,
        causal=causal, max_query_len=longest,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_attention(target):
    """192 and 128 lanes; queries of one tile of 16, of 64, and of several of 128."""
    with compile_only(target) as kernels:
        for longest, causal in ((7, True), (4096, True), (50, False), (4096, False)):
            attend(longest=longest, causal=causal)
        attend(longest=4096, heads=128, padded=64)
        attend(FP16, out=FP16)
        attend(longest=50, out=BF16)
    judge(kernels, target, 6)
    assert all(kernel.matrix_ops for kernel in kernels), "16-bit attention runs on tensor cores"


@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_other_sizes(target):
    with compile_only(target) as kernels:
        attend(FP32, longest=4096)
        attend(size=64, v_size=64)
    judge(kernels, target, 2)


def test_few_queries_with_more_lanes_than_stages_have_room_for():
    """Three stages of 384 and 256 lanes are more than the shared memory of sm_80, which has the least."""
    with compile_only("sm_80") as kernels:
        attend(size=384, v_size=256, longest=7)
    judge(kernels, "sm_80", 1)


def merge(tokens=300, heads=16, size=128, dtype=FP32, part=FP32, limit=100, by_head=False, out=None, **options):
    p, s = torch.empty(tokens, heads, size, dtype=part), torch.empty(tokens, heads, size, dtype=dtype)
    lse = torch.empty(heads, tokens).t() if by_head else torch.empty(tokens, heads)
    mla_merge.launch_merge(p, lse, s, lse, s if out is None else torch.empty(s.shape, dtype=out), lse, limit, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_merge(target):
    with compile_only(target) as kernels:
        merge()
        merge(dtype=BF16, part=BF16)
        merge(dtype=FP16, part=FP16, size=96)
        merge(dtype=BF16, part=BF16, size=256, heads=3)
        if target != "sm_80":  # e4m3 conversions exist from sm_89 on
            merge(dtype=BF16, part=BF16, out=torch.float8_e4m3fn, out_factor=2.0, limit=448)
    judge(kernels, target, 4 if target == "sm_80" else 5)
    assert {kernel.num_warps for kernel in kernels} == {4}, "rows of 128 lanes fill four warps several times"


def gather(rows=64, width=576, page=16, dtype=BF16, requests=3, starts=True, first=0):
    flat = torch.zeros(first + rows, dtype=torch.int32)[first:]
    index = torch.zeros(requests + 1, dtype=torch.int32)
    cache, out = torch.empty(8, page, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    table = torch.zeros(requests, 8, dtype=torch.int32)
    mla_gather.launch_gather(cache, table, index, flat, out, rows, index[:requests] if starts else None)


@pytest.mark.parametrize("target", TARGETS)
def test_gather(target):
    with compile_only(target) as kernels:
        for page in (1, 16, 64):
            gather(page=page)
        gather(dtype=FP32)
        gather(starts=False)
        gather(width=512)
    judge(kernels, target, 6)


def test_lengths_are_no_reason_to_compile_again():
    """Tokens, requests, tokens with context, the scale, and where an index begins are run-time values."""
    with compile_only("sm_90") as kernels:
        for tokens, limit in ((300, 0), (304, 1), (17, 16), (1024, 1000)):
            merge(tokens, limit=limit)
    assert len(kernels) == 1
    with compile_only("sm_90") as kernels:
        for tokens, limit in ((300, 0), (304, 1), (17, 16), (1024, 1000)):
            merge(tokens, limit=limit, by_head=True)
    assert len(kernels) == 1
    with compile_only("sm_90") as kernels:
        for rows, first, requests in ((64, 0, 3), (65, 1, 1), (17, 3, 16), (1, 0, 5)):
            gather(rows, first=first, requests=requests)
    assert len(kernels) == 1
    with compile_only("sm_90") as kernels:
        for rows, longest in ((300, 65), (64, 100), (129, 128), (4096, 2000)):
            attend(rows=rows, longest=longest)
    assert len(kernels) == 1
