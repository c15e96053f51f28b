"""Reductions over axis 1 or 2 of an entry, which stays with size 1; ``dim=0`` is over the scored pages of a row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side, check_inner_dim, literal
from flowlib.core.vtensor import sugar
from flowlib.ops.pages import PageReduction


class _Reduction(TileOp):
    finite: ClassVar[bool] = True
    identity: ClassVar[float] = 0.0
    """What padded lanes of the reduced axis must hold."""
    ignores_nan: ClassVar[bool] = False
    """Whether a NaN counts as the identity."""

    def __new__(cls, dim: int = 1) -> Any:
        return PageReduction(cls.__name__.removeprefix("C")) if dim == 0 else super().__new__(cls)

    def __init__(self, dim: int = 1) -> None:
        self.dim = check_inner_dim(self, dim)

    @property
    def by_column(self) -> bool:
        """Where it works along axis 1."""
        return self.dim == 1

    def infer(self, x: Inner) -> Inner:
        return (1, x[1]) if self.dim == 1 else (x[0], 1)

    def reduced(self, x: str, size: int) -> str:
        """Triton text of the reduction of the expression `x` over `size` true lanes."""
        raise NotImplementedError(f"{type(self).__name__}.reduced")

    def emit(self, e: Emitter, x: Block) -> Block:
        if self.ignores_nan:
            value = e.fp32(x)
            x = e.let(f"tl.where({value} == {value}, {value}, {literal(self.identity)})", x.shape, x)
        text = self.reduced(e.filled(x, self.identity, self.dim), x.shape[self.dim - 1])
        return e.let(text, self.infer(x.shape), x)

    def _tl(self, function: str, x: str) -> str:
        return f"tl.{function}({x}, axis={self.dim}, keep_dims=True)"


class Sum(_Reduction):
    """Σ x."""

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(self.dim - 3, keepdim=True)

    def reduced(self, x: str, size: int) -> str:
        return self._tl("sum", x)


@sugar("mean")
class Mean(_Reduction):
    """Σ x / n."""

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(self.dim - 3, keepdim=True) / x.shape[self.dim - 3]

    def reduced(self, x: str, size: int) -> str:
        return f"{self._tl('sum', x)} / {float(size)!r}"


class Max(_Reduction):
    """max x; a NaN counts as -inf."""

    identity: ClassVar[float] = float("-inf")
    ignores_nan: ClassVar[bool] = True

    def rounding(self, *inputs: str) -> str:
        return "up"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x.isnan(), self.identity).amax(self.dim - 3, keepdim=True)

    def reduced(self, x: str, size: int) -> str:
        return self._tl("max", x)


class Min(_Reduction):
    """min x; a NaN counts as inf."""

    identity: ClassVar[float] = float("inf")
    ignores_nan: ClassVar[bool] = True

    def rounding(self, *inputs: str) -> str:
        return "down"

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x.isnan(), self.identity).amin(self.dim - 3, keepdim=True)

    def reduced(self, x: str, size: int) -> str:
        return self._tl("min", x)


class L2Norm(_Reduction):
    """sqrt(Σ x²)."""

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum(self.dim - 3, keepdim=True).sqrt()

    def reduced(self, x: str, size: int) -> str:
        return f"tl.sqrt({self._tl('sum', f'({x}) * ({x})')})"


CSum = cache_side(Sum)
CMean = cache_side(Mean)
CMax = cache_side(Max)
CMin = cache_side(Min)
CL2Norm = cache_side(L2Norm)
