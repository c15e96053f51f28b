"""H2O on tokens: heavy hitters by accumulated attention.

Source: Zhang et al., H2O (arXiv:2306.14048). A page is one token. At every step, over the row's scored tokens:
probs = softmax(scale · q·k), hh = probs + decay · hh, and the tokens with the largest hh are attended. With
decay = 1 − 2⁻⁶ the sum is bounded by 64; a plain sum (decay 1) in a bf16 field grows until each increment is lost to
rounding and the ranking freezes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, Spec, register, vFlow, vTensor
from flowlib.errors import OptionError
from flowlib.ops import Add, CFill, GeMM, Load, Mean, Save, Softmax, topK


class _AccumulatedAttention(vFlow):
    """State and its update.

    Args:
        scale: factor of q·k; ``None`` means the attention's own scale (head_dim ** -0.5 unless given).
        decay: factor of the earlier sum.
        state_dtype: dtype of the field ``hh_score``, or its name (``"float32"``); ``None`` means the pool's.
    """

    default_page_size = 1

    def __init__(
        self, scale: float | None = None, decay: float = 0.984375, state_dtype: torch.dtype | str | None = None
    ) -> None:
        self.state_dtype = state_dtype
        self.cfill, self.gemm, self.softmax = CFill(0.0), GeMM(), Softmax(dim=0, scale=scale)
        self.load, self.save, self.add, self.topk = Load(), Save(), Add(alpha=1.0, beta=decay), topK()

    def check_spec(self, spec: Spec) -> None:
        if spec.page_size != 1:
            raise OptionError(f"{self.flow_name}: page_size is {spec.page_size}, expected 1: it ranks single tokens")

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[object, ...]]:
        return {"hh_score": (1, 1) if self.state_dtype is None else (1, 1, self.state_dtype)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cfill(cache["hh_score"], loc=loc, ctx=ctx)

    def accumulate(self, probs: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        """Adds this step's probabilities ``[S, 1, 1]`` and selects."""
        heavy = self.add(probs, self.load(cache["hh_score"], ctx=ctx), ctx=ctx)
        self.save(heavy, cache["hh_score"], ctx=ctx)
        self.topk(heavy, o, ctx=ctx)


@register("h2o_token_sparse_attention")
class H2OTokenSparseAttention(_AccumulatedAttention):
    """With the mean query of the group."""

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        logits = self.gemm(q.mean(dim=1, keepdim=True), cache["k"], ctx=ctx)
        self.accumulate(self.softmax(logits, ctx=ctx), o, cache, ctx)


@register("gqa_h2o_token_sparse_attention", "h2o_token")
class GQAH2OTokenSparseAttention(_AccumulatedAttention):
    """A softmax per query head, folded with the mean, so that a step adds exactly 1."""

    def __init__(
        self, scale: float | None = None, decay: float = 0.984375, state_dtype: torch.dtype | str | None = None
    ) -> None:
        super().__init__(scale, decay, state_dtype)
        self.mean = Mean(dim=2)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        probs = self.softmax(self.gemm(q, cache["k"], ctx=ctx), ctx=ctx)
        self.accumulate(self.mean(probs, ctx=ctx), o, cache, ctx)
