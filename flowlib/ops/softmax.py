"""Softmax over the pages of a row."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch

from flowlib.core.errors import OptionError
from flowlib.core.op import Inner, SegmentOp, number
from flowlib.core.spec import Spec


class Softmax(SegmentOp):
    """exp(scale·x − max) / Σ over the scored pages ``[bos, S - eos)`` of the row; reserved pages get 0.

    A row whose scored pages are all -inf gives NaN, which is never selected.

    Args:
        dim: 0, the pages.
        scale: factor of x; ``None`` means the spec's attention scale.
    """

    finite: ClassVar[bool] = True
    identity: ClassVar[float] = float("-inf")
    kernel: ClassVar[str] = "flowlib.kernels.segment:launch_softmax"
    in_place: ClassVar[bool] = True

    def __init__(self, dim: int = 0, scale: float | None = 1.0) -> None:
        if dim != 0:
            raise OptionError(f"Softmax: dim is {dim!r}, expected 0 (the pages of a row)")
        if scale is not None and not number(self, "scale", scale) > 0:
            raise OptionError(f"Softmax: scale is {scale!r}, expected a positive number, or None for the spec's scale")
        self.dim = dim
        self.scale = scale

    def bound(self, spec: Spec) -> Softmax:
        if self.scale is not None:
            return self
        resolved = copy.copy(self)
        resolved.scale = spec.softmax_scale
        return resolved

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor, *, scored: torch.Tensor) -> torch.Tensor:
        outside = ~scored[:, :, None, None]
        logits = ((1.0 if self.scale is None else self.scale) * x).masked_fill(outside, float("-inf"))
        weights = (logits - logits.amax(1, keepdim=True)).exp() if x.shape[1] else logits
        return (weights / weights.sum(1, keepdim=True)).masked_fill(outside, 0.0)

    def options(self) -> dict[str, object]:
        return {"scale": self.scale}
