"""Block-sparse attention with a memory of earlier steps.

Score of page j at a step: s_j = ⟨q̄, c_j⟩ + decay · (s_j of the step before), with the mean query q̄ and the mean key
c_j. The sum is kept in a state field of the page, which is 0 when the page is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import Add, CFill, CMean, GeMV, Load, Save, topK


@register("running_avg_block_sparse_attention")
class RunningAvgBlockSparseAttention(vFlow):
    """Current score plus a decayed sum of the earlier ones.

    Args:
        decay: factor of the earlier sum.
        state_dtype: dtype of the state field, or its name (``"float32"``); ``None`` means the pool's.
    """

    def __init__(self, decay: float = 0.5, state_dtype: torch.dtype | str | None = None) -> None:
        self.state_dtype = state_dtype
        self.cmean, self.cfill, self.gemv = CMean(dim=1), CFill(0.0), GeMV()
        self.load, self.save, self.add, self.topk = Load(), Save(), Add(alpha=1.0, beta=decay), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[object, ...]]:
        state = (1, 1) if self.state_dtype is None else (1, 1, self.state_dtype)
        return {"centroid": (1, head_dim), "running": state}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        self.cfill(cache["running"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        current = self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        running = self.add(current, self.load(cache["running"], ctx=ctx), ctx=ctx)
        self.save(running, cache["running"], ctx=ctx)
        self.topk(running, o, ctx=ctx)
