"""What a flow is compiled to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowlib.core.graph import Node
from flowlib.core.op import LEAF, Op, SegmentOp, SelectOp
from flowlib.core.spec import Spec
from flowlib.core.trace import Traced


@dataclass(frozen=True)
class Buffer:
    """An fp32 value that crosses a kernel boundary: ``[rows, r, c, width]``, pages fastest, or one entry per row.

    Attributes:
        name: of the kernel argument.
        shape: inner sizes ``(r, c)``.
        paged: whether it has an entry per page; else one per row, ``[bs, H * r, c]``.
    """

    name: str
    shape: tuple[int, int]
    paged: bool = True

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes for `rows` rows of `width` pages."""
        return 4 * rows * (width if self.paged else 1) * self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Output:
    """Where a tile stage puts a value.

    Attributes:
        node: the value.
        name: of the field or buffer.
        kind: ``"field"``, ``"buffer"`` (pages fastest), ``"entries"`` (one entry after the other) or ``"rows"``.
        rounding: of a scaled float8 field.
    """

    node: Node
    name: str
    kind: str
    rounding: str = ""


@dataclass(frozen=True)
class TileStage:
    """Fused tile ops: one generated kernel over the written pages (`update`) or over the scored pages of all rows."""

    name: str
    outputs: tuple[Output, ...]
    on_write: bool = False

    @property
    def per_row(self) -> bool:
        """Whether it runs once per row, over no pages."""
        return all(output.kind == "rows" for output in self.outputs)


@dataclass(frozen=True)
class SegmentStage:
    """A segment op: its hand-written kernel, from buffers into another one (or the only one of them)."""

    name: str
    op: SegmentOp
    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class SelectStage:
    """The selection: scores (a buffer's name, ``None`` where nothing is scored) to page lists."""

    op: SelectOp
    scores: str | None
    lanes: int


Stage = TileStage | SegmentStage | SelectStage


@dataclass(frozen=True)
class Program:
    """A compiled flow.

    Attributes:
        traced: flow, fields and simplified graphs.
        stages: in the order they run; the attend stage follows the last.
        buffers: by name.
        source: text of the generated module.
        hints: names of the buffers that hold what attention is told, by the name of the hint.
    """

    traced: Traced
    stages: tuple[Stage, ...]
    buffers: dict[str, Buffer]
    source: str
    hints: dict[str, str] = field(default_factory=dict)

    @property
    def update(self) -> TileStage | None:
        """The stage that runs on KV writes, if the flow has fields."""
        return next((s for s in self.stages if isinstance(s, TileStage) and s.on_write), None)

    @property
    def selection(self) -> SelectStage:
        """The stage that writes the page lists."""
        return next(s for s in self.stages if isinstance(s, SelectStage))

    @property
    def covers(self) -> bool:
        """Whether a row within the budget gets all its pages whatever its scores are, so that it need not be scored.

        No state is kept, and what the flow computes of finite keys and queries is finite: a score of -inf or NaN, which
        keeps a page out even where the budget has room, comes of nothing the flow means.
        """
        graphs = (self.traced.cache, self.traced.indexer)
        ops = [node.op for graph in graphs for node in graph.nodes() if node is not self.traced.indexer.selection]
        plain = all(op is LEAF or (op.finite and all(map(math.isfinite, _numbers(op)))) for op in ops)
        return not self.traced.indexer.stores and plain

    def full_pages(self, spec: Spec) -> int:
        """Rows of at most so many pages are attended in full for being within the budget."""
        return self.selection.op.covered_pages(spec) if self.covers else 0

    @property
    def step_stages(self) -> tuple[TileStage | SegmentStage, ...]:
        """The stages between the query and the selection."""
        return tuple(s for s in self.stages if not isinstance(s, SelectStage) and not getattr(s, "on_write", False))


def _numbers(op: Op) -> Iterator[float]:
    for value in op.parameters().values():
        yield from (x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float))
