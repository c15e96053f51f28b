"""Quest: an upper bound of every score in a page.

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv:2406.10774).
Score of page j: Σ_d max(q_d · max_d, q_d · min_d) over the page's largest and smallest keys per channel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import CMax, CMin, Max, Maximum, Multiply, Sum, topK


class _Envelope(vFlow):
    """The fields, and the bound as ops."""

    def __init__(self) -> None:
        self.cmax, self.cmin = CMax(dim=1), CMin(dim=1)
        self.multiply, self.maximum = Multiply(), Maximum()
        self.sum, self.topk = Sum(dim=2), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"k_max": (1, head_dim), "k_min": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def bound(self, q: vTensor, cache: Mapping[str, vTensor], ctx: ContextBase) -> vTensor:
        """The bound for queries ``[B, n, D]``: ``[S, n, 1]``."""
        high = self.multiply(q, cache["k_max"], ctx=ctx)
        low = self.multiply(q, cache["k_min"], ctx=ctx)
        return self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx)


@register("quest_sparse_attention")
class QuestSparseAttention(_Envelope):
    """Quest with the mean query of the group."""

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.bound(q.mean(dim=1, keepdim=True), cache, ctx), o, ctx=ctx)


@register("gqa_quest_sparse_attention", "quest")
class GQAQuestSparseAttention(_Envelope):
    """Quest per query head, the largest bound of the group counts."""

    def __init__(self) -> None:
        super().__init__()
        self.max = Max(dim=1)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.max(self.bound(q, cache, ctx), ctx=ctx), o, ctx=ctx)
