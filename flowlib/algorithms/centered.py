"""Block-sparse attention with centred scores.

Score of page j: ⟨q̄, c_j⟩ − mean over the row's scored pages of ⟨q̄, c⟩, with the mean query q̄ and the mean key c_j of a
page. Centring leaves the ranking as it is; it makes scores of different rows and steps comparable.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import Add, CMean, GeMV, Mean, topK


@register("centered_block_sparse_attention")
class CenteredBlockSparseAttention(vFlow):
    """The mean query against the mean key, minus the row's mean."""

    def __init__(self) -> None:
        self.cmean, self.gemv = CMean(dim=1), GeMV()
        self.mean, self.subtract, self.topk = Mean(dim=0), Add(alpha=1.0, beta=-1.0), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        scores = self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        self.topk(self.subtract(scores, self.mean(scores, ctx=ctx), ctx=ctx), o, ctx=ctx)
