"""Ops that move the elements of an entry: Transpose, Reshape, Kron, and constants by position."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from flowlib.core.errors import OptionError, ShapeError
from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side, check_inner_dim, is_power_of_2, literal, number

MAX_GATHERED = 256
"""Elements of a block that Triton gathers on every GPU."""


class Transpose(TileOp):
    """``[., r, c]`` -> ``[., c, r]``."""

    finite: ClassVar[bool] = True

    def infer(self, x: Inner) -> Inner:
        return x[1], x[0]

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2)

    def emit(self, e: Emitter, x: Block) -> Block:
        return e.let(f"tl.permute({e.fp32(x)}, (0, 2, 1))", self.infer(x.shape), x)


class Reshape(TileOp):
    """``[., r, c]`` in row-major order as ``[., r', c']``; any sizes with the same product.

    Args:
        first: -1, axis 0 stays as it is.
        r, c: the new inner sizes.
    """

    finite: ClassVar[bool] = True

    def __init__(self, first: int, r: int, c: int) -> None:
        if first != -1 or not all(isinstance(n, int) and n >= 1 for n in (r, c)):
            raise OptionError(f"Reshape: sizes are ({first}, {r}, {c}), expected (-1, r, c) with r and c at least 1")
        self.r = r
        self.c = c

    def infer(self, x: Inner) -> Inner:
        if x[0] * x[1] != self.r * self.c:
            raise ShapeError(
                f"Reshape: 'x' [., {x[0]}, {x[1]}] has {x[0] * x[1]} elements per entry, "
                f"expected {self.r * self.c} for [., {self.r}, {self.c}]"
            )
        return self.r, self.c

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-2], self.r, self.c)

    def emit(self, e: Emitter, x: Block) -> Block:
        if is_power_of_2(x.shape[1]) and is_power_of_2(self.c):  # rows are padded at their end only
            return e.let(f"tl.reshape({e.fp32(x)}, [{e.pages(x)}, {e.padded(self.r)}, {self.c}])", (self.r, self.c), x)
        flat, width = f"({{i}} * {self.c} + {{j}})", x.shape[1]
        return e.rearranged(x, (self.r, self.c), f"{flat} // {width}", f"{flat} % {width}")


class Kron(TileOp):
    """Kronecker product over the inner axes in `dim`; the other inner axis broadcasts.

    Args:
        dim: ``(1, 2)``, ``1`` or ``2``.
    """

    finite: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("x", "y")

    def __init__(self, dim: tuple[int, int] | int = (1, 2)) -> None:
        dims = dim if isinstance(dim, tuple) else (dim,)
        if dims not in ((1, 2), (1,), (2,)):
            raise OptionError(f"Kron: dim is {dim!r}, expected (1, 2), 1 or 2")
        self.dim = dims

    def infer(self, x: Inner, y: Inner) -> Inner:
        sizes = []
        for axis in (0, 1):
            if axis + 1 in self.dim:
                sizes.append(x[axis] * y[axis])
            elif x[axis] != y[axis] and 1 not in (x[axis], y[axis]):
                raise ShapeError(
                    f"Kron: axis {axis + 1} of 'y' is {y[axis]}, expected {x[axis]} or 1 to match 'x' {list(x)}"
                )
            else:
                sizes.append(max(x[axis], y[axis]))
        return sizes[0], sizes[1]

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        r, c = self.infer((x.shape[-2], x.shape[-1]), (y.shape[-2], y.shape[-1]))
        if 1 in self.dim:
            x, y = x.repeat_interleave(y.shape[-2], -2), y.repeat(*[1] * (y.dim() - 2), x.shape[-2], 1)
        if 2 in self.dim:
            x, y = x.repeat_interleave(y.shape[-1], -1), y.repeat(*[1] * (y.dim() - 1), x.shape[-1])
        return (x * y).expand(*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), r, c)

    def emit(self, e: Emitter, x: Block, y: Block) -> Block:
        shape = self.infer(x.shape, y.shape)
        if all(is_power_of_2(y.shape[axis - 1]) for axis in self.dim):
            return e.let(self._broadcast(e, x, y, shape), shape, x, y)
        if math.prod(e.padded(n) for n in shape) > MAX_GATHERED:
            raise ShapeError(
                f"Kron: 'y' {list(y.shape)} is no power of two along axis {self.dim} and the result {list(shape)} has "
                f"more than {MAX_GATHERED} elements, which Triton can't gather; swap x and y, or use powers of two"
            )
        outer, inner = ["{i}", "{j}"], ["{i}", "{j}"]
        for axis, index in enumerate(("{i}", "{j}")):
            if axis + 1 in self.dim:
                outer[axis], inner[axis] = f"{index} // {y.shape[axis]}", f"{index} % {y.shape[axis]}"
            else:
                outer[axis] = index if x.shape[axis] > 1 else "0"
                inner[axis] = index if y.shape[axis] > 1 else "0"
        left, right = e.rearranged(x, shape, *outer), e.rearranged(y, shape, *inner)
        return e.let(f"{left.name} * {right.name}", shape, left, right)

    def _broadcast(self, e: Emitter, x: Block, y: Block, shape: Inner) -> str:
        """Products of all pairs as one block: where y is not padded, its rows follow each other without gaps."""
        new = {1: ":, None" if 1 in self.dim else ":", 2: ":, None" if 2 in self.dim else ":"}
        own = {1: "None, :" if 1 in self.dim else ":", 2: "None, :" if 2 in self.dim else ":"}
        left = f"({e.fp32(x)})[:, {new[1]}, {new[2]}]"
        right = f"({e.fp32(y)})[:, {own[1]}, {own[2]}]"
        pages = max(e.pages(x), e.pages(y))
        return f"tl.reshape({left} * {right}, [{pages}, {e.padded(shape[0])}, {e.padded(shape[1])}])"


class MaskSlice(TileOp):
    """alpha at positions ``start`` to ``end - 1`` of axis `dim`, beta elsewhere; x gives the inner sizes only."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def __init__(self, start: int, end: int, dim: int, alpha: float = 1.0, beta: float = 0.0) -> None:
        self.dim = check_inner_dim(self, dim)
        if not 0 <= number(self, "start", start) <= number(self, "end", end):
            raise OptionError(f"MaskSlice: start, end are {start}, {end}, expected 0 <= start <= end")
        self.start = int(start)
        self.end = int(end)
        self.alpha = number(self, "alpha", alpha)
        self.beta = number(self, "beta", beta)

    def infer(self, x: Inner) -> Inner:
        if self.end > x[self.dim - 1]:
            raise ShapeError(
                f"MaskSlice: end is {self.end}, expected at most {x[self.dim - 1]}, the size of axis {self.dim} of 'x'"
            )
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[self.dim - 3], device=x.device)
        index = index[:, None] if self.dim == 1 else index
        inside = (index >= self.start) & (index < self.end)
        return torch.where(inside, self.alpha, self.beta).to(x.dtype).expand_as(x)

    def emit(self, e: Emitter, x: Block) -> Block:
        index = e.lanes(x.shape[self.dim - 1], self.dim)
        inside = f"({index} >= {self.start}) & ({index} < {self.end})"
        whole = f"tl.zeros([1, {e.padded(x.shape[0])}, {e.padded(x.shape[1])}], tl.float32)"
        return e.let(f"tl.where({inside}, {literal(self.alpha)}, {literal(self.beta)}) + {whole}", x.shape)


CReshape = cache_side(Reshape)
CTranspose = cache_side(Transpose)
CMaskSlice = cache_side(MaskSlice)
