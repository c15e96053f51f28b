"""Block-sparse attention: pages ranked by the mean key.

Score of page j, with c_j the mean of its keys: ⟨mean_h q_h, c_j⟩, and for the gqa variant
max_h softmax_pages(scale · ⟨q_h, c_j⟩), which lets a head that is sure of a page outvote heads that are not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import CMean, GeMM, GeMV, Max, Softmax, topK


class _Centroid(vFlow):
    """The field: mean key of a page."""

    def __init__(self) -> None:
        self.cmean, self.topk = CMean(dim=1), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)


@register("block_sparse_attention")
class BlockSparseAttention(_Centroid):
    """The mean query of the group against the mean key."""

    def __init__(self) -> None:
        super().__init__()
        self.gemv = GeMV()

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx), o, ctx=ctx)


@register("gqa_block_sparse_attention", "block_sparse")
class GQABlockSparseAttention(_Centroid):
    """Each query head against the mean key, as probabilities over pages.

    Args:
        scale: factor of the logits; ``None`` means the attention's own scale (head_dim ** -0.5 unless given).
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.gemm, self.softmax, self.max = GeMM(), Softmax(dim=0, scale=scale), Max(dim=2)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        logits = self.gemm(q, cache["centroid"], ctx=ctx)
        self.topk(self.max(self.softmax(logits, ctx=ctx), ctx=ctx), o, ctx=ctx)
