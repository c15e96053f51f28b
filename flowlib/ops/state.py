"""Fields read and written by the indexer, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from flowlib.core.errors import FormatError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Block, Emitter, Inner, SourceOp, TileOp, cache_side


class Load(TileOp):
    """A field as a RAGGED value: PAGED -> RAGGED."""

    finite: ClassVar[bool] = True

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def emit(self, e: Emitter, x: Block) -> Block:
        return x


class Save(TileOp):
    """Writes a value into a field for the scored pages of the row: ``save(x, cache["field"], ctx=ctx)``.

    It makes the field a state field, which needs a :class:`Fill` in ``forward_cache``.
    """

    saves: ClassVar[bool] = True

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def emit(self, e: Emitter, x: Block) -> Block:
        return x


class Fill(SourceOp):
    """alpha in every element of its output field: ``fill(cache["field"], loc=loc, ctx=ctx)``."""

    finite: ClassVar[bool] = True
    shaped_like_output: ClassVar[bool] = True

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = float(alpha)

    def infer(self, out: Inner) -> Inner:
        return out

    def values(self, width: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_full((1, 1, 1, 1), self.alpha)

    def emit(self, e: Emitter) -> Block:
        return e.constant(self.alpha, (1, 1))


class PagePosition(SourceOp):
    """The logical index of the page, ``[S, 1, 1]``."""

    finite: ClassVar[bool] = True

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        if side is Side.CACHE:
            raise FormatError("PagePosition: a physical page has no position; it belongs into forward_indexer")
        return FORMAT.RAGGED

    def infer(self) -> Inner:
        return (1, 1)

    def values(self, width: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(width, dtype=like.dtype, device=like.device).view(1, width, 1, 1)

    def emit(self, e: Emitter) -> Block:
        return e.positions()


CFill = cache_side(Fill)
