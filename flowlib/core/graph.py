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
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: str = "summary"

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
    """

    op: Op
    inputs: tuple[Node, ...]
    format: FORMAT
    shape: tuple[int, int]
    dtype: torch.dtype | None = None
    name: str = ""
    where: SourceLine | None = field(default=None, repr=False)

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
    """

    side: Side
    stores: dict[str, Node]
    selection: Node | None = None

    @property
    def outputs(self) -> tuple[Node, ...]:
        """Stored nodes, then the selection."""
        last = () if self.selection is None else (self.selection,)
        return (*self.stores.values(), *last)

    def nodes(self) -> list[Node]:
        """Every node the outputs reach, inputs before users."""
        return topological(self.outputs)

    def leaves(self) -> list[Node]:
        """The leaves the outputs reach, in the order of first use."""
        return [node for node in self.nodes() if not node.inputs and node.name]


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
