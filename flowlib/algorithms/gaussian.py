"""Gaussian bound: a page's largest score as a quantile of a normal distribution.

Source: the page statistics of EntmaxKV (arXiv:2605.21649), with softmax attention. With μ_j = ⟨q_h, mean k⟩ and
σ_j = sqrt(Σ_d q_d² std_d²) of page j, its score is max_h (μ_j + z · σ_j). z defaults to Φ⁻¹(0.995^(1/page_size)), the
0.995 quantile of the largest of page_size normal scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import Add, CMean, CStd, GeMM, Max, Multiply, Sqrt, topK

PAGE_MAXIMUM_QUANTILE = 0.995


@register("gaussian_sparse_attention", "gaussian")
class GaussianSparseAttention(vFlow):
    """Mean plus z standard deviations, per query head; the largest of the group counts.

    Args:
        z: standard deviations added; ``None`` means the quantile above.
    """

    def __init__(self, z: float | None = None) -> None:
        self.z = z
        self.cmean, self.cstd = CMean(dim=1), CStd(dim=1)
        self.gemm, self.multiply, self.sqrt, self.add = GeMM(), Multiply(), Sqrt(), Add()
        self.max, self.topk = Max(dim=2), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        z = NormalDist().inv_cdf(PAGE_MAXIMUM_QUANTILE ** (1 / page_size)) if self.z is None else self.z
        self.add = Add(alpha=1.0, beta=z)
        return {"k_mean": (1, head_dim), "k_std": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["k_mean"], loc=loc, ctx=ctx)
        self.cstd(cache["k"], cache["k_std"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        mean = self.gemm(q, cache["k_mean"], ctx=ctx)
        k_variance = self.multiply(cache["k_std"], cache["k_std"], ctx=ctx)
        variance = self.gemm(self.multiply(q, q, ctx=ctx), k_variance, ctx=ctx)
        self.topk(self.max(self.add(mean, self.sqrt(variance, ctx=ctx), ctx=ctx), ctx=ctx), o, ctx=ctx)
