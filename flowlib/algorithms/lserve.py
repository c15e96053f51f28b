"""LServe: pages scored by their best sub-block.

Source: Yang et al., LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention (arXiv:2502.14866).
A page is cut into sub-blocks of 16 tokens (the whole page, if it is smaller). With the mean query q̄ of the group, the
score of page j is the largest over its sub-blocks b of Σ_d max(q̄_d · max_bd, q̄_d · min_bd), and for the centroid
variant of ⟨q̄, mean_b k⟩.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, Spec, register, vFlow, vTensor
from flowlib.errors import OptionError
from flowlib.ops import CMaxInterleave, CMeanInterleave, CMinInterleave, GeMM, Max, Maximum, Multiply, Sum, topK

SUB_BLOCK = 16


def check_sub_blocks(flow: str, spec: Spec) -> None:
    """Raises OptionError where a page is no whole number of sub-blocks."""
    if spec.page_size > SUB_BLOCK and spec.page_size % SUB_BLOCK:
        raise OptionError(
            f"{flow}: page_size is {spec.page_size}, expected at most {SUB_BLOCK} or a multiple of it: "
            f"a page is cut into sub-blocks of {SUB_BLOCK} tokens"
        )


class _SubBlocks(vFlow):
    """Pages that are whole numbers of sub-blocks."""

    default_page_size = 64

    def check_spec(self, spec: Spec) -> None:
        check_sub_blocks(self.flow_name, spec)


@register("lserve_sparse_attention")
class LServeSparseAttention(_SubBlocks):
    """Quest's bound on sub-blocks."""

    def __init__(self) -> None:
        self.multiply, self.maximum, self.sum = Multiply(), Maximum(), Sum(dim=2)
        self.max, self.topk = Max(dim=1), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        size = min(SUB_BLOCK, page_size)
        self.cmax, self.cmin = CMaxInterleave(dim=1, k=size), CMinInterleave(dim=1, k=size)
        return {"k_max": (page_size // size, head_dim), "k_min": (page_size // size, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        q_mean = q.mean(dim=1, keepdim=True)
        high = self.multiply(q_mean, cache["k_max"], ctx=ctx)
        low = self.multiply(q_mean, cache["k_min"], ctx=ctx)
        bound = self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx)
        self.topk(self.max(bound, ctx=ctx), o, ctx=ctx)


@register("lserve_centroid_sparse_attention")
class LServeCentroidSparseAttention(_SubBlocks):
    """Mean keys of sub-blocks."""

    def __init__(self) -> None:
        self.gemm, self.max, self.topk = GeMM(), Max(dim=1), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        size = min(SUB_BLOCK, page_size)
        self.cmean = CMeanInterleave(dim=1, k=size)
        return {"centroid": (page_size // size, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        scores = self.gemm(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        self.topk(self.max(scores, ctx=ctx), o, ctx=ctx)
