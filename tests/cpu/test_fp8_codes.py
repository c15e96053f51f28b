"""Codes of scaled float8: torch's and the kernels', against a search over all codes."""

import pytest
import torch
import triton
import triton.language as tl

from flowlib.core import float8
from flowlib.kernels import scaled_float8
from flowlib.kernels.scaled_float8 import count_saturated, decode, encode, unscaled
from flowlib.runtime import interpreter
from tests.suites.e4m3 import CODES, FINITE, LARGEST, searched
from tests.suites.same import bits

interpreter.install()
F8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
ONE = torch.ones(())
DIRECTIONS = ("nearest", "up", "down")
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
"""All of them, NaN and infinities too."""


def test_nearest_codes_are_torchs_for_every_bfloat16():
    x = EVERY_BF16.float()
    codes, known = float8.encode(x, ONE, "nearest").view(torch.uint8), ~x.isnan()
    assert torch.equal(codes[known], x.clamp(-LARGEST, LARGEST).to(F8).view(torch.uint8)[known])
    assert (codes[~known] == 0x7F).all()


@pytest.mark.parametrize("scale", [2.0**-4, 1.0, 2.0**4])
@pytest.mark.parametrize("rounding", ["up", "down"])
def test_directed_codes_are_the_best_of_all_for_every_bfloat16(rounding, scale):
    x = EVERY_BF16.float()
    codes = float8.encode(x, torch.tensor(scale), rounding)
    assert torch.equal((codes.double() * scale).nan_to_num(-1e9), searched(x, scale, rounding).nan_to_num(-1e9))
    signs = codes.view(torch.uint8) >> 7
    assert torch.equal(signs[~x.isnan()].bool(), x.signbit()[~x.isnan()]), "a zero keeps its sign"


@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_float64_is_rounded_once(rounding):
    """Just beside a midpoint, where a detour through fp32 would find a tie, and just beside a code."""
    middle, step = (FINITE[:-1] + FINITE[1:]) / 2, FINITE.diff()
    for off in (-1e-12, 1e-12):
        for base, fraction in ((middle, 0.5), (FINITE[:-1], 0.0)):
            place = fraction + off  # of the step above FINITE[i]
            steps = {"nearest": round(place), "up": 1 if place > 0 else 0, "down": 0 if place >= 0 else -1}[rounding]
            i = (torch.arange(len(base)) + steps).clamp(min=0)
            codes = float8.encode(base + off * step, torch.ones((), dtype=torch.float64), rounding)
            assert torch.equal(codes.double(), FINITE[i])


@pytest.mark.parametrize("scale", [2.0**-64, 1.0, 2.0**64])
def test_every_code_comes_back_and_no_value_is_too_small_to_be_rounded_away_from_zero(scale):
    scales = torch.tensor(scale)
    known = ~CODES.double().isnan()
    for dtype in (BF16, FP32, torch.float64):
        values = float8.decode(CODES, scales, dtype)
        assert torch.equal(values[known].double(), CODES[known].double() * scale), "exact"
        for rounding in DIRECTIONS:
            codes = float8.encode(values.float(), scales, rounding)
            assert torch.equal(bits(codes[known]), bits(CODES[known]))
    tiny = torch.tensor([2.0**-149, -(2.0**-149)])
    assert float8.encode(tiny, scales, "up").view(torch.uint8).tolist() == [0x01, 0x80]
    assert float8.encode(tiny, scales, "down").view(torch.uint8).tolist() == [0x00, 0x81]


@triton.jit
def codes_kernel(p_x, p_scale, p_code, p_value, p_count, N, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_x, scale = tl.load(p_x + o, mask=m, other=0.0), tl.load(p_scale)
    b_code = encode(b_x, scale, ROUNDING)
    tl.store(p_code + o, b_code, mask=m)
    tl.store(p_value + o, decode(b_code, scale).to(tl.float32), mask=m)
    if ROUNDING != "nearest":
        count_saturated(p_count, b_x, scale, ROUNDING)


@triton.jit
def values_kernel(p_code, p_value):
    o = tl.arange(0, 256)
    tl.store(p_value + o, unscaled(tl.load(p_code + o)))


@pytest.mark.parametrize("has_float8", [False, True])
def test_every_code_is_a_float16_with_and_without_a_gpu_that_converts(has_float8, monkeypatch):
    monkeypatch.setattr(scaled_float8, "cuda_capability_geq", lambda *capability: has_float8)
    value = torch.full((256,), 99.0, dtype=torch.float16)
    values_kernel[(1,)](CODES.view(torch.uint8), value)
    assert torch.equal(value.double().nan_to_num(-1e9), CODES.double().nan_to_num(-1e9))


@pytest.mark.parametrize("scale", [2.0**-64, 2.0**-4, 1.0, 2.0**4, 2.0**64])
@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_kernels_and_torch_give_the_same_codes_values_and_counts(rounding, scale):
    random = torch.randint(-(2**31), 2**31, (30000,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([EVERY_BF16.float(), random.to(torch.int32).view(FP32), FINITE.float(), 2.0**-149 * torch.ones(1)])
    scales, count = torch.tensor([scale]), torch.zeros(1, dtype=torch.int64)
    code, value = torch.full((len(x),), 99, dtype=torch.uint8), torch.full((len(x),), float("nan"))
    codes_kernel[(triton.cdiv(len(x), 8192),)](x, scales, code, value, count, len(x), rounding, 8192)
    wanted = float8.encode(x, scales, rounding)
    assert torch.equal(code, wanted.view(torch.uint8))
    assert torch.equal(value.nan_to_num(-1e9), float8.decode(wanted, scales, FP32).nan_to_num(-1e9))
    beyond = {"nearest": x.isnan() & False, "up": x > LARGEST * scale, "down": x < -LARGEST * scale}[rounding]
    assert int(count) == int(beyond.sum()) == int(float8.broken(x, scales, rounding).sum())
    assert rounding == "nearest" or int(count) > 100
