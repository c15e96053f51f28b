"""Cuts graphs into stages: tile ops fuse, segment ops are boundaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flowlib.compiler.emit import TILE_ELEMENTS, padded_elements
from flowlib.compiler.program import Buffer, Output, SegmentStage, SelectStage, Stage, TileStage
from flowlib.core.errors import FlowDefinitionError
from flowlib.core.formats import FORMAT
from flowlib.core.graph import Node, topological
from flowlib.core.op import LEAF, SegmentOp, SelectOp, TileOp
from flowlib.core.trace import Traced


def partition(traced: Traced) -> tuple[tuple[Stage, ...], dict[str, Buffer], dict[str, str]]:
    """Stages in the order they run, the buffers between them, and the buffers of hints by the name of the hint."""
    stages: list[Stage] = []
    if traced.cache.stores:
        fields = traced.fields
        outputs = tuple(Output(n, name, "field", fields[name].rounding) for name, n in traced.cache.stores.items())
        stages.append(TileStage("update", outputs, on_write=True))
    selection = traced.indexer.selection
    if selection is None or not isinstance(selection.op, SelectOp):
        raise FlowDefinitionError("forward_indexer: no selection to partition")
    hints = traced.indexer.hints
    cutter = _Cutter(topological(traced.indexer.outputs))
    cutter.start_with_rows()
    for node in cutter.order:
        if isinstance(node.op, SegmentOp):
            cutter.cut(node)
    wanted = {"scores": selection.inputs[0]} if selection.inputs else {}
    names = cutter.materialized({**wanted, **hints}, "score")
    cutter.save(traced.indexer.stores)
    stages += cutter.stages
    stages.append(SelectStage(selection.op, names.get("scores"), selection.shape[0]))
    return tuple(stages), cutter.buffers, {name: names[name] for name in hints}


class _Cutter:
    """Replaces values that cross a kernel boundary by leaves that read their buffer."""

    def __init__(self, order: list[Node]) -> None:
        self.order = order
        self.users = Counter(id(x) for node in order for x in node.inputs)
        self.stages: list[Stage] = []
        self.buffers: dict[str, Buffer] = {}
        self.leaves: dict[int, Node] = {}
        self.last_values: dict[int, Node] = {}

    def start_with_rows(self) -> None:
        """A kernel of its own for what pages need of a row alone, where that is made of larger blocks than a kernel
        holds: else each of the many programs that share the row's pages would load them again.

        Values over the output of a segment op stay where they are, as do those of a block that is needed as it is.
        """
        needed = {
            id(x): x
            for node in self.order
            if isinstance(node.op, TileOp) and node.format is not FORMAT.BATCHED
            for x in node.inputs
            if x.format is FORMAT.BATCHED
        }
        largest: dict[int, int] = {}  # elements of a leaf that a value of a row is made of
        for node in (n for n in self.order if n.format is FORMAT.BATCHED):
            if node.name:
                largest[id(node)] = 0 if id(node) in needed else padded_elements(node.shape)
            elif isinstance(node.op, TileOp) and all(id(x) in largest for x in node.inputs):
                largest[id(node)] = max((largest[id(x)] for x in node.inputs), default=0)
        wanted: dict[str, Node] = {}
        for key, node in needed.items():
            if largest.get(key, 0) > max(TILE_ELEMENTS, padded_elements(node.shape)) and not node.name:
                label = f"row_{type(node.op).__name__.lower()}"
                count = sum(name == label or name.startswith(f"{label}_") for name in wanted)
                wanted[f"{label}_{count + 1}" if count else label] = node
        self._write(wanted, "rows", per_row=True)

    def cut(self, node: Node) -> None:
        """Ends a kernel at a segment op: its input goes into a buffer, its output comes from one."""
        op = node.op
        if not isinstance(op, SegmentOp):
            raise FlowDefinitionError(f"{node} is no segment op")
        label = type(op).__name__.lower()
        count = sum(isinstance(s, SegmentStage) for s in self.stages)
        suffix = f"_{count + 1}" if count else ""
        inputs = {
            f"{label}_in{'' if len(op.names) == 1 else f'_{name}'}{suffix}": source
            for name, source in zip(op.names, node.inputs, strict=True)
        }
        sources = list(self.materialized(inputs, f"before_{label}{suffix}").values())
        per_row = node.format is FORMAT.BATCHED
        alone = len(sources) == 1 and self.users[id(node.inputs[0])] == 1
        if alone and op.aliasable and not per_row:
            target = sources[0]
        else:
            target = f"{label}_out{suffix}"
            self.buffers[target] = Buffer(target, node.shape, paged=not per_row)
        self.stages.append(SegmentStage(f"{label}{suffix}", op, tuple(sources), target))
        self.leaves[id(node)] = _buffer_leaf(target, node.shape, node.format)

    def save(self, stores: Mapping[str, Node]) -> None:
        """Adds the stores of state fields to the last kernel, after every read of their old values."""
        if not stores:
            return
        last = self.stages[-1] if self.stages else None
        if isinstance(last, TileStage) and last.per_row:
            last = None
        joined = isinstance(last, TileStage)
        if joined:  # the buffer that this kernel writes is no input of it
            written = {o.name for o in last.outputs}
            self.leaves = {key: leaf for key, leaf in self.leaves.items() if leaf.name not in written}
        done = self.last_values if joined else {}
        outputs = tuple(Output(self._substituted(node, done), name, "field") for name, node in stores.items())
        if joined:
            self.stages[-1] = replace(last, outputs=(*last.outputs, *outputs))
        else:
            self.stages.append(TileStage("save", outputs))

    def materialized(self, wanted: Mapping[str, Node], stage: str) -> dict[str, str]:
        """Names of the buffers that hold some values, by the name wanted; new tile stages write those that none holds.

        Values with an entry per page are written by one stage; those with an entry per row by another one before it.
        """
        for per_row in (True, False):
            missing = {n: x for n, x in wanted.items() if (x.format is FORMAT.BATCHED) is per_row}
            self._write(missing, f"{stage}_rows" if per_row else stage, per_row)
        return {name: self.leaves[id(node)].name for name, node in wanted.items()}

    def _write(self, wanted: Mapping[str, Node], stage: str, per_row: bool) -> None:
        missing = {id(node): (name, node) for name, node in wanted.items() if id(node) not in self.leaves}
        if not missing:
            return
        self.last_values = {}
        outputs = tuple(
            Output(self._substituted(node, self.last_values), name, "rows" if per_row else "buffer")
            for name, node in missing.values()
        )
        self.stages.append(TileStage(stage, outputs))
        for name, node in missing.values():
            self.buffers[name] = Buffer(name, node.shape, paged=not per_row)
            self.leaves[id(node)] = _buffer_leaf(name, node.shape, node.format if per_row else FORMAT.RAGGED)

    def _substituted(self, node: Node, done: dict[int, Node]) -> Node:
        known = self.leaves.get(id(node)) or done.get(id(node))
        if known is None:
            known = node
            if node.inputs:
                known = replace(node, inputs=tuple(self._substituted(x, done) for x in node.inputs))
            done[id(node)] = known
        return known


def _buffer_leaf(name: str, shape: tuple[int, int], format: FORMAT) -> Node:
    return Node(LEAF, (), format, shape, name=name)
