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


class _MeanQuery(_Centroid):
    @staticmethod
    def relevance(q: torch.Tensor, pages: Pages) -> torch.Tensor:
        """⟨q̄, c_j⟩: ``[n]``."""
        return torch.einsum("hd,nd->n", q / q.shape[0], pages["centroid"][:, 0])


@oracle("centered_block_sparse_attention")
class Centered(_MeanQuery):
    """⟨q̄, c_j⟩ less its mean over the scored pages."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        relevance = self.relevance(q, pages)
        return (relevance - relevance.sum() / len(relevance))[None]


@oracle("running_avg_block_sparse_attention")
class RunningAverage(_MeanQuery):
    """s_j = ⟨q̄, c_j⟩ + decay · (s_j of the step before), 0 before the first."""

    def __init__(self, decay: float = 0.5, state_dtype: torch.dtype | None = None) -> None:
        self.decay = decay

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        return {**super().fields(k, v, spec), "running": k.new_zeros(len(k), 1, 1)}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return (self.relevance(q, pages) + self.decay * pages["running"][:, 0, 0])[None]

    def state(self, q: torch.Tensor, pages: Pages, spec: Spec) -> dict[str, torch.Tensor]:
        return {"running": self.scores(q, pages, spec)[0, :, None, None]}


@oracle("venergy_gated_centroid")
class ValueEnergy(_MeanQuery):
    """⟨q̄, c_j⟩ · mean over the page's tokens of ‖v‖₂."""

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        norms = torch.einsum("nte,nte->nt", v, v).sqrt()
        return {**super().fields(k, v, spec), "v_energy": (norms.sum(1) / v.shape[1])[:, None, None]}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return (self.relevance(q, pages) * pages["v_energy"][:, 0, 0])[None]
