"""Elementwise ops of one input."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.errors import OptionError
from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side, literal, number


class _Unary(TileOp):
    by_column: ClassVar[bool] = True
    triton: ClassVar[str] = ""

    def infer(self, x: Inner) -> Inner:
        return x

    def emit(self, e: Emitter, x: Block) -> Block:
        numbers = {name: literal(value) for name, value in vars(self).items()}
        return e.let(self.triton.format(x=e.fp32(x), **numbers), x.shape, x)


class _Affine(_Unary):
    """beta · x + alpha, then a function."""

    def __init__(self, alpha: float = 0.0, beta: float = 1.0) -> None:
        self.alpha = number(self, "alpha", alpha)
        self.beta = number(self, "beta", beta)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """beta · x + alpha."""
        return self.beta * x + self.alpha


class Add_Mul(_Affine):
    """beta · x + alpha."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "{beta} * {x} + {alpha}"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Abs(_Affine):
    """abs(beta · x + alpha)."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "tl.abs({beta} * {x} + {alpha})"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).abs()


class Log(_Affine):
    """log(beta · x + alpha), natural."""

    triton: ClassVar[str] = "tl.log({beta} * {x} + {alpha})"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).log()


class Exp(_Affine):
    """exp(beta · x + alpha)."""

    triton: ClassVar[str] = "tl.exp({beta} * {x} + {alpha})"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).exp()


class Sqrt(_Unary):
    """The square root of x."""

    triton: ClassVar[str] = "tl.sqrt_rn({x})"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Relu(_Unary):
    """x where x ≥ alpha, else beta · x."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "tl.where({x} >= {alpha}, {x}, {beta} * {x})"

    def __init__(self, alpha: float = 0.0, beta: float = 0.0) -> None:
        self.alpha = number(self, "alpha", alpha)
        self.beta = number(self, "beta", beta)

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x >= self.alpha, x, self.beta * x)


class Sigmoid(_Unary):
    """1 / (1 + exp(beta · x + alpha)); the defaults give the usual sigmoid."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "1.0 / (1.0 + tl.exp({beta} * {x} + {alpha}))"

    def __init__(self, alpha: float = 0.0, beta: float = -1.0) -> None:
        self.alpha = number(self, "alpha", alpha)
        self.beta = number(self, "beta", beta)

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 / (1.0 + (self.beta * x + self.alpha).exp())


class Silu(Sigmoid):
    """x / (1 + exp(beta · x + alpha)); the defaults give the usual SiLU."""

    triton: ClassVar[str] = "{x} / (1.0 + tl.exp({beta} * {x} + {alpha}))"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x * super().meaning(x)


class Clamp(_Unary):
    """x limited to [lo, hi]; NaN becomes lo."""

    finite: ClassVar[bool] = True
    triton: ClassVar[str] = "tl.minimum(tl.maximum({x}, {lo}), {hi})"

    def __init__(self, lo: float, hi: float) -> None:
        self.lo = number(self, "lo", lo)
        self.hi = number(self, "hi", hi)
        if not self.lo <= self.hi:
            raise OptionError(f"Clamp: lo is {lo}, expected at most hi, {hi}")

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fmin(torch.fmax(x, x.new_tensor(self.lo)), x.new_tensor(self.hi))


CAdd_Mul = cache_side(Add_Mul)
CAbs = cache_side(Abs)
CLog = cache_side(Log)
CExp = cache_side(Exp)
CSqrt = cache_side(Sqrt)
CRelu = cache_side(Relu)
CSigmoid = cache_side(Sigmoid)
CSilu = cache_side(Silu)
CClamp = cache_side(Clamp)
