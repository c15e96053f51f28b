"""Removes repeated nodes; dead ones are gone already, since a graph is what its outputs reach."""

from __future__ import annotations

from dataclasses import replace

from flowlib.core.graph import Graph, Node, topological
from flowlib.core.trace import Traced


def simplify(traced: Traced) -> Traced:
    """The same flow with each value computed once per graph."""
    return replace(traced, cache=_unique(traced.cache), indexer=_unique(traced.indexer))


def _unique(graph: Graph) -> Graph:
    """Value numbering: nodes with the same op, parameters and inputs become one."""
    by_key: dict[tuple[object, ...], Node] = {}
    new: dict[int, Node] = {}
    for node in topological(graph.outputs):
        inputs = tuple(new[id(x)] for x in node.inputs)
        key = (
            type(node.op),
            repr(sorted(node.op.parameters().items())),
            node.name,
            node.shape,
            node.format,
            *map(id, inputs),
        )
        new[id(node)] = by_key.setdefault(key, replace(node, inputs=inputs))
    stores = {name: new[id(node)] for name, node in graph.stores.items()}
    return Graph(graph.side, stores, None if graph.selection is None else new[id(graph.selection)])
