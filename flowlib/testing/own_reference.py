"""A flow's own graph as its oracle, for flows nobody wrote one for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowlib.core.float8 import SCALES
from flowlib.core.graph import Node
from flowlib.core.op import SelectOp
from flowlib.core.rows import Rows
from flowlib.core.spec import Spec
from flowlib.core.trace import trace
from flowlib.runtime import reference
from flowlib.runtime.plan import Plan
from flowlib.testing.oracles import Oracle, Pages


class ReferenceOracle(Oracle):
    """The graph of a plan in float64, one row at a time: no page table, no batch, and as traced, not rewritten."""

    def __init__(self, plan: Plan) -> None:
        self.traced = trace(plan.flow, plan.spec)

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        stores = self.traced.cache.stores
        given = {"k": k, "latent": k, "v": v, SCALES: torch.full((1, 1, 1), spec.summary_scale, dtype=k.dtype)}

        def leaf(node: Node) -> torch.Tensor:
            return given[node.name]

        values = reference.evaluate(stores.values(), leaf, like=k)
        return {name: _entries(values[id(node)], len(k), node) for name, node in stores.items()}

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor | None:
        selection = self.traced.indexer.selection
        if selection is None or not selection.inputs:
            return None
        return self._row(q, pages, selection.inputs[:1])[0][:, :, 0].T

    def state(self, q: torch.Tensor, pages: Pages, spec: Spec) -> dict[str, torch.Tensor]:
        stores = self.traced.indexer.stores
        values = self._row(q, pages, tuple(stores.values())) if stores else []
        return {n: x.expand(-1, *node.shape) for (n, node), x in zip(stores.items(), values, strict=True)}

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        selection = self.traced.indexer.selection
        if selection is None or not isinstance(selection.op, SelectOp) or not len(scores):
            return 0, 0
        budget = torch.tensor([selection.op.budget(spec, num_pages)])
        chosen = selection.op.meaning(scores[None, None], torch.ones(1, len(scores), dtype=torch.bool), budget)
        return int(chosen.sum()), int(chosen.sum())

    def _row(self, q: torch.Tensor, pages: Pages, outputs: Sequence[Node]) -> list[torch.Tensor]:
        """Values ``[n, r, c]`` of the scored pages; reserved ones before them are copies of the first, not scored."""
        n, first = len(pages["position"]), int(pages["position"][0])
        if "k" in pages:
            pages = {**pages, "latent": pages["k"]}
        entries = torch.tensor([0] * first + list(range(n)))

        def leaf(node: Node) -> torch.Tensor:
            return q[None, None] if node.name == "q" else pages[node.name][entries][None]

        scored = (torch.arange(first + n) >= first)[None]
        about = Rows(pages["query_position"], pages["alibi_slopes"][None], lambda: pages["tail_maximum"][None])
        values = reference.evaluate(outputs, leaf, scored, like=q, rows=about)
        return [values[id(node)].expand(1, first + n, -1, -1)[0, first:] for node in outputs]


def _entries(x: torch.Tensor, count: int, node: Node) -> torch.Tensor:
    """A value ``[.., r or 1, c or 1]`` as ``[count, r, c]``."""
    return x.reshape(-1, *x.shape[-2:]).expand(count, *node.shape)
