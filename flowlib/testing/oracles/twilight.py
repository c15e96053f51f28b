"""Oracle of Twilight (arXiv:2502.02770): top-p of the estimated attention over pages."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


@oracle("twilight_attention")
class Twilight(Oracle):
    """The fewest pages, best first, whose softmax(scale · max_h bound) sums to at least p."""

    def __init__(self, p: float = 0.95, max_k: int | None = None, logits: str = "quest") -> None:
        self.p, self.max_k, self.logits = p, max_k, logits

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        if self.logits == "centroid":
            return {"centroid": torch.einsum("ntd->nd", k)[:, None] / k.shape[1]}
        return {"k_max": k.max(1, True).values, "k_min": k.min(1, True).values}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        bounds = []
        for head in q:
            if self.logits == "centroid":
                bounds.append(torch.einsum("d,nd->n", head, pages["centroid"][:, 0]))
            else:
                bounds.append(torch.maximum(head * pages["k_max"][:, 0], head * pages["k_min"][:, 0]).sum(1))
        return torch.stack(bounds).max(0).values[None]

    def kept(self, scores: torch.Tensor, spec: Spec, slack: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        scale = spec.scale or spec.head_dim**-0.5
        weights = (scale * (scores - scores.max())).exp()
        mass = weights / weights.sum()
        surely, perhaps = torch.zeros(mass.shape, dtype=torch.bool), torch.zeros(mass.shape, dtype=torch.bool)
        before = 0.0
        for page in mass.argsort(descending=True, stable=True).tolist():
            off = 2 * scale * slack  # a mass is off by this share where a score is off by slack
            surely[page] = before * (1 + off) < self.p
            perhaps[page] = before * (1 - off) < self.p
            before += float(mass[page])
        return surely, perhaps

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        eligible = sum(1 for s in scores.tolist() if s > float("-inf"))
        count = eligible if self.max_k is None else min(eligible, self.max_k)
        return count, count
