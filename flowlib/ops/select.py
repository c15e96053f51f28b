"""Ops that write the selection."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.errors import ShapeError
from flowlib.core.op import Inner, SelectOp


class topK(SelectOp):
    """The budget's best pages of scores ``[S, 1, 1]``, or ``[S, G, 1]`` for a selection per query head.

    Deterministic: ties go to the lower page; scores of -inf and NaN are never selected, not even to fill the budget;
    the selection is in ascending order.
    """

    def infer(self, x: Inner) -> Inner:
        if x[1] != 1:
            raise ShapeError(
                f"topK: axis 2 of 'x' is {x[1]}, expected 1: scores are [S, 1, 1], or [S, G, 1] for a selection per "
                "query head; use Transpose, or swap the arguments of GeMM"
            )
        return x

    def meaning(self, x: torch.Tensor, scored: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        eligible = scored[:, None, :] & (x > float("-inf"))
        order = x.masked_fill(~eligible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))
        return eligible & (rank < budget[:, None, None])


class Reserved(SelectOp):
    """The reserved pages only: the first `bos` and the last `eos` of the row."""

    names: ClassVar[tuple[str, ...]] = ()
    scored: ClassVar[bool] = False

    def infer(self) -> Inner:
        return (1, 1)

    def meaning(self, x: torch.Tensor, scored: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scored)[:, None, :]
