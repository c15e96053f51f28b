"""Elementwise ops of two inputs; axes 1 and 2 broadcast where they are 1."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp, broadcast, cache_side, literal, number


class _Binary(TileOp):
    by_column: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("x", "y")
    triton: ClassVar[str] = ""

    def infer(self, x: Inner, y: Inner) -> Inner:
        return broadcast(self, x, y)

    def emit(self, e: Emitter, x: Block, y: Block) -> Block:
        return e.let(self.triton.format(x=e.fp32(x), y=e.fp32(y)), broadcast(self, x.shape, y.shape), x, y)


class Multiply(_Binary):
    """x · y."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "{x} * {y}"

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def emit(self, e: Emitter, x: Block, y: Block) -> Block:
        if x is y and e.raw(x) and x.unit:
            return _square(e, x)
        if x is y and e.raw(x) and x.dtype is torch.bfloat16:
            return _square_in_parts(e, x)
        return super().emit(e, x, y)


def _square(e: Emitter, x: Block) -> Block:
    """The square of a scaled float8 field, in fp16 with a unit: half a code squared is at most 224², in 8 bits."""
    unit = f"4.0 * {x.unit} * {x.unit}"
    if not x.flat:
        return replace(e.same(f"(0.5 * {x.name}) * (0.5 * {x.name})", x), unit=unit)
    flat = e.let(f"(0.5 * {x.flat}) * (0.5 * {x.flat})", x.shape, x).name
    return replace(e.same(f"tl.reshape({flat}, {x.name}.shape)", x), flat=flat, unit=unit)


def _square_in_parts(e: Emitter, x: Block) -> Block:
    """The square of a bfloat16 block in fp32: 16 bits, which two bfloat16 values hold."""
    if not x.flat:
        return replace(e.let(f"{e.fp32(x)} * {e.fp32(x)}", x.shape, x), parts=2, pad=0.0)
    flat = e.let(f"{x.flat}.to(tl.float32) * {x.flat}.to(tl.float32)", x.shape, x).name
    return replace(e.let(f"tl.reshape({flat}, {x.name}.shape)", x.shape, x), flat=flat, parts=2, pad=0.0)


class Maximum(_Binary):
    """max(x, y); a NaN is ignored where the other is a number."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "tl.maximum({x}, {y})"

    def rounding(self, *inputs: str) -> str:
        return "up" if set(inputs) == {"up"} else "nearest"

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.fmax(x, y)


class Minimum(_Binary):
    """min(x, y); a NaN is ignored where the other is a number."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "tl.minimum({x}, {y})"

    def rounding(self, *inputs: str) -> str:
        return "down" if set(inputs) == {"down"} else "nearest"

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.fmin(x, y)


class Add(_Binary):
    """alpha · x + beta · y."""

    finite: ClassVar[bool] = True

    def __init__(self, alpha: float = 1.0, beta: float = 1.0) -> None:
        self.alpha = number(self, "alpha", alpha)
        self.beta = number(self, "beta", beta)

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.alpha * x + self.beta * y

    def emit(self, e: Emitter, x: Block, y: Block) -> Block:
        terms = [t if w == 1.0 else f"{literal(w)} * {t}" for w, t in ((self.alpha, e.fp32(x)), (self.beta, e.fp32(y)))]
        return e.let(" + ".join(terms), broadcast(self, x.shape, y.shape), x, y)


class Divide(_Binary):
    """x / y."""

    triton: ClassVar[str] = "{x} / {y}"

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x / y


class _Where(_Binary):
    """0 where a comparison of x and y holds, -inf elsewhere: added to scores it forbids pages."""

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The comparison, bool."""
        raise NotImplementedError(f"{type(self).__name__}.holds")

    def meaning(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        true = self.holds(x, y)
        return torch.zeros(true.shape, dtype=x.dtype, device=x.device).masked_fill(~true, float("-inf"))


class WhereEqual(_Where):
    """0 where x = y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} == {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x == y


class WhereNotEqual(_Where):
    """0 where x ≠ y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} != {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x != y


class WhereGreater(_Where):
    """0 where x > y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} > {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x > y


class WhereGreaterEqual(_Where):
    """0 where x ≥ y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} >= {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x >= y


class WhereLess(_Where):
    """0 where x < y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} < {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x < y


class WhereLessEqual(_Where):
    """0 where x ≤ y, -inf elsewhere."""

    triton: ClassVar[str] = 'tl.where({x} <= {y}, 0.0, float("-inf"))'

    def holds(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x <= y


CMultiply = cache_side(Multiply)
CMaximum = cache_side(Maximum)
CMinimum = cache_side(Minimum)
CAdd = cache_side(Add)
CDivide = cache_side(Divide)
