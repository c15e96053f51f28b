"""Oracles of Quest (arXiv:2406.10774, equation 1)."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


class _Envelope(Oracle):
    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        high, low = k[:, 0], k[:, 0]
        for token in range(1, k.shape[1]):
            high, low = torch.maximum(high, k[:, token]), torch.minimum(low, k[:, token])
        return {"k_max": high[:, None], "k_min": low[:, None]}

    @staticmethod
    def bound(q: torch.Tensor, pages: Pages) -> torch.Tensor:
        """Σ_d max(q_d · max_d, q_d · min_d) of one query ``[D]``: ``[n]``."""
        bounds = []
        for high, low in zip(pages["k_max"][:, 0], pages["k_min"][:, 0], strict=True):
            bounds.append(torch.maximum(q * high, q * low).sum())
        return torch.stack(bounds)


@oracle("quest_sparse_attention")
class Quest(_Envelope):
    """The bound of the group's mean query."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return self.bound(q.sum(0) / q.shape[0], pages)[None]


@oracle("gqa_quest_sparse_attention")
class GQAQuest(_Envelope):
    """The largest bound of the group's query heads."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return torch.stack([self.bound(head, pages) for head in q]).max(0).values[None]


@oracle("masked_quest_sparse_attention")
class MaskedQuest(_Envelope):
    """The bound of the mean query over the channels [start, end), by default half of them."""

    def __init__(self, start: int = 0, end: int | None = None) -> None:
        self.start, self.end = start, end

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        size = q.shape[1]
        end = min(size, self.start + -(-size // 2)) if self.end is None else self.end
        cut = {name: pages[name][:, :, self.start : end] for name in ("k_max", "k_min")}
        return self.bound(q.sum(0)[self.start : end] / q.shape[0], cut)[None]
