"""Segment ops beside Softmax: they work along the scored pages ``[bos, S - eos)`` of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from flowlib.core.errors import OptionError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Inner, SegmentOp, number
from flowlib.core.spec import Spec

_IDENTITY = {"Sum": 0.0, "Mean": 0.0, "L2Norm": 0.0, "Max": float("-inf"), "Min": float("inf")}


class PageReduction(SegmentOp):
    """Sum, Mean, Max, Min or L2Norm over the scored pages: RAGGED ``[S, r, c]`` -> BATCHED ``[B, r, c]``.

    What ``Sum(dim=0)`` and its kind are. A row without a scored page gives the identity (0 for the mean).
    """

    finite: ClassVar[bool] = True
    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_reduce"

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    @property
    def label(self) -> str:
        return f"{self.reduction}(dim=0)"

    def __str__(self) -> str:
        return self.label

    def infer(self, x: Inner) -> Inner:
        return x

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        return FORMAT.BATCHED

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        mask = scored[:, :, None, None]
        kept = x.masked_fill(~mask, _IDENTITY[self.reduction])
        if self.reduction in ("Max", "Min"):
            kept = kept.masked_fill(kept.isnan(), _IDENTITY[self.reduction])
        if self.reduction in ("Max", "Min"):
            reduce = torch.amax if self.reduction == "Max" else torch.amin
            return reduce(kept, 1, keepdim=True) if x.shape[1] else kept.new_full((len(x), 1, *x.shape[2:]), 0.0)
        if self.reduction == "L2Norm":
            return (kept * kept).sum(1, keepdim=True).sqrt()
        total = kept.sum(1, keepdim=True)
        return total / mask.sum(1, keepdim=True).clamp(min=1) if self.reduction == "Mean" else total

    def options(self) -> dict[str, object]:
        return {"reduction": self.reduction}


class _Pages(SegmentOp):
    """A segment op of axis 0 that keeps the inner sizes."""

    def __init__(self, dim: int = 0) -> None:
        if dim != 0:
            raise OptionError(f"{type(self).__name__}: dim is {dim!r}, expected 0 (the pages of a row)")
        self.dim = dim

    def infer(self, x: Inner) -> Inner:
        return x


class Normalize(_Pages):
    """x / Σ x over the scored pages; reserved pages get 0."""

    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_normalize"
    in_place: ClassVar[bool] = True

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        kept = x.masked_fill(~scored[:, :, None, None], 0.0)
        return (kept / kept.sum(1, keepdim=True)).masked_fill(~scored[:, :, None, None], 0.0)

    def options(self) -> dict[str, object]:
        return {"squared": False}


class L2Normalize(_Pages):
    """x / sqrt(Σ x²) over the scored pages; reserved pages get 0."""

    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_normalize"
    in_place: ClassVar[bool] = True

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        kept = x.masked_fill(~scored[:, :, None, None], 0.0)
        norm = (kept * kept).sum(1, keepdim=True).sqrt()
        return (kept / norm).masked_fill(~scored[:, :, None, None], 0.0)

    def options(self) -> dict[str, object]:
        return {"squared": True}


class Conv1d(_Pages):
    """y_p = Σ_t weight_t · x_{p + t - (n - 1) / 2} along the scored pages, 0 outside of them; reserved pages get 0.

    Args:
        weight: an odd number n of weights (a cross-correlation, as in torch); ``[n, 1, 1]`` nested lists will do.
        dim: 0, the pages.
        dtype, device: of no effect; the language's first version has them.
    """

    finite: ClassVar[bool] = True
    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_conv1d"
    aliasable: ClassVar[bool] = False

    def __init__(
        self, weight: Sequence[Any], dim: int = 0, dtype: torch.dtype | None = None, device: object = None
    ) -> None:
        super().__init__(dim)
        if isinstance(weight, (str, int, float)) or not isinstance(weight, Sequence):
            raise OptionError(f"Conv1d: weight is {weight!r}, expected a list of an odd number of weights")
        self.weight = tuple(_one_number(w) for w in weight)
        if len(self.weight) % 2 == 0:
            raise OptionError(
                f"Conv1d: weight has {len(self.weight)} values, expected an odd number, so that it has a centre"
            )

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        outside, side = ~scored[:, :, None, None], len(self.weight) // 2
        padded = torch.nn.functional.pad(x.masked_fill(outside, 0.0), (0, 0, 0, 0, side, side))
        width = x.shape[1]
        shifted = [w * padded[:, tap : tap + width] for tap, w in enumerate(self.weight)]
        return torch.stack(shifted).sum(0).masked_fill(outside, 0.0)

    def options(self) -> dict[str, object]:
        return {"weight": self.weight}


def _one_number(weight: object) -> float:
    while isinstance(weight, (list, tuple)) and len(weight) == 1:
        weight = weight[0]
    if isinstance(weight, (list, tuple)):
        raise OptionError(f"Conv1d: a weight is {weight!r}, expected one number: all channels share the weights")
    return number("Conv1d", "a weight", weight)


class KeepTop(SegmentOp):
    """The k best scores of the scored pages, ties to the lower page; -inf for all others. What ``TopK`` is made of."""

    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_keep_top"

    def __init__(self, k: int) -> None:
        self.k = k

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(~best(x, scored, self.k), float("-inf"))

    def options(self) -> dict[str, object]:
        return {"k": self.k}


class KeepNucleus(SegmentOp):
    """The fewest scored pages with mass ≥ p, best first, ties to the lower page; -inf for all others.

    Mass is softmax(scale · x) over the scored pages, or x itself. What ``topP`` is made of.
    """

    kernel: ClassVar[str] = "flowlib.kernels.pages:launch_keep_nucleus"

    def __init__(self, p: float, input: str, scale: float | None) -> None:
        self.p = p
        self.input = input
        self.scale = scale

    def bound(self, spec: Spec) -> KeepNucleus:
        return self if self.scale is not None else KeepNucleus(self.p, self.input, spec.softmax_scale)

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        eligible = scored[:, :, None, None] & (x > float("-inf"))
        kept = x.masked_fill(~eligible, float("-inf"))
        if self.input == "logits":
            top = kept.amax(1, keepdim=True) if x.shape[1] else kept
            scale = 1.0 if self.scale is None else self.scale
            mass = (scale * (kept - top.masked_fill(top == float("-inf"), 0.0))).exp().masked_fill(kept == top, 1.0)
            mass = mass.masked_fill(~eligible, 0.0)
        else:
            mass = x.masked_fill(~eligible, 0.0)
        order = kept.sort(dim=1, descending=True, stable=True).indices
        sorted_mass = mass.gather(1, order)
        before = sorted_mass.cumsum(1) - sorted_mass
        needed = before < self.p * mass.sum(1, keepdim=True)
        chosen = torch.zeros_like(eligible).scatter(1, order, needed) & eligible
        return x.masked_fill(~chosen, float("-inf"))

    def options(self) -> dict[str, object]:
        return {"p": self.p, "softmax_scale": self.scale if self.input == "logits" else None}


def best(x: torch.Tensor, scored: torch.Tensor, k: int | torch.Tensor) -> torch.Tensor:
    """The k best of ``[R, W, r, c]`` along axis 1, bool; ties to the lower page, never -inf or NaN."""
    eligible = scored[:, :, None, None] & (x > float("-inf"))
    order = x.masked_fill(~eligible, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    place = torch.arange(x.shape[1], device=x.device)[None, :, None, None].expand_as(order)
    return eligible & (torch.empty_like(order).scatter_(1, order, place) < k)
