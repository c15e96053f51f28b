"""Flows over the latents of multi-head latent attention (MLA): pages ranked for the mean of all query heads.

A latent is [content | rope], an absorbed query is [q_content | q_rope], and their dot product is a token's logit before
the scale; so a page is scored as over K. With the mean query q̄ of the heads, c_j the mean latent of page j, and b its
sub-blocks of 16 tokens:

    rope_aware_block_sparse_mla     ⟨q̄, c_j⟩
    rope_unaware_block_sparse_mla   ⟨q̄_content, c_j,content⟩: positions have no say
    lserve_centroid_mla             max_b ⟨q̄, c_jb⟩
    quest_mla                       Σ_d max(q̄_d · max_jd, q̄_d · min_jd)

Sources: MLA, DeepSeek-AI, DeepSeek-V2 (arXiv:2405.04434); Quest (arXiv:2406.10774); LServe (arXiv:2502.14866).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, Spec, register, vFlowMLA, vTensor
from flowlib.algorithms.lserve import SUB_BLOCK, check_sub_blocks
from flowlib.ops import (
    CMax,
    CMean,
    CMeanInterleave,
    CMin,
    GeMM,
    GeMV,
    MaskSlice,
    Max,
    Maximum,
    Multiply,
    Sum,
    topK,
)


class _Centroid(vFlowMLA):
    """The field: mean latent of a page."""

    def __init__(self) -> None:
        self.cmean, self.gemv, self.topk = CMean(dim=1), GeMV(), topK()

    def create_cache(self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroid": (1, kv_lora_rank + qk_rope_head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["latent"], cache["centroid"], loc=loc, ctx=ctx)


@register("rope_aware_block_sparse_mla")
class RopeAwareBlockSparseMLA(_Centroid):
    """The mean query against the mean latent, content and rope."""

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.topk(self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx), o, ctx=ctx)


@register("rope_unaware_block_sparse_mla")
class RopeUnawareBlockSparseMLA(_Centroid):
    """The mean query against the mean latent, content channels alone."""

    def create_cache(self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, tuple[int, int]]:
        self.content, self.multiply = MaskSlice(0, kv_lora_rank, dim=2), Multiply()
        return super().create_cache(page_size, kv_lora_rank, qk_rope_head_dim)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        q_mean = q.mean(dim=1, keepdim=True)
        q_content = self.multiply(q_mean, self.content(q_mean, ctx=ctx), ctx=ctx)
        self.topk(self.gemv(q_content, cache["centroid"], ctx=ctx), o, ctx=ctx)


@register("lserve_centroid_mla")
class LServeCentroidMLA(vFlowMLA):
    """The mean query against the mean latents of sub-blocks of 16 tokens, the best of a page counts."""

    default_page_size = 64

    def __init__(self) -> None:
        self.gemm, self.max, self.topk = GeMM(), Max(dim=1), topK()

    def check_spec(self, spec: Spec) -> None:
        check_sub_blocks(self.flow_name, spec)

    def create_cache(self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, tuple[int, int]]:
        size = min(SUB_BLOCK, page_size)
        self.cmean = CMeanInterleave(dim=1, k=size)
        return {"centroid": (page_size // size, kv_lora_rank + qk_rope_head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["latent"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        scores = self.gemm(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        self.topk(self.max(scores, ctx=ctx), o, ctx=ctx)


@register("quest_mla")
class QuestMLA(vFlowMLA):
    """Quest's bound of the mean query, from the largest and smallest latents."""

    def __init__(self) -> None:
        self.cmax, self.cmin = CMax(dim=1), CMin(dim=1)
        self.multiply, self.maximum = Multiply(), Maximum()
        self.sum, self.topk = Sum(dim=2), topK()

    def create_cache(self, page_size: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, tuple[int, int]]:
        size = kv_lora_rank + qk_rope_head_dim
        return {"latent_max": (1, size), "latent_min": (1, size)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmax(cache["latent"], cache["latent_max"], loc=loc, ctx=ctx)
        self.cmin(cache["latent"], cache["latent_min"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        q_mean = q.mean(dim=1, keepdim=True)
        high = self.multiply(q_mean, cache["latent_max"], ctx=ctx)
        low = self.multiply(q_mean, cache["latent_min"], ctx=ctx)
        self.topk(self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx), o, ctx=ctx)
