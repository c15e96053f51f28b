"""Oracles of the H2O flows (arXiv:2306.14048)."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


class _PageLevel(Oracle):
    def __init__(self, w_avg: float = 1.0, w_peak: float = 1.0) -> None:
        self.w_avg, self.w_peak = w_avg, w_peak

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        mean = torch.einsum("ntd->nd", k) / k.shape[1]
        return {"k_mean": mean[:, None], "k_max": k.max(1, True).values, "k_min": k.min(1, True).values}

    def relevance(self, q: torch.Tensor, pages: Pages) -> torch.Tensor:
        """w_avg · ⟨q, mean⟩ + w_peak · Σ_d max(q_d · max_d, q_d · min_d) of one query ``[D]``: ``[n]``."""
        average = torch.einsum("d,nd->n", q, pages["k_mean"][:, 0])
        peak = torch.maximum(q * pages["k_max"][:, 0], q * pages["k_min"][:, 0]).sum(1)
        return self.w_avg * average + self.w_peak * peak


@oracle("h2o_sparse_attention")
class H2O(_PageLevel):
    """For the group's mean query."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return self.relevance(q.sum(0) / q.shape[0], pages)[None]


@oracle("gqa_h2o_sparse_attention")
class GQAH2O(_PageLevel):
    """The largest of the group."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return torch.stack([self.relevance(head, pages) for head in q]).max(0).values[None]


class _TokenLevel(Oracle):
    """hh = probabilities of this step + decay · hh, over the scored tokens; 0 where a token is new."""

    def __init__(
        self, scale: float | None = None, decay: float = 0.984375, state_dtype: torch.dtype | None = None
    ) -> None:
        self.scale, self.decay = scale, decay

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        return {"hh_score": k.new_zeros(len(k), 1, 1)}

    def probabilities(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        """exp(scale·⟨q, k_j⟩) / Σ_i of one query ``[D]``: ``[n]``."""
        scale = self.scale or spec.scale or q.shape[0] ** -0.5
        logits = scale * torch.einsum("d,nd->n", q, pages["k"][:, 0])
        weights = (logits - logits.max()).exp()
        return weights / weights.sum()

    def heavy(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        """This step's probability of each token: ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__}.heavy")

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return (self.heavy(q, pages, spec) + self.decay * pages["hh_score"][:, 0, 0])[None]

    def state(self, q: torch.Tensor, pages: Pages, spec: Spec) -> dict[str, torch.Tensor]:
        return {"hh_score": self.scores(q, pages, spec)[0, :, None, None]}


@oracle("h2o_token_sparse_attention")
class H2OToken(_TokenLevel):
    """Of the group's mean query."""

    def heavy(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return self.probabilities(q.sum(0) / q.shape[0], pages, spec)


@oracle("gqa_h2o_token_sparse_attention")
class GQAH2OToken(_TokenLevel):
    """The mean of the group's query heads, so that a step adds exactly 1."""

    def heavy(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        total = torch.zeros_like(pages["k"][:, 0, 0])
        for head in q:
            total = total + self.probabilities(head, pages, spec)
        return total / q.shape[0]
