"""Scaled float8 summaries: e4m3 codes (uint8) that stand for ``value * scale``, the scale a power of two.

Generated kernels import what they need. Codes are uint8, so that kernels compile for GPUs without float8, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

LARGEST = tl.constexpr(448.0)


@triton.jit
def encode(x, scale, ROUNDING: tl.constexpr):
    """Codes of fp32 values: ``"up"`` the smallest code that is not below, ``"down"`` the largest that is not above,
    ``"nearest"`` ties to even. What is beyond the largest code becomes that one, a NaN 0x7F."""
    size = tl.minimum(tl.abs(x), LARGEST * scale)
    inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1 / scale; / approximates
    value = size * inverse
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) >> 23, 121)  # biased by 127; below 2**-6 steps are equal
    steps = value * ((257 - exponent) << 23).to(tl.float32, bitcast=True)  # 8 to 15 of them, fewer below 2**-6
    whole = steps.to(tl.int32)
    rest = steps - whole.to(tl.float32)
    if ROUNDING == "nearest":
        away = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    else:
        outward = x > 0 if ROUNDING == "up" else x < 0
        away = outward & ((rest > 0) | ((steps == 0) & (size > 0)))  # the latter: too small even for fp32
    code = ((exponent - 120) << 3) + whole + away.to(tl.int32) - 8
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)


@triton.jit
def unscaled(code):
    """fp16 values of codes, exact; the scale is left to whoever has fewer elements. Half an instruction an element:
    bfloat16 would take two more."""
    if cuda_capability_geq(8, 9):
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        magnitude = (code & 0x7F).to(tl.int32)
        value = (magnitude << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2**120
        value = tl.where(magnitude == 0x7F, float("nan"), tl.where(code > 0x7F, -value, value)).to(tl.float16)
    return value


@triton.jit
def decode(code, scale):
    """fp32 values of codes, exact."""
    return unscaled(code).to(tl.float32) * scale


@triton.jit
def count_saturated(p_saturated, x, scale, ROUNDING: tl.constexpr):
    """Adds the number of values whose code is no bound of them: above the largest and rounded up, or mirrored."""
    beyond = x > LARGEST * scale if ROUNDING == "up" else x < -LARGEST * scale
    count = tl.sum(beyond.to(tl.int32))
    tl.atomic_add(p_saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")
