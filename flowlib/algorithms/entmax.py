"""Entmax attention over the pages that can, or are likely to, hold its support.

Source: EntmaxKV (arXiv:2605.21649). Entmax gives exact zeros, so a selection that holds every token with weight gives
the output of the whole row. With scores s = scale · q·k + slope · (position − query position), a = alpha − 1:

- top-k: the pages with the highest bounds Σ_d max(scale · q_d · max_d, scale · q_d · min_d), plus the largest ALiBi.
- Gaussian: pages with a · (mu + z · sigma) above a threshold, mu and sigma the mean and the deviation of the scores in
  a page were its keys' dimensions independent. The threshold is the one entmax would have over such normal scores,
  lowered by a margin, and raised to what the exact scores of the last page tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import torch

from flowlib import ContextBase, SelectionHandle, Spec, register, vFlow, vTensor
from flowlib.attention import Entmax
from flowlib.errors import OptionError
from flowlib.ops import (
    Add,
    Add_Mul,
    AlibiSlopes,
    CMax,
    CMean,
    CMin,
    CStd,
    GaussianFloor,
    GaussianTau,
    GeMM,
    Maximum,
    Minimum,
    Multiply,
    PagePosition,
    QueryPosition,
    Relu,
    Scaled,
    ScoreBound,
    Sqrt,
    Sum,
    TailFloor,
    TauEstimate,
    Threshold,
    TopK,
    topK,
)


class _EntmaxFlow(vFlow):
    """What both flows have: ALiBi, Quest's bound as a score, and rows so short that they are decoded exactly."""

    def __init__(self, min_context: int) -> None:
        if isinstance(min_context, bool) or not isinstance(min_context, int) or min_context < 0:
            raise OptionError(
                f"{self.flow_name}: min_context is {min_context!r}, expected a number of tokens of at least 0"
            )
        self.min_context = min_context
        self.cmax, self.cmin = CMax(dim=1), CMin(dim=1)
        self.page, self.query, self.slopes = PagePosition(), QueryPosition(), AlibiSlopes()
        self.scaled, self.multiply, self.add, self.relu = Scaled(), Multiply(), Add(), Relu()
        self.maximum, self.sum, self.bound = Maximum(), Sum(dim=2), ScoreBound()

    def adapt(self, spec: Spec) -> Spec:
        """Rows of fewer than `min_context` tokens are attended in full."""
        return spec.replace(dense_below=max(spec.dense_below, self.min_context - 1))

    def score_bound(self, q: vTensor, cache: Mapping[str, vTensor], ctx: ContextBase) -> vTensor:
        """An upper bound of every score in a page, ``[S, G, 1]``."""
        high = self.multiply(q, cache["k_max"], ctx=ctx)
        low = self.multiply(q, cache["k_min"], ctx=ctx)
        bound = self.scaled(self.sum(self.maximum(high, low, ctx=ctx), ctx=ctx), ctx=ctx)
        return self.with_alibi(bound, ctx, 0.0, ctx.spec.page_size - 1.0)

    def with_alibi(self, score: vTensor, ctx: ContextBase, offset: float, rising: float) -> vTensor:
        """A score ``[S, G, 1]`` plus slope · (first position of the page + `offset` − query position); slopes above 0
        count at `rising` positions later."""
        if ctx.spec.alibi_slopes is None:
            return score
        place = Add_Mul(offset, float(ctx.spec.page_size))(self.page(ctx=ctx))
        distance = Add(1.0, -1.0)(place, self.query(ctx=ctx), ctx=ctx)
        slopes = self.slopes(ctx=ctx)
        score = self.add(score, self.multiply(slopes, distance, ctx=ctx), ctx=ctx)
        return Add(1.0, rising)(score, self.relu(slopes, ctx=ctx), ctx=ctx) if rising else score


@register("entmax_topk_attention", "entmax_topk")
class EntmaxTopKAttention(_EntmaxFlow):
    """Each query head attends with entmax to the pages with the highest bounds; a step says which are surely exact.

    Args:
        alpha: above 1, at most 2.
        topk_pages: pages attended, the reserved ones among them; ``None`` means the spec's budget.
        min_context: rows of fewer tokens are attended in full.
    """

    def __init__(self, alpha: float = 1.5, topk_pages: int | None = None, min_context: int = 0) -> None:
        super().__init__(min_context)
        whole = isinstance(topk_pages, int) and not isinstance(topk_pages, bool)
        if topk_pages is not None and (not whole or topk_pages < 2):
            raise OptionError(
                f"{self.flow_name}: topk_pages is {topk_pages!r}, expected at least 2 pages, or None for the budget"
            )
        self.attention = Entmax(alpha)
        self.topk_pages = topk_pages

    def check_spec(self, spec: Spec) -> None:
        reserved = spec.bos + spec.eos
        if self.topk_pages is not None and self.topk_pages <= reserved:
            raise OptionError(
                f"{self.flow_name}: topk_pages is {self.topk_pages}, expected more than the {reserved} reserved pages "
                f"(bos {spec.bos}, eos {spec.eos})"
            )

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"k_max": (1, head_dim), "k_min": (1, head_dim)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        bound = self.score_bound(q, cache, ctx)
        self.bound(bound, o, ctx=ctx)
        if self.topk_pages is None:
            topK()(bound, o, ctx=ctx)
        else:
            TopK(self.topk_pages - ctx.spec.bos - ctx.spec.eos)(bound, o, ctx=ctx)


