"""The repaired interpreter against torch, and the refusals of the ways in which it cannot be had."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from flowlib.core.errors import BackendError
from flowlib.runtime import interpreter
from flowlib.testing.compile_only import compile_only

interpreter.install()


@triton.jit
def copy_kernel(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, tl.load(p_x + o).to(p_y.dtype.element_ty))


@triton.jit
def arithmetic_kernel(p_x, p_y, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_y = tl.load(p_x + o), tl.load(p_y + o)
    tl.store(p_out + o, b_x * b_y)
    tl.store(p_out + N + o, b_x + b_y)
    tl.store(p_out + 2 * N + o, tl.where(b_x > b_y, b_x, b_y))
    tl.store(p_out + 3 * N + o, tl.fma(b_x, b_y, b_x))
    tl.store(p_out + 4 * N + o, -b_x)


@triton.jit
def reduce_kernel(p_x, p_out, R: tl.constexpr, N: tl.constexpr):
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    b_x = tl.load(p_x + o_r[:, None] * N + o_n[None, :])
    tl.store(p_out + o_r, tl.max(b_x, 1))
    tl.store(p_out + R + o_r, tl.min(b_x, 1))
    tl.store(p_out + 2 * R + o_r, tl.sum(b_x, 1))


@triton.jit
def dot_kernel(p_x, p_y, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    o_nn = o[:, None] * N + o[None, :]
    tl.store(p_out + o_nn, tl.dot(tl.load(p_x + o_nn), tl.load(p_y + o_nn), input_precision="ieee"))


@triton.jit
def count_kernel(p_n, p_out):
    total = 0
    for _ in range(0, tl.load(p_n)):
        total += 2
    tl.store(p_out, total)


@triton.jit
def maximum_kernel(p_x, p_y, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_out + o, tl.maximum(tl.load(p_x + o), tl.load(p_y + o)))
    tl.store(p_out + N, tl.max(tl.load(p_x + o)))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Every value of an 8 or 16 bit format, NaN left out."""
    bits = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    values = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    return torch.where(torch.isnan(values.float()), torch.zeros((), dtype=dtype), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_value_widens_exactly(dtype):
    values = every_pattern(dtype)
    out = torch.empty(values.shape)
    copy_kernel[(1,)](values, out, N=values.numel())
    assert torch.equal(out, values.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_narrowing_rounds_to_nearest_even(dtype):
    torch.manual_seed(0)
    near = every_pattern(dtype).float()
    near = near[near.abs() < 1e30][: 1 << 14]
    halfway = (near[1:] + near[:-1]) / 2
    values = torch.cat([torch.randn(1 << 14) * 8, halfway])
    values = values[: 1 << (values.numel().bit_length() - 1)].contiguous()
    out = torch.empty(values.shape, dtype=dtype)
    copy_kernel[(1,)](values, out, N=values.numel())
    largest = torch.finfo(dtype).max
    assert torch.equal(out.float(), values.clamp(-largest, largest).to(dtype).float())


def test_bfloat16_arithmetic_rounds_once():
    torch.manual_seed(1)
    x, y = torch.randn(2, 256).bfloat16()
    out = torch.empty(5, 256, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, N=256)
    a, b = x.float(), y.float()
    want = torch.stack([a * b, a + b, torch.maximum(a, b), a * b + a, -a]).bfloat16()
    assert torch.equal(out, want)


def test_bfloat16_reductions_are_of_values_not_bits():
    torch.manual_seed(2)
    x = torch.randn(4, 64).bfloat16()
    out = torch.empty(3, 4)
    reduce_kernel[(1,)](x, out, R=4, N=64)
    assert torch.equal(out[:2], torch.stack([x.amax(1), x.amin(1)]).float())
    assert torch.equal(out[2], x.double().sum(1).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dot_multiplies_exactly_and_sums_in_fp32(dtype):
    torch.manual_seed(3)
    x, y = torch.randn(2, 32, 32).to(dtype)
    out = torch.empty(32, 32)
    dot_kernel[(1,)](x, y, out, N=32)
    exact = x.double() @ y.double()
    bound = 32 * torch.finfo(torch.float32).eps * (x.double().abs() @ y.double().abs())
    assert ((out.double() - exact).abs() <= bound).all()


def test_maximum_passes_over_nan_without_a_warning():
    nan = float("nan")
    x, y = torch.tensor([nan, 1.0, nan, 3.0]), torch.tensor([2.0, nan, nan, 4.0])
    out = torch.empty(5)
    maximum_kernel[(1,)](x, y, out, N=4)
    assert torch.equal(torch.nan_to_num(out, nan=-1), torch.tensor([2.0, 1.0, -1.0, 4.0, 3.0]))


def test_loop_bounds_may_come_from_memory():
    out = torch.zeros(1, dtype=torch.int32)
    count_kernel[(1,)](torch.tensor([7], dtype=torch.int32), out)
    assert out.item() == 14


def test_installing_again_changes_nothing():
    from triton.runtime import interpreter as stock

    before = (stock._convert_float, stock.InterpreterBuilder.binary_op, stock.GridExecutor.__call__)
    interpreter.install()
    assert before == (stock._convert_float, stock.InterpreterBuilder.binary_op, stock.GridExecutor.__call__)


def test_compile_only_refuses_an_interpreting_process():
    with pytest.raises(BackendError, match="TRITON_INTERPRET is set"), compile_only("sm_90"):
        pass


REFUSALS = """
import os, sys
from flowlib.runtime import interpreter
from flowlib.core.errors import BackendError
assert "triton" not in sys.modules
def refusal():
    try:
        interpreter.install()
    except BackendError as error:
        return str(error)
print(refusal())
import triton
os.environ["TRITON_INTERPRET"] = "1"
print(refusal())
"""


def test_refusals_say_what_to_set_and_when():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    shown = subprocess.run([sys.executable, "-c", REFUSALS], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    unset, late = shown.stdout.splitlines()
    assert "needs TRITON_INTERPRET=1 set before Triton is imported" in unset
    assert "TRITON_INTERPRET is None" in unset
    assert "Triton was imported before the variable was set" in late
