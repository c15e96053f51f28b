"""Products over the last axis."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from flowlib.core.errors import ShapeError
from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side

MIN_DOT = 16
"""Smallest tile side worth a tensor-core product; below it a broadcast product is used."""


MAX_ELEMENTS = 1 << 20
"""Elements of Triton's largest block."""
_NARROW = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_PARTS = 3
_VECTOR_COLUMNS = 8  # of the tensor cores' product with one vector: its parts, then zeros


class GeMM(TileOp):
    """y · xᵀ per entry: x ``[., Nx, K]``, y ``[., Ny, K]`` -> ``[., Ny, Nx]``.

    Operands in a 16-bit storage dtype go to the tensor cores with fp32 accumulation. An fp32 operand beside one is the
    sum of three 16-bit parts there, and so is one beside the square of a bfloat16 field, which is the sum of two; other
    fp32 operands stay in full fp32.
    """

    finite: ClassVar[bool] = True
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
        if x.shape[0] == 1 and e.pages(x) == 1 and y.dtype in _NARROW and e.raw(y) and min(rows, depth) >= MIN_DOT:
            return e.let(self._vector_dot(e, x, y, rows, depth), shape, x, y)
        if shape == (1, 1) and e.pages(y) == 1 and x.unit and e.raw(x) and min(columns, depth) >= MIN_DOT:
            return e.let(self._vector_dot(e, y, x, columns, depth), shape, x, y)
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
        """Rows of `y` times those of `x`, which has no page axis."""
        raw_x, raw_y = e.raw(x), e.raw(y)
        shape = f"[{e.pages(y)}, {e.padded(y.shape[0])}, {e.padded(x.shape[0])}]"
        left = y.flat or f"tl.reshape({raw_y}, [{rows}, {depth}])"
        if raw_x and raw_y and x.dtype == y.dtype and x.dtype in _NARROW:
            return f"tl.reshape(tl.dot({left}, {self._columns(e, x, raw_x)}), {shape}){_times(x.unit, y.unit)}"
        if raw_y and y.dtype in _NARROW:
            narrow = bool(raw_x) and x.dtype in _NARROW
            parts, unit = self._parts(e, x, y.dtype, 1 if narrow and y.dtype is torch.float16 else _PARTS)
            text = f"tl.dot({left}, {self._columns(e, x, parts[-1])})"
            for part in reversed(parts[:-1]):
                text = f"tl.dot({left}, {self._columns(e, x, part)}, {text})"
            return f"tl.reshape({text}, {shape}){_times(unit, y.unit)}"
        if y.parts:
            return f"tl.reshape({self._dot_of_parts(e, x, y, rows, depth)}, {shape})"
        left = f"tl.reshape({e.filled(y, self.identity, 2)}, [{rows}, {depth}])"
        right = self._columns(e, x, e.filled(x, self.identity, 2))
        return f'tl.reshape(tl.dot({left}, {right}, input_precision="ieee"), {shape})'

    def _dot_of_parts(self, e: Emitter, x: Block, y: Block, rows: int, depth: int) -> str:
        """Rows of an fp32 `y` in few parts times those of `x`, the small products first."""
        part_of, narrow = "flowlib.kernels.split:part_of", _NARROW[torch.bfloat16]
        shape, total = (y.shape[0], x.shape[0]), ""
        count = x.parts or (1 if e.raw(x) and x.dtype is torch.bfloat16 else _PARTS)
        halves = [e.call(part_of, y.flat or y.name, str(i), narrow)[0] for i in range(y.parts)]
        for part in reversed(self._parts(e, x, torch.bfloat16, count)[0]):
            for half in reversed(halves):
                left = half if y.flat else f"tl.reshape({half}, [{rows}, {depth}])"
                total = e.let(f"tl.dot({left}, {self._columns(e, x, part)}{total and f', {total}'})", shape, y).name
        return total

    def _vector_dot(self, e: Emitter, x: Block, y: Block, rows: int, depth: int) -> str:
        """Rows of `y` times one vector, whose parts are columns of one product."""
        dtype = _NARROW[y.dtype]  # type: ignore[index]
        value, unit = self._scaled(e, x, y.dtype)
        (columns,) = e.call("flowlib.kernels.split:parts_in_rows", value, str(_VECTOR_COLUMNS), dtype)
        left = y.flat or f"tl.reshape({e.raw(y)}, [{rows}, {depth}])"
        products = e.let(f"tl.dot({left}, tl.trans({columns}))", (y.shape[0], _VECTOR_COLUMNS), y).name
        shape = f"[{e.pages(y)}, {e.padded(y.shape[0])}, 1]"
        return f"tl.reshape(tl.sum({products}, axis=1), {shape}){_times(unit, y.unit)}"

    def _parts(self, e: Emitter, x: Block, dtype: torch.dtype | None, count: int) -> tuple[list[str], str]:
        """Variables of the 16-bit parts of `x`, and what their products must be multiplied by."""
        value, unit = self._scaled(e, x, dtype)
        narrow = _NARROW[dtype]  # type: ignore[index]
        part = "flowlib.kernels.split:part_of"
        return [e.call(part, value, str(i), narrow)[0] for i in range(count)], unit

    def _scaled(self, e: Emitter, x: Block, dtype: torch.dtype | None) -> tuple[str, str]:
        """The fp32 `x` brought to the range of fp16 where that is `dtype`, and the text that undoes it."""
        value = e.filled(x, self.identity, 2)
        if dtype is not torch.float16:
            return value, ""
        value, down = e.call("flowlib.kernels.split:scaled_to_fp16", value, results=2)
        return value, down

    def _columns(self, e: Emitter, x: Block, value: str) -> str:
        return f"tl.trans(tl.reshape({value}, [{e.padded(x.shape[0])}, {e.padded(x.shape[1])}]))"


def _times(*factors: str) -> str:
    return "".join(f" * {factor}" for factor in factors if factor)


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
