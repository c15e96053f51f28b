"""H2O on pages: heavy hitters by page statistics.

Source: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
(arXiv:2306.14048), with statistics of pages in place of accumulated attention. Score of page j:
w_avg · ⟨q, mean k⟩ + w_peak · Σ_d max(q_d · max_d, q_d · min_d). The first term is the page's attention before the
softmax, up to the page size; the second bounds its largest score and is systematically larger, hence the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import Add, CMax, CMean, CMin, GeMM, Max, Maximum, Multiply, Sum, topK


class _PageStatistics(vFlow):
    """Fields and score.

    Args:
        w_avg, w_peak: weights of the average and of the peak relevance.
    """

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        self.cmean, self.cmax, self.cmin = CMean(dim=1), CMax(dim=1), CMin(dim=1)
        self.gemm, self.multiply, self.maximum, self.sum = GeMM(), Multiply(), Maximum(), Sum(dim=2)
        self.add, self.topk = Add(alpha=w_avg, beta=w_peak), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"k_mean": (1, head_dim), "k_max": (1, head_dim), "k_min": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["k_mean"], loc=loc, ctx=ctx)
        self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def relevance(self, q: vTensor, cache: Mapping[str, vTensor], ctx: ContextBase) -> vTensor:
        """The score for queries ``[B, n, D]``: ``[S, n, 1]``."""
        average = self.gemm(cache["k_mean"], q, ctx=ctx)
        high = self.multiply(q, cache["k_max"], ctx=ctx)
        low = self.multiply(q, cache["k_min"], ctx=ctx)
        peak = self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx)
        return self.add(average, peak, ctx=ctx)


@register("h2o_sparse_attention")
class H2OSparseAttention(_PageStatistics):
    """With the mean query of the group."""

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.relevance(q.mean(dim=1, keepdim=True), cache, ctx), o, ctx=ctx)


@register("gqa_h2o_sparse_attention", "h2o")
class GQAH2OSparseAttention(_PageStatistics):
    """Per query head; the largest score of the group counts."""

    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        super().__init__(w_avg, w_peak)
        self.max = Max(dim=1)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.max(self.relevance(q, cache, ctx), ctx=ctx), o, ctx=ctx)
