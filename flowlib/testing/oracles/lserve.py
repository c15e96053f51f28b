"""Oracles of LServe (arXiv:2502.14866): pages by their best sub-block of 16 tokens."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle

SUB_BLOCK = 16


def sub_blocks(k: torch.Tensor) -> list[torch.Tensor]:
    """k ``[n, page_size, D]`` cut into runs of at most 16 tokens: each ``[n, <= 16, D]``."""
    return [k[:, start : start + SUB_BLOCK] for start in range(0, k.shape[1], SUB_BLOCK)]


@oracle("lserve_sparse_attention")
class LServe(Oracle):
    """max over sub-blocks b of Σ_d max(q̄_d · max_bd, q̄_d · min_bd)."""

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        blocks = sub_blocks(k)
        return {
            "k_max": torch.stack([b.max(1).values for b in blocks], 1),
            "k_min": torch.stack([b.min(1).values for b in blocks], 1),
        }

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        mean = q.sum(0) / q.shape[0]
        bounds = []
        for block in range(pages["k_max"].shape[1]):
            bounds.append(torch.maximum(mean * pages["k_max"][:, block], mean * pages["k_min"][:, block]).sum(1))
        return torch.stack(bounds).max(0).values[None]


@oracle("lserve_centroid_sparse_attention")
class LServeCentroid(Oracle):
    """max over sub-blocks b of ⟨q̄, mean_b k⟩."""

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        return {"centroid": torch.stack([b.sum(1) / b.shape[1] for b in sub_blocks(k)], 1)}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return torch.einsum("hd,nbd->nb", q / q.shape[0], pages["centroid"]).max(1).values[None]
