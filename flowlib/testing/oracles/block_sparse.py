"""Oracles of the flows that rank pages by the mean key."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


class _Centroid(Oracle):
    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        total = torch.zeros_like(k[:, 0])
        for token in range(k.shape[1]):
            total = total + k[:, token]
        return {"centroid": (total / k.shape[1])[:, None]}


@oracle("block_sparse_attention")
class BlockSparse(_Centroid):
    """⟨mean_h q_h, c_j⟩."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return torch.einsum("hd,nd->n", q / q.shape[0], pages["centroid"][:, 0])[None]


@oracle("gqa_block_sparse_attention")
class GQABlockSparse(_Centroid):
    """max_h exp(scale·⟨q_h, c_j⟩) / Σ_i exp(scale·⟨q_h, c_i⟩)."""

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        scale = self.scale or spec.scale or q.shape[1] ** -0.5
        probabilities = []
        for head in q:
            logits = scale * torch.einsum("d,nd->n", head, pages["centroid"][:, 0])
            weights = (logits - logits.max()).exp()
            probabilities.append(weights / weights.sum())
        return torch.stack(probabilities).max(0).values[None]
