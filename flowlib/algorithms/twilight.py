"""Twilight: as many pages as hold a share p of the attention.

Source: Lin et al., Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning (arXiv:2502.02770).
Logits of page j: scale · max_h of Quest's bound, or of ⟨q_h, c_j⟩ with the mean key c_j. Of the softmax of the logits
over the row's pages the fewest pages are kept whose sum is at least p.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.errors import OptionError
from flowlib.ops import CMax, CMean, CMin, GeMM, Max, Maximum, Multiply, Sum, topP


@register("twilight_attention", "twilight")
class TwilightAttention(vFlow):
    """Top-p selection.

    Args:
        p: share of the (estimated) attention to keep.
        max_k: most pages; ``None`` means no limit.
        logits: ``"quest"`` or ``"centroid"``.
    """

    def __init__(self, p: float = 0.95, max_k: int | None = None, logits: str = "quest") -> None:
        if logits not in ("quest", "centroid"):
            raise OptionError(f"twilight_attention: logits is {logits!r}, expected 'quest' or 'centroid'")
        self.logits = logits
        self.cmax, self.cmin, self.cmean = CMax(dim=1), CMin(dim=1), CMean(dim=1)
        self.multiply, self.maximum, self.sum, self.gemm = Multiply(), Maximum(), Sum(dim=2), GeMM()
        self.fold_rows, self.fold_columns = Max(dim=1), Max(dim=2)
        self.topp = topP(p, max_k=max_k, scale=None)

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        if self.logits == "quest":
            return {"k_max": (1, head_dim), "k_min": (1, head_dim)}
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        if self.logits == "quest":
            self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
            self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)
        else:
            self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        if self.logits == "quest":
            high = self.multiply(q, cache["k_max"], ctx=ctx)
            low = self.multiply(q, cache["k_min"], ctx=ctx)
            logits = self.fold_rows(self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx), ctx=ctx)
        else:
            logits = self.fold_columns(self.gemm(q, cache["centroid"], ctx=ctx), ctx=ctx)
        self.topp(logits, o, ctx=ctx)
