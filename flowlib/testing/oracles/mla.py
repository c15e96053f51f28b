"""Oracles of the flows over MLA latents: k is the latents ``[n, page_size, content + rope]``."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle

SUB_BLOCK = 16


class _Centroid(Oracle):
    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        total = torch.zeros_like(k[:, 0])
        for token in range(k.shape[1]):
            total = total + k[:, token]
        return {"centroid": (total / k.shape[1])[:, None]}


@oracle("rope_aware_block_sparse_mla")
class RopeAware(_Centroid):
    """⟨q̄_content, c_j,content⟩ + ⟨q̄_rope, c_j,rope⟩, the mean of the heads' logits."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        rank, centroid = spec.dv, pages["centroid"][:, 0]
        content = torch.einsum("hd,nd->hn", q[:, :rank], centroid[:, :rank])
        rope = torch.einsum("hd,nd->hn", q[:, rank:], centroid[:, rank:])
        return ((content + rope).sum(0) / q.shape[0])[None]


@oracle("rope_unaware_block_sparse_mla")
class RopeUnaware(_Centroid):
    """⟨q̄_content, c_j,content⟩."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        content = torch.einsum("hd,nd->hn", q[:, : spec.dv], pages["centroid"][:, 0, : spec.dv])
        return (content.sum(0) / q.shape[0])[None]


@oracle("lserve_centroid_mla")
class LServeCentroid(Oracle):
    """max over sub-blocks b of ⟨q̄, c_jb⟩."""

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        means = []
        for start in range(0, k.shape[1], SUB_BLOCK):
            block = k[:, start : start + SUB_BLOCK]
            means.append(block.sum(1) / block.shape[1])
        return {"centroid": torch.stack(means, 1)}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        best = None
        for block in range(pages["centroid"].shape[1]):
            logit = torch.einsum("hd,nd->hn", q, pages["centroid"][:, block]).sum(0) / q.shape[0]
            best = logit if best is None else torch.maximum(best, logit)
        return best[None]  # type: ignore[index]


@oracle("quest_mla")
class Quest(Oracle):
    """Σ_d max(q̄_d · max_d, q̄_d · min_d) over content and rope (arXiv:2406.10774, equation 1)."""

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        high, low = k[:, 0], k[:, 0]
        for token in range(1, k.shape[1]):
            high, low = torch.maximum(high, k[:, token]), torch.minimum(low, k[:, token])
        return {"latent_max": high[:, None], "latent_min": low[:, None]}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        mean = q.sum(0) / q.shape[0]
        return torch.maximum(mean * pages["latent_max"][:, 0], mean * pages["latent_min"][:, 0]).sum(1)[None]
