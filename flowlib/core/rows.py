"""Ops about rows: what a row is beside its pages, and what attention is told about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from flowlib.core.errors import FormatError, ShapeError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Inner, Op, SourceOp


@dataclass(frozen=True)
class Rows:
    """What reference mode knows of R rows beside their pages.

    Attributes:
        query_position: ``[R]``.
        slopes: ALiBi slopes of each row's query heads, ``[R, G]``; 0 where the spec has none.
        tail_maximum: gives ``[R, G]``, the largest attention score in each row's last page; -inf for an empty row.
    """

    query_position: torch.Tensor
    slopes: torch.Tensor
    tail_maximum: Callable[[], torch.Tensor]


class RowOp(SourceOp):
    """A source op with an entry per row."""

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        if side is Side.CACHE:
            raise FormatError(f"{self.label}: a physical page belongs to no row; it belongs into forward_indexer")
        return FORMAT.BATCHED

    def row_values(self, rows: Rows) -> torch.Tensor:
        """The op for R rows: ``[R, r, c]``."""
        raise NotImplementedError(f"{type(self).__name__}.row_values")


class HintOp(Op):
    """Tells attention something beside the selection: its last argument is ``o``, and it has no result."""

    takes_output: ClassVar[bool] = True
    hint: ClassVar[str] = ""
    """What it is called in the graph."""
    per_page: ClassVar[bool] = True
    """Whether it is told of every page, else of every row."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.across_pages = cls.per_page  # type: ignore[misc]

    def infer(self, x: Inner) -> Inner:
        if x[1] != 1:
            raise ShapeError(f"{self.label}: axis 2 of 'x' is {x[1]}, expected 1: [., n, 1], one value per query head")
        return x
