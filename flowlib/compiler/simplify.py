"""Rewrites graphs into equal ones that move fewer bytes or use better units; dead nodes are gone by construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowlib.core.formats import FORMAT
from flowlib.core.graph import Graph, Node, topological
from flowlib.core.trace import Traced
from flowlib.ops.elementwise import Add, Maximum, Multiply
from flowlib.ops.interleave import MaxInterleave, MinInterleave
from flowlib.ops.matmul import GeMM
from flowlib.ops.reduce import Max, Min, Sum
from flowlib.ops.sign import NegativePart, PositivePart
from flowlib.ops.state import Load


def simplify(traced: Traced) -> Traced:
    """The same flow with each value computed once per graph, and envelopes as dot products."""
    cache, indexer = _unique(traced.cache), _unique(traced.indexer)
    summaries = {name: node for name, node in cache.stores.items() if name not in indexer.stores}
    indexer = _unique(_envelopes_as_dots(indexer, summaries))
    return replace(traced, cache=cache, indexer=indexer)


def _unique(graph: Graph) -> Graph:
    """Value numbering: nodes with the same op, parameters and inputs become one."""
    by_key: dict[tuple[object, ...], Node] = {}
    new: dict[int, Node] = {}
    for node in topological(graph.outputs):
        inputs = tuple(new[id(x)] for x in node.inputs)
        parameters = repr(sorted(node.op.parameters().items()))
        key = (type(node.op), parameters, node.name, node.shape, node.format, *map(id, inputs))
        new[id(node)] = by_key.setdefault(key, replace(node, inputs=inputs))
    return _mapped(graph, new)


def _mapped(graph: Graph, new: Mapping[int, Node]) -> Graph:
    stores, hints = ({name: new[id(node)] for name, node in x.items()} for x in (graph.stores, graph.hints))
    return Graph(graph.side, stores, None if graph.selection is None else new[id(graph.selection)], hints)


def _envelopes_as_dots(graph: Graph, summaries: Mapping[str, Node]) -> Graph:
    """Σ_d max(q·M, q·m) becomes max(q, 0)·M + min(q, 0)·m where M and m are the largest and smallest of the same keys.

    Per channel the larger product is q·M where q ≥ 0 and q·m elsewhere, because M ≥ m; both terms are dot products.
    """
    new: dict[int, Node] = {}
    for node in topological(graph.outputs):
        current = replace(node, inputs=tuple(new[id(x)] for x in node.inputs))
        new[id(node)] = _envelope_as_dots(current, summaries) or current
    return _mapped(graph, new)


def _envelope_as_dots(node: Node, summaries: Mapping[str, Node]) -> Node | None:
    if not (isinstance(node.op, Sum) and node.op.dim == 2 and isinstance(node.inputs[0].op, Maximum)):
        return None
    first, second = node.inputs[0].inputs
    if not (isinstance(first.op, Multiply) and isinstance(second.op, Multiply)):
        return None
    for q in first.inputs:
        if not any(q is x for x in second.inputs):
            continue
        fields = [next(x for x in product.inputs if x is not q) for product in (first, second)]
        for high, low in (fields, fields[::-1]):
            if _is_envelope(high, low, summaries) and high.shape[1] == q.shape[1] and 1 in (q.shape[0], high.shape[0]):
                return _dots(node, q, high, low)
    return None


def _is_envelope(high: Node, low: Node, summaries: Mapping[str, Node]) -> bool:
    """Whether the graph proves that `high` and `low` are maximum and minimum of the same values."""
    pair = [summaries.get((x.inputs[0] if isinstance(x.op, Load) else x).name) for x in (high, low)]
    top, bottom = pair
    if top is None or bottom is None or top.inputs != bottom.inputs:
        return False
    if high.dtype != low.dtype or _is_scaled(high) != _is_scaled(low):
        return False  # rounded differently, a minimum may come out above its maximum
    kinds = ((Max, Min), (MaxInterleave, MinInterleave))
    known = any(isinstance(top.op, a) and isinstance(bottom.op, b) for a, b in kinds)
    return known and top.op.parameters() == bottom.op.parameters()


def _is_scaled(field: Node) -> bool:
    return any(x.scaled for x in (field, *field.inputs))


def _dots(node: Node, q: Node, high: Node, low: Node) -> Node:
    terms = []
    for part, field in ((PositivePart(), high), (NegativePart(), low)):
        side = Node(part, (q,), q.format, q.shape, where=node.where)
        operands = (side, field) if q.shape[0] == 1 else (field, side)
        terms.append(Node(GeMM(), operands, FORMAT.RAGGED, node.shape, where=node.where))
    return Node(Add(), tuple(terms), FORMAT.RAGGED, node.shape, where=node.where)
