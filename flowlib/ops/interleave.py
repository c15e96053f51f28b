"""Reductions of consecutive groups of k elements: axis size n -> n / k."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.errors import OptionError, ShapeError
from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side, check_inner_dim, is_power_of_2, literal


class _Interleave(TileOp):
    finite: ClassVar[bool] = True
    joined: ClassVar[str] = ""
    """Triton text that joins two partial results ``{x}`` and ``{y}``."""
    reduction: ClassVar[str] = ""
    """Triton's name of the reduction."""
    identity: ClassVar[float | None] = None
    """What a NaN counts as, where it is ignored."""

    def __init__(self, dim: int = 1, k: int = 2) -> None:
        self.dim = check_inner_dim(self, dim)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise OptionError(f"{type(self).__name__}: k is {k!r}, expected a positive integer")
        self.k = k

    @property
    def by_column(self) -> bool:
        """Where it works along axis 1."""
        return self.dim == 1

    def infer(self, x: Inner) -> Inner:
        size = x[self.dim - 1]
        if size % self.k:
            raise ShapeError(
                f"{type(self).__name__}: axis {self.dim} of 'x' is {size}, expected a multiple of k = {self.k}"
            )
        return (size // self.k, x[1]) if self.dim == 1 else (x[0], size // self.k)

    def groups(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., r, c]`` with the groups on a new axis after the reduced one."""
        return x.unflatten(self.dim - 3, (-1, self.k))

    def emit(self, e: Emitter, x: Block) -> Block:
        shape = self.infer(x.shape)
        lanes = e.fp32(x)
        if self.identity is not None:
            lanes = f"tl.where({lanes} == {lanes}, {lanes}, {literal(self.identity)})"
        if is_power_of_2(self.k):
            sizes = [e.pages(x), *(e.padded(n) for n in shape)]
            sizes.insert(self.dim + 1, self.k)
            groups = f"tl.reshape({lanes}, {sizes})"
            return e.let(self.finished(f"tl.{self.reduction}({groups}, axis={self.dim + 1})"), shape, x)
        x = e.let(lanes, x.shape, x)
        row, column = ("{i} * %d + %d", "{j}") if self.dim == 1 else ("{i}", "{j} * %d + %d")
        total = ""
        for m in range(self.k):
            part = e.rearranged(x, shape, *(t % (self.k, m) if "%d" in t else t for t in (row, column))).name
            total = self.joined.format(x=total, y=part) if total else part
        return e.let(self.finished(total), shape, x)

    def finished(self, total: str) -> str:
        """Triton text that turns the joined parts into the result."""
        return total


class MeanInterleave(_Interleave):
    """Mean of each group of k consecutive elements."""

    joined: ClassVar[str] = "{x} + {y}"
    reduction: ClassVar[str] = "sum"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups(x).mean(self.dim - 3)

    def finished(self, total: str) -> str:
        return f"({total}) / {float(self.k)!r}"


class MaxInterleave(_Interleave):
    """Maximum of each group of k consecutive elements; a NaN counts as -inf."""

    joined: ClassVar[str] = "tl.maximum({x}, {y})"
    identity: ClassVar[float | None] = float("-inf")
    reduction: ClassVar[str] = "max"

    def rounding(self, *inputs: str) -> str:
        return "up"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups(x.masked_fill(x.isnan(), float("-inf"))).amax(self.dim - 3)


class MinInterleave(_Interleave):
    """Minimum of each group of k consecutive elements; a NaN counts as inf."""

    joined: ClassVar[str] = "tl.minimum({x}, {y})"
    identity: ClassVar[float | None] = float("inf")
    reduction: ClassVar[str] = "min"

    def rounding(self, *inputs: str) -> str:
        return "down"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups(x.masked_fill(x.isnan(), float("inf"))).amin(self.dim - 3)


CMeanInterleave = cache_side(MeanInterleave)
CMaxInterleave = cache_side(MaxInterleave)
CMinInterleave = cache_side(MinInterleave)