@register("entmax_gaussian_attention", "entmax_gaussian")
class EntmaxGaussianAttention(_EntmaxFlow):
    """Each query head attends with entmax to the pages whose likely largest score exceeds an estimated threshold.

    A page's score is a · (mu + z · sigma) less the threshold, and pages with more than 0 are attended.

    Args:
        alpha: above 1, at most 2.
        tau_mode, niter: as for :class:`flowlib.attention.Entmax`; the estimate is the threshold without its margin.
        safety_margin_z: deviations of a row's scores by which the threshold is lowered.
        max_quantile: z is this quantile of the largest of page_size standard normals.
        excess: share of the threshold's height above the typical page maximum by which it is lowered.
        min_context: rows of fewer tokens are attended in full.
        max_pages: most pages chosen; ``None`` means no limit.
        certify: keep Quest's bounds as well: pages that certainly hold no weight are left out, and a step says which
            outputs are certainly those of the whole row.
        stats_dtype: dtype of the means and deviations, or its name (``"float32"``); ``None`` means the pool's.
    """

    def __init__(
        self,
        alpha: float = 1.5,
        tau_mode: str = "exact",
        niter: int = 3,
        safety_margin_z: float = 0.0,
        max_quantile: float = 0.995,
        excess: float = 0.1,
        min_context: int = 0,
        max_pages: int | None = None,
        certify: bool = False,
        stats_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(min_context)
        if not isinstance(max_quantile, (int, float)) or not 0.0 < max_quantile < 1.0:
            raise OptionError(
                f"{self.flow_name}: max_quantile is {max_quantile!r}, expected a number above 0 and below 1"
            )
        normaliser = Entmax(alpha, tau_mode, niter)
        self.attention, self.alpha, self.estimated = normaliser, normaliser.alpha, normaliser.tau_mode != "exact"
        self.max_quantile, self.certify, self.stats_dtype = float(max_quantile), certify, stats_dtype
        self.cmean, self.cstd, self.gemm, self.sqrt = CMean(dim=1), CStd(dim=1), GeMM(), Sqrt()
        self.floor = GaussianFloor(alpha, safety_margin_z, excess)
        self.tau, self.estimate = GaussianTau(alpha, excess=0.0, mixture=None), TauEstimate()
        self.minimum, self.tail = Minimum(), TailFloor(alpha)
        self.zero, self.less, self.threshold = Add_Mul(0.0, 0.0), Add(1.0, -1.0), Threshold(max_pages)

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[object, ...]]:
        shape = (1, head_dim) if self.stats_dtype is None else (1, head_dim, self.stats_dtype)
        bounds = {"k_max": (1, head_dim), "k_min": (1, head_dim)} if self.certify else {}
        return {"k_mean": shape, "k_std": shape, **bounds}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["k_mean"], loc=loc, ctx=ctx)
        self.cstd(cache["k"], cache["k_std"], loc=loc, ctx=ctx)
        if self.certify:
            self.cmax(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
            self.cmin(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def moments(self, q: vTensor, cache: Mapping[str, vTensor], ctx: ContextBase) -> tuple[vTensor, vTensor]:
        """Mean and deviation of the scores in a page, ``[S, G, 1]``; ALiBi moves the mean."""
        size = ctx.spec.page_size
        mean = self.scaled(self.gemm(cache["k_mean"], q, ctx=ctx), ctx=ctx)
        variance = self.multiply(cache["k_std"], cache["k_std"], ctx=ctx)
        spread = self.sqrt(self.gemm(variance, self.multiply(q, q, ctx=ctx), ctx=ctx), ctx=ctx)
        return self.with_alibi(mean, ctx, (size - 1) / 2, 0.0), self.scaled(spread, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        a = self.alpha - 1.0
        z = NormalDist().inv_cdf(self.max_quantile ** (1.0 / ctx.spec.page_size))
        mean, spread = self.moments(q, cache, ctx)
        floor = self.floor(mean, spread, ctx=ctx)
        if self.estimated:
            self.estimate(self.tau(mean, spread, ctx=ctx), o, ctx=ctx)
        above = self.less(Add(a, a * z)(mean, spread, ctx=ctx), floor, ctx=ctx)
        if self.certify:
            bound = self.score_bound(q, cache, ctx)
            self.bound(bound, o, ctx=ctx)
            above = self.minimum(above, Add(a, -1.0)(bound, self.tail(ctx=ctx), ctx=ctx), ctx=ctx)
        self.threshold(above, self.zero(floor, ctx=ctx), o, ctx=ctx)
