"""Statistics of pages in float8, with one scale for each kv head: bounds rounded outwards, estimates to nearest.

Codes are e4m3, whose steps shrink with the value over 15 binades, so that room above the largest key costs no digits
of what lies near it. What is above 448 times the scale all the same is cut; who cuts a bound must know that it is none.
"""

from __future__ import annotations

import torch

from flowlib.core import float8
from flowlib.core.errors import OptionError
from flowlib.entmax.pages import PageStats

DTYPE = torch.float8_e4m3fn
HEADROOM = 16.0
"""How many times the largest key of the prompts a statistic may be, at least, before it is cut."""
_ROUNDINGS = PageStats("down", "up", "nearest", "nearest")  # type: ignore[arg-type]


def check_scale(what: str, scale: object, dtype: torch.dtype | None) -> float | None:
    """A power of two beside float8 statistics, or ``None``. Raises OptionError."""
    if scale is None:
        return None
    low, high = float8.SCALE_EXPONENTS
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not float8.is_scale(scale):
        raise OptionError(
            f"{what}: stats_scale is {scale!r}, expected a power of two from 2**{low} to 2**{high}, or None"
        )
    if dtype is not DTYPE:
        raise OptionError(
            f"{what}: stats_scale is {scale!r}, expected None beside stats_dtype {dtype}: only float8_e4m3fn "
            "statistics are scaled"
        )
    return float(scale)


def scales_for(k: torch.Tensor) -> torch.Tensor:
    """The smallest power of two for each kv head whose 448-fold is HEADROOM times the largest |k|, fp32 ``[H_kv]``.

    Args:
        k: ``[num_blocks, page_size, H_kv, D]``. A head of zeros, or with a key that is no number, gets the scale of 1.
    """
    axes = (0, 1, 3)
    largest = torch.maximum(k.amax(axes), -k.amin(axes)).to(torch.float64)
    largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    mantissa, exponent = torch.frexp(largest * HEADROOM / float8.LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(*float8.SCALE_EXPONENTS)
    return torch.ldexp(torch.ones_like(largest), exponent).to(torch.float32)


def encode(stats: PageStats, scales: torch.Tensor) -> tuple[PageStats, torch.Tensor]:
    """Codes of statistics ``[num_blocks, H_kv, D]``, and which heads had one cut, bool ``[H_kv]``."""
    limit, cut = (float8.LARGEST * scales)[:, None], torch.zeros_like(scales, dtype=torch.bool)
    codes: list[torch.Tensor | None] = []
    for stat, rounding in zip(stats, _ROUNDINGS, strict=True):
        if stat is None:
            codes.append(None)
            continue
        codes.append(float8.encode(stat, scales[:, None], rounding))  # type: ignore[arg-type]
        cut |= (stat.abs() > limit).any(2).any(0)
    return PageStats(*codes), cut


def decode(codes: PageStats, scales: torch.Tensor, dtype: torch.dtype) -> PageStats:
    """What codes stand for, exactly, in float32 or float64."""
    return PageStats(*(None if code is None else float8.decode(code, scales[:, None], dtype) for code in codes))
