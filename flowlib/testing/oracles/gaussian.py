"""Oracle of the mean + standard deviation bound."""

from __future__ import annotations

from statistics import NormalDist

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


@oracle("gaussian_sparse_attention")
class Gaussian(Oracle):
    """max_h (⟨q_h, mean k⟩ + z · sqrt(Σ_d q_hd² std_d²)); z: the 0.995 quantile of the largest of page_size normals."""

    def __init__(self, z: float | None = None) -> None:
        self.z = z

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        mean = torch.einsum("ntd->nd", k) / k.shape[1]
        away = k - mean[:, None]
        variance = torch.einsum("ntd,ntd->nd", away, away) / k.shape[1]
        return {"k_mean": mean[:, None], "k_std": variance.sqrt()[:, None]}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        z = NormalDist().inv_cdf(0.995 ** (1 / spec.page_size)) if self.z is None else self.z
        bounds = []
        for head in q:
            mean = torch.einsum("d,nd->n", head, pages["k_mean"][:, 0])
            spread = torch.einsum("d,nd->nd", head, pages["k_std"][:, 0])
            bounds.append(mean + z * torch.einsum("nd,nd->n", spread, spread).sqrt())
        return torch.stack(bounds).max(0).values[None]
