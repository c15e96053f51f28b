"""Immutable graphs: what the outputs reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flowlib.core.errors import SourceLine
from flowlib.core.formats import FORMAT, Side

if TYPE_CHECKING:
    from flowlib.core.op import Op


@dataclass(frozen=True)
class Field:
    """A named PAGED tensor kept beside K and V.

    Attributes:
        name: as declared by ``create_cache``.
        shape: ``(r, c)`` of one (page, kv head) entry.
        dtype: storage dtype.
        kind: ``"summary"`` (a function of the page's K/V) or ``"state"`` (also written by ``forward_indexer``).
        rounding: ``"up"``, ``"down"`` or ``"nearest"`` for a scaled float8 summary, see :mod:`flowlib.core.float8`;
            empty for a field that holds its values as they are.
        own_dtype: whether ``create_cache`` gave the dtype.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: str = "summary"
    rounding: str = ""
    own_dtype: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one (page, kv head) entry."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Node:
    """One op call, or a leaf. Leaves have no inputs and a name.

    Attributes:
        op: the op instance with its parameters.
        inputs: the nodes it reads.
        format: what axis 0 means.
        shape: inner sizes ``(r, c)``.
        dtype: storage dtype of a leaf; ``None`` for a computed value (fp32, float64 in reference mode).
        name: a leaf's name.
        where: the user's line.
        scaled: whether a leaf is a scaled float8 summary.
    """

    op: Op
    inputs: tuple[Node, ...]
    format: FORMAT
    shape: tuple[int, int]
    dtype: torch.dtype | None = None
    name: str = ""
    where: SourceLine | None = field(default=None, repr=False)
    scaled: bool = False

    def __str__(self) -> str:
        size = f"[{self.format.value}, {self.shape[0]}, {self.shape[1]}]"
        return f"{self.name} {size}" if self.name else f"{self.op} {size}"


@dataclass(frozen=True)
class Graph:
    """What one method of a flow computes.

    Attributes:
        side: the method.
        stores: field name to the node stored in it.
        selection: the node of the op that writes ``o`` (indexer side only).
        hints: what attention is told beside the selection, by the name of the hint.
    """

    side: Side
    stores: dict[str, Node]
    selection: Node | None = None
    hints: dict[str, Node] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Node, ...]:
        """Stored nodes, hints, then the selection."""
        last = () if self.selection is None else (self.selection,)
        return (*self.stores.values(), *self.hints.values(), *last)

    def nodes(self) -> list[Node]:
        """Every node the outputs reach, inputs before users."""
        return topological(self.outputs)

    def leaves(self) -> list[Node]:
        """The leaves the outputs reach, in the order of first use."""
        return [node for node in self.nodes() if not node.inputs and node.name]


def roundings(graph: Graph) -> dict[str, str]:
    """How scaled float8 summaries are rounded, by field: what is stored in them tells."""
    found: dict[int, str] = {}
    for node in graph.nodes():
        found[id(node)] = node.op.rounding(*(found[id(x)] for x in node.inputs))
    return {name: found[id(node)] for name, node in graph.stores.items()}


def topological(outputs: Iterable[Node]) -> list[Node]:
    """Every node reached from `outputs`, each once, inputs before users."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for output in outputs:
        stack.append((output, iter(output.inputs)))
        while stack:
            node, rest = stack[-1]
            if id(node) in seen:
                stack.pop()
                continue
            pending = next((n for n in rest if id(n) not in seen), None)
            if pending is not None:
                stack.append((pending, iter(pending.inputs)))
                continue
            seen.add(id(node))
            order.append(node)
            stack.pop()
    return order
