"""Standard deviation inside an entry."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp, cache_side, check_inner_dim


class Std(TileOp):
    """sqrt(Σ (x − mean)² / n) over axis 1 or 2: the population's, in two passes (E[x²] − mean² would cancel)."""

    finite: ClassVar[bool] = True

    def __init__(self, dim: int = 1) -> None:
        self.dim = check_inner_dim(self, dim)

    @property
    def by_column(self) -> bool:
        """Where it works along axis 1."""
        return self.dim == 1

    def infer(self, x: Inner) -> Inner:
        return (1, x[1]) if self.dim == 1 else (x[0], 1)

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        axis, size = self.dim - 3, x.shape[self.dim - 3]
        deviation = x - x.sum(axis, keepdim=True) / size
        return ((deviation * deviation).sum(axis, keepdim=True) / size).sqrt()

    def emit(self, e: Emitter, x: Block) -> Block:
        size, over = float(x.shape[self.dim - 1]), f"axis={self.dim}, keep_dims=True"
        mean = e.let(f"tl.sum({e.filled(x, 0.0, self.dim)}, {over}) / {size!r}", self.infer(x.shape), x)
        deviation = e.let(f"{e.fp32(x)} - {mean.name}", x.shape, x)
        kept = e.filled(deviation, 0.0, self.dim)
        return e.let(f"tl.sqrt_rn(tl.sum(({kept}) * ({kept}), {over}) / {size!r})", self.infer(x.shape), x)


CStd = cache_side(Std)
