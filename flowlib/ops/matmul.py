"""Products over the last axis."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from flowlib.core.errors import ShapeError
from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side

MIN_DOT = 16
"""Smallest tile side worth a tensor-core product; below it a broadcast product is used."""


MAX_ELEMENTS = 1 << 20
"""Elements of Triton's largest block."""


class GeMM(TileOp):
    """y · xᵀ per entry: x ``[., Nx, K]``, y ``[., Ny, K]`` -> ``[., Ny, Nx]``.

    Operands in a 16-bit storage dtype go to the tensor cores with fp32 accumulation; fp32 operands stay in full fp32.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "y")
    identity: ClassVar[float] = 0.0

    def infer(self, x: Inner, y: Inner) -> Inner:
        if x[1] != y[1]:
            raise ShapeError(
                f"{type(self).__name__}: axis 2 of 'y' is {y[1]}, expected {x[1]} to match 'x' [., {x[0]}, {x[1]}]"
            )
        return y[0], x[0]

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y @ x.transpose(-1, -2)

    def emit(self, e: Emitter, x: Block, y: Block) -> Block:
        shape = self.infer(x.shape, y.shape)
        rows, depth = e.pages(y) * e.padded(y.shape[0]), e.padded(x.shape[1])
        if x.shape[0] > 1 and e.pages(x) == 1 and min(rows, depth) >= MIN_DOT:
            return e.let(self._dot(e, x, y, rows, depth), shape, x, y)
        columns = e.pages(x) * e.padded(x.shape[0])
        if y.shape[0] > 1 and e.pages(y) == 1 and min(columns, depth) >= MIN_DOT:
            swapped = Block("", (x.shape[0], y.shape[0]), x.paged)
            text = self._dot(e, y, x, columns, depth)
            return e.let(f"tl.permute({text}, (0, 2, 1))", shape, swapped)
        left, right = e.filled(y, self.identity, 2), e.filled(x, self.identity, 2)
        if x.shape[0] == 1:
            return e.let(f"tl.sum({left} * {right}, axis=2, keep_dims=True)", shape, x, y)
        size = e.pages(y) * self.between(x.shape, y.shape)
        if size > MAX_ELEMENTS:
            raise ShapeError(
                f"{self.label}: 'x' {list(x.shape)} and 'y' {list(y.shape)} make a block of {size} elements, "
                f"expected at most {MAX_ELEMENTS}, Triton's limit; reduce one of them first"
            )
        return e.let(f"tl.sum({left}[:, :, None, :] * {right}[:, None, :, :], axis=3)", shape, x, y)

    def between(self, x: Inner, y: Inner) -> int:
        sizes = (x[0], y[0], x[1])
        return math.prod(1 << (n - 1).bit_length() for n in sizes) if min(x[0], y[0]) > 1 else 0

    def _dot(self, e: Emitter, x: Block, y: Block, rows: int, depth: int) -> str:
        raw_x, raw_y = e.raw(x), e.raw(y)
        precision = ""
        if raw_x is None or raw_y is None or x.dtype != y.dtype or x.dtype is torch.float32:
            y = replace(y, flat="")
            raw_x, raw_y = e.filled(x, self.identity, 2), e.filled(y, self.identity, 2)
            precision = ', input_precision="ieee"'
        columns = e.padded(x.shape[0])
        left = y.flat or f"tl.reshape({raw_y}, [{rows}, {depth}])"
        right = f"tl.trans(tl.reshape({raw_x}, [{columns}, {depth}]))"
        return f"tl.reshape(tl.dot({left}, {right}{precision}), [{e.pages(y)}, {e.padded(y.shape[0])}, {columns}])"


class GeMV(GeMM):
    """Dot product: x ``[B, 1, D]``, y ``[S, 1, D]`` -> ``[S, 1, 1]``."""

    def infer(self, x: Inner, y: Inner) -> Inner:
        for name, shape in (("x", x), ("y", y)):
            if shape[0] != 1:
                raise ShapeError(
                    f"GeMV: axis 1 of '{name}' is {shape[0]}, expected 1 (a vector per entry); use GeMM for matrices"
                )
        return super().infer(x, y)


CGeMM = cache_side(GeMM)
