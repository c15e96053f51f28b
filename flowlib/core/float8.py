"""Scaled float8: e4m3 codes that stand for ``value * scale``, rounded so that a bound stays a bound.

A scale is a power of two, so that a code is taken back exactly, in bfloat16 too. Format: Micikevicius et al., FP8
Formats for Deep Learning (arXiv:2209.05433), E4M3: 4 bits of exponent, 3 of mantissa, no infinity, 0x7F is NaN.
"""

from __future__ import annotations

import math

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""The largest code's value, 448."""
SCALE_EXPONENTS = (-64, 64)
"""Bounds of a scale's exponent: every code times such a scale is a normal bfloat16."""
SCALES = "field scales"
"""Name of the leaf that holds the scale of each kv head; no field can have it, as it is no identifier."""
_LOWEST_EXPONENT, _MANTISSA_BITS = -6, 3
_ROUND = {"nearest": torch.round, "up": torch.ceil, "down": torch.floor}


def is_scale(value: float) -> bool:
    """Whether `value` is a power of two from 2**-64 to 2**64."""
    if not 0 < value <= 2.0 ** SCALE_EXPONENTS[1]:
        return False
    mantissa, exponent = math.frexp(value)
    return mantissa == 0.5 and SCALE_EXPONENTS[0] <= exponent - 1 <= SCALE_EXPONENTS[1]


def encode(x: torch.Tensor, scale: torch.Tensor, rounding: str) -> torch.Tensor:
    """Codes of x, float8_e4m3fn ``[...]``.

    Args:
        x: ``[...]``, float32 or float64. What is beyond ±448 scale becomes ±448 scale; a NaN stays one.
        scale: broadcasts to `x`; powers of two.
        rounding: ``"up"``: the smallest code that is not below x; ``"down"``: the largest that is not above;
            ``"nearest"``: ties to even.
    """
    value = x.to(torch.float64) / scale.to(torch.float64)  # in float64 no step below rounds, but the one that shall
    value = value.clamp(-LARGEST, LARGEST)
    exponent = torch.frexp(value).exponent - 1
    exponent = torch.where(value == 0.0, _LOWEST_EXPONENT, exponent).clamp(_LOWEST_EXPONENT)
    quantum = torch.ldexp(torch.ones_like(value), exponent - _MANTISSA_BITS)
    rounded = _ROUND[rounding](value / quantum) * quantum
    return rounded.masked_fill(value.isnan(), float("nan")).to(torch.float32).to(torch.float8_e4m3fn)


def decode(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes stand for, ``code * scale`` in `dtype`, exact in any dtype with the range of bfloat16."""
    return code.to(dtype) * scale.to(dtype)


def broken(x: torch.Tensor, scale: torch.Tensor, rounding: str) -> torch.Tensor:
    """Where the code of x is no bound of x, bool ``[...]``: x is above 448 scale and rounded up, or mirrored."""
    limit = LARGEST * scale.to(x.dtype)
    if rounding == "nearest":
        return torch.zeros_like(x, dtype=torch.bool)
    return x > limit if rounding == "up" else x < -limit
