"""Block-sparse attention gated by the size of the values.

Score of page j: ⟨q̄, c_j⟩ · mean over its tokens of ‖v‖₂, with the mean query q̄ and the mean key c_j: a page whose
values are small adds little to the output whatever its attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import CL2Norm, CMean, GeMV, Multiply, topK


@register("venergy_gated_centroid")
class VEnergyGatedCentroid(vFlow):
    """The mean query against the mean key, times the mean norm of the values."""

    def __init__(self) -> None:
        self.cmean, self.cnorm, self.gemv = CMean(dim=1), CL2Norm(dim=2), GeMV()
        self.multiply, self.topk = Multiply(), topK()

    def create_cache(self, page_size: int, head_dim: int) -> dict[str, tuple[int, int]]:
        return {"centroid": (1, head_dim), "v_energy": (1, 1)}

    def forward_cache(self, cache: Mapping[str, vTensor], loc: torch.Tensor, ctx: ContextBase) -> None:
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        norms = self.cnorm(cache["v"], None, loc=loc, ctx=ctx)
        self.cmean(norms, cache["v_energy"], loc=loc, ctx=ctx)

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        scores = self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        self.topk(self.multiply(scores, cache["v_energy"], ctx=ctx), o, ctx=ctx)
