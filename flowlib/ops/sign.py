"""The two parts of a signed value; what the compiler splits a query into, exact in every dtype."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp


class PositivePart(TileOp):
    """max(x, 0)."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.0)

    def emit(self, e: Emitter, x: Block) -> Block:
        return e.same(f"tl.where({x.name} > 0, {x.name}, 0.0)", x)


class NegativePart(TileOp):
    """min(x, 0)."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x < 0, x, 0.0)

    def emit(self, e: Emitter, x: Block) -> Block:
        return e.same(f"tl.where({x.name} < 0, {x.name}, 0.0)", x)
