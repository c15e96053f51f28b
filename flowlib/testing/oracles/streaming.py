"""Oracle of streaming attention (arXiv:2309.17453)."""

from __future__ import annotations

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle


@oracle("streaming_attention")
class Streaming(Oracle):
    """No scores and no choice: the reserved pages."""

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> None:
        return None

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        return 0, 0
