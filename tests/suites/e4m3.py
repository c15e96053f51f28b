"""The e4m3 format by its definition, and keys that are hard to round to it."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = CODES.double()[~CODES.double().isnan()].unique()
"""The 253 numbers, ascending, float64."""
LARGEST = 448.0


def searched(x: torch.Tensor, scale: torch.Tensor | float, rounding: str) -> torch.Tensor:
    """The best of all codes for each x, times the scale, float64: by comparing with every one. NaN stays NaN."""
    grid = FINITE * torch.as_tensor(scale, dtype=torch.float64)[..., None]
    kept = torch.minimum(torch.maximum(x.double(), grid[..., 0]), grid[..., -1])[..., None]
    if rounding == "up":
        best = torch.where(grid >= kept, grid, float("inf")).amin(-1)
    else:
        best = torch.where(grid <= kept, grid, -float("inf")).amax(-1)
    return torch.where(x.isnan(), float("nan"), best)


def half_step(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The largest error of x rounded to nearest in `dtype` times a power of two, float64."""
    limits = torch.finfo(dtype)
    size = (x.double().abs() / scale).clamp(min=limits.tiny)
    return scale * torch.ldexp(torch.full_like(size, limits.eps / 2), torch.frexp(size).exponent - 1)


def keys(count: int, dtype: torch.dtype, scale: float) -> st.SearchStrategy[torch.Tensor]:
    """`count` numbers of `dtype`: ordinary, tiny, zero, codes, midpoints of codes, and their neighbours in `dtype`."""
    grid = [float(x) * scale for x in FINITE]
    middle = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    ordinary = st.floats(-LARGEST * scale, LARGEST * scale, width=16) | st.floats(-4, 4, width=16)
    one = ordinary | st.floats(-1e-6, 1e-6) | st.sampled_from((0.0, -0.0, *grid, *middle))
    moved = st.lists(st.tuples(one, st.integers(-1, 1)), min_size=count, max_size=count)

    def made(drawn: list[tuple[float, int]]) -> torch.Tensor:
        values = torch.tensor([x for x, _ in drawn], dtype=torch.float64).to(dtype)
        steps = torch.tensor([step for _, step in drawn])
        return torch.where(steps == 0, values, torch.nextafter(values, (steps * float("inf")).to(dtype)))

    return moved.map(made)
