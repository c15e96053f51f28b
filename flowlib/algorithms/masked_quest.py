"""Quest on some of the channels.

Source: Quest (arXiv:2406.10774) with a channel mask, as in the flow language of vortex_torch.
Score of page j: Σ over d in [start, end) of max(q̄_d · max_d, q̄_d · min_d) with the mean query q̄ of the group. Which
channels carry the ranking depends on the model; half of them need half of the bandwidth once fields are cut, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import CMax, CMin, MaskSlice, Maximum, Multiply, Sum, topK


@register("masked_quest_sparse_attention")
class MaskedQuestSparseAttention(vFlow):
    """Quest with masked channels.

    Args:
        start, end: channels that count, ``[start, end)``; ``end=None`` means half of the channels from `start`.
    """

    def __init__(self, start: int = 0, end: int | None = None) -> None:
        self.start, self.end = start, end
        self.cmax, self.cmin = CMax(dim=1), CMin(dim=1)
        self.multiply, self.maximum = Multiply(), Maximum()
        self.sum, self.topk = Sum(dim=2), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        end = min(head_dim, self.start + (head_dim + 1) // 2) if self.end is None else self.end
        self.mask = MaskSlice(self.start, end, dim=2)
        return {"k_max": (1, head_dim), "k_min": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        q_mean = q.mean(dim=1, keepdim=True)
        masked = self.multiply(q_mean, self.mask(q_mean, ctx=ctx), ctx=ctx)
        high = self.multiply(masked, cache["k_max"], ctx=ctx)
        low = self.multiply(masked, cache["k_min"], ctx=ctx)
        self.topk(self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx), o, ctx=ctx)
