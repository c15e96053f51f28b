"""Profile mode: a flow's methods run on vTensors without data and leave two graphs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from flowlib.core.context import ContextBase
from flowlib.core.errors import (
    FlowDefinitionError,
    FlowlibError,
    FormatError,
    ShapeError,
    SourceLine,
    did_you_mean,
    located,
    user_line,
)
from flowlib.core.float8 import SCALES
from flowlib.core.formats import FORMAT, Mode, Side
from flowlib.core.graph import Field, Graph, Node, roundings
from flowlib.core.op import LEAF, Op, SegmentOp, Stored, check_field_dtype
from flowlib.core.rows import HintOp
from flowlib.core.spec import Spec
from flowlib.core.vtensor import SelectionHandle, vTensor

if TYPE_CHECKING:
    from flowlib.core.flow import vFlow

GIVEN = ("k", "v", "latent")
"""The fields flows are given; read-only, and no names for others: see :func:`given_fields`."""


class ProfileContext(ContextBase):
    """Records op calls as graph nodes."""

    mode: ClassVar[Mode] = Mode.PROFILE

    def __init__(self, spec: Spec, side: Side, fields: Mapping[str, Field]) -> None:
        super().__init__(spec, side)
        self.fields = fields
        self.stores: dict[str, Node] = {}
        self.selections: list[Node] = []
        self.in_place: frozenset[int] = frozenset()
        self.segment_calls: list[Node] = []
        self.hints: dict[str, Node] = {}

    def apply(
        self,
        op: Op,
        inputs: tuple[vTensor, ...],
        target: vTensor | SelectionHandle | None,
        result: tuple[FORMAT, tuple[int, int]] | None,
        loc: object,
    ) -> vTensor | None:
        nodes = tuple(self._node_of(op, x) for x in inputs)
        if isinstance(op, HintOp):
            self._tell(op, nodes[0])
            return None
        if result is None:
            lanes = inputs[0].shape[0] if inputs else 1
            if lanes not in (1, self.spec.group_size):
                raise ShapeError(
                    f"{type(op).__name__}: axis 1 of 'x' is {lanes}, expected 1, or {self.spec.group_size} "
                    "(the group size) for a selection per query head"
                )
            self.selections.append(Node(op, nodes, FORMAT.RAGGED, (lanes, 1), where=user_line()))
            return None
        node = Node(op, nodes, *result, where=user_line())
        if isinstance(target, vTensor):
            self._store(op, target, node)
            return target
        if isinstance(op, SegmentOp) and op.in_place:
            if len(self.segment_calls) in self.in_place:
                inputs[0].node = node
            self.segment_calls.append(node)
        return vTensor(result[0], result[1], self, node=node)

    def check_entries(self, tensor: torch.Tensor, format: FORMAT) -> None:
        raise FormatError("as_vtensor: a profile context has no data; use a reference or execute context")

    def graph(self) -> Graph:
        """What was recorded. Raises FlowDefinitionError unless ``o`` was written exactly once (indexer side)."""
        if self.side is Side.CACHE:
            return Graph(self.side, self.stores)
        if not self.selections:
            raise FlowDefinitionError(
                "forward_indexer: no selection: it must end in one op that writes 'o', such as topK or Reserved"
            )
        if len(self.selections) > 1:
            lines = "; ".join(str(n.where) for n in self.selections)
            raise FlowDefinitionError(
                f"forward_indexer: 'o' is written {len(self.selections)} times, expected once ({lines})"
            )
        return Graph(self.side, self.stores, self.selections[0], self.hints)

    def _tell(self, op: HintOp, node: Node) -> None:
        if op.hint in self.hints:
            raise FlowDefinitionError(f"{op.label}: 'o' is told twice, expected once ({self.hints[op.hint].where})")
        expected = (self.spec.group_size,) if not op.per_page else (1, self.spec.group_size)
        if node.shape[0] not in expected:
            sizes = " or ".join(map(str, dict.fromkeys(expected)))
            raise ShapeError(f"{op.label}: axis 1 of 'x' is {node.shape[0]}, expected {sizes}")
        if not op.per_page and node.format is not FORMAT.BATCHED:
            raise FormatError(f"{op.label}: 'x' is {node.format.name}, expected BATCHED: one entry per row")
        self.hints[op.hint] = node

    def _node_of(self, op: Op, x: vTensor) -> Node:
        field = x.name
        if field in self.stores and self.side is Side.INDEXER:
            return self._stored(field, FORMAT.RAGGED)
        if self.side is Side.CACHE and field and field not in GIVEN:
            if field not in self.stores:
                raise FlowDefinitionError(
                    f"{type(op).__name__}: field {field!r} is read before forward_cache wrote it: "
                    "a reused page still holds the last owner's bytes; compute it from "
                    + ("'latent'" if self.spec.is_mla else "'k' and 'v'")
                )
            return self._stored(field, FORMAT.PAGED)
        if x.node is None:
            raise FormatError(f"{type(op).__name__}: {x!r} holds data and can't be used in profile mode")
        return x.node

    def _stored(self, field: str, format: FORMAT) -> Node:
        """The value a field was given before, as the field holds it."""
        stored, declared = self.stores[field], self.fields[field]
        inputs = (stored, Node(LEAF, (), FORMAT.BATCHED, (1, 1), name=SCALES)) if declared.rounding else (stored,)
        return Node(Stored(declared.dtype, declared.rounding), inputs, format, stored.shape, where=user_line())

    def _store(self, op: Op, target: vTensor, node: Node) -> None:
        name = target.name
        if name in GIVEN:
            raise FlowDefinitionError(f"{type(op).__name__}: {name!r} is read-only: K and V are written by the pool")
        if not name:
            raise FormatError(f"{type(op).__name__}: 'out' is a computed value, expected a field such as cache['...']")
        if node.shape != target.shape:
            axis = 1 if node.shape[0] != target.shape[0] else 2
            raise ShapeError(
                f"{type(op).__name__}: axis {axis} of the result is {node.shape[axis - 1]}, expected "
                f"{target.shape[axis - 1]} to match field {name!r} {list(target.shape)}"
            )
        self.stores[name] = node


class CacheMapping(Mapping[str, vTensor]):
    """``cache``: field name to its vTensor."""

    def __init__(self, ctx: ContextBase, fields: Mapping[str, Field]) -> None:
        self._values = {
            f.name: vTensor(
                FORMAT.PAGED, f.shape, ctx, dtype=f.dtype, name=f.name,
                node=Node(LEAF, (), FORMAT.PAGED, f.shape, dtype=f.dtype, name=f.name, scaled=bool(f.rounding)),
            )
            for f in fields.values()
        }  # fmt: skip

    def __getitem__(self, name: str) -> vTensor:
        if name not in self._values:
            known = ", ".join(repr(n) for n in self._values)
            raise FlowDefinitionError(
                f"cache[{name!r}]: no such field, create_cache and the pool give {known}."
                f"{did_you_mean(str(name), self._values)} ({user_line()})"
            )
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Traced:
    """A flow profiled for a spec.

    Attributes:
        flow: the copy of the flow that was profiled.
        fields: the flow's fields by name, ``k`` and ``v`` not among them.
        cache: graph of ``forward_cache``.
        indexer: graph of ``forward_indexer``.
    """

    flow: vFlow
    fields: dict[str, Field]
    cache: Graph
    indexer: Graph


def given_fields(spec: Spec) -> dict[str, Field]:
    """The fields a flow is given: ``k`` ``[page_size, head_dim]`` and ``v`` ``[page_size, v_head_dim]``, or with MLA
    one ``latent`` ``[page_size, head_dim]``."""
    if spec.is_mla:
        return {"latent": Field("latent", (spec.page_size, spec.head_dim), spec.kv_dtype)}
    return {
        "k": Field("k", (spec.page_size, spec.head_dim), spec.kv_dtype),
        "v": Field("v", (spec.page_size, spec.dv), spec.kv_dtype),
    }


def declared_fields(flow: vFlow, spec: Spec) -> dict[str, Field]:
    """What ``create_cache`` declares. Raises FlowDefinitionError, FormatError, with the line of the declaration."""
    refused = getattr(flow, "create_request_cache", None)
    if callable(refused):
        error = FlowDefinitionError(
            f"{type(flow).__name__}.create_request_cache: request-slotted fields are not supported; keep per-request "
            "state in a field of create_cache, written by Save and reset by Fill"
        )
        raise located(error, method_line(refused))
    declared = flow.declare(spec)
    if not isinstance(declared, Mapping):
        error = FlowDefinitionError(
            f"create_cache returned {type(declared).__name__}, expected a dict name -> (r, c[, dtype])"
        )
        raise located(error, method_line(flow.create_cache))
    fields = {}
    for name, shape in declared.items():
        try:
            fields[name] = _declared_field(name, shape, spec)
        except FlowlibError as error:
            raise located(error, method_line(flow.create_cache, str(name))) from None
    return fields


def _declared_field(name: object, shape: object, spec: Spec) -> Field:
    if name in GIVEN:
        raise FlowDefinitionError(f"create_cache: field {name!r} is given by the pool, choose another name")
    if not isinstance(name, str) or not name.isidentifier():
        raise FlowDefinitionError(f"create_cache: field name {name!r} is no identifier")
    if not (isinstance(shape, (tuple, list)) and len(shape) in (2, 3) and all(_positive(n) for n in shape[:2])):
        raise FlowDefinitionError(
            f"create_cache: field {name!r} is {shape!r}, expected (r, c) or (r, c, dtype) with r and c at least 1"
        )
    own = len(shape) == 3
    dtype = check_field_dtype(name, shape[2]) if own else spec.field_dtype
    return Field(name, (shape[0], shape[1]), dtype, own_dtype=own)


def method_line(method: Callable[..., object], field: str = "") -> SourceLine | None:
    """The line of a flow's method that names `field`, else its first one; ``None`` if it has no source of its own."""
    method = inspect.unwrap(method)
    try:
        path, (lines, first) = inspect.getsourcefile(method), inspect.getsourcelines(method)
    except (OSError, TypeError):
        return None
    if path is None or method.__module__ == "flowlib.core.flow":
        return None
    named = (i for i, line in enumerate(lines) if field and (f'"{field}"' in line or f"'{field}'" in line))
    defined = (i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    return SourceLine(path, first + next(named, next(defined, 0)))


def trace(flow: vFlow, spec: Spec) -> Traced:
    """Profiles a copy of `flow` for `spec`; no data, no device."""
    flow = copy.deepcopy(flow)
    for name, value in list(vars(flow).items()):
        if isinstance(value, Op):
            setattr(flow, name, value.bound(spec))
    traced = _traced(flow, spec, declared_fields(flow, spec))
    fields = _with_summary_dtype(traced, spec)
    return traced if fields == traced.fields else _traced(flow, spec, fields)


def _traced(flow: vFlow, spec: Spec, fields: dict[str, Field]) -> Traced:
    everything = {**given_fields(spec), **fields}
    ctx = ProfileContext(spec, Side.CACHE, everything)
    loc = torch.empty(0, dtype=torch.int64)
    flow.forward_cache(CacheMapping(ctx, everything), loc, ctx)
    cache = ctx.graph()

    indexer = _trace_indexer(flow, spec, everything, frozenset())
    state = {name for name in fields if name in indexer.stores}
    fields = {n: replace(f, kind="state") if n in state else f for n, f in fields.items()}
    return Traced(flow, fields, cache, indexer)


def _with_summary_dtype(traced: Traced, spec: Spec) -> dict[str, Field]:
    """The fields, the summaries among them that were declared without a dtype in the spec's ``summary_dtype``."""
    if spec.summary_dtype is None:
        return traced.fields
    scaled = roundings(traced.cache) if spec.summary_dtype is torch.float8_e4m3fn else {}
    return {
        name: f
        if f.own_dtype or f.kind == "state"
        else replace(f, dtype=spec.summary_dtype, rounding=scaled.get(name, ""))
        for name, f in traced.fields.items()
    }


def _trace_indexer(flow: vFlow, spec: Spec, everything: Mapping[str, Field], in_place: frozenset[int]) -> Graph:
    """The indexer's graph.

    A Softmax or Normalize whose result nobody uses is taken as flows of the language's first version mean it: for its
    effect on its argument. It is traced a second time so.
    """
    ctx = ProfileContext(spec, Side.INDEXER, everything)
    ctx.in_place = in_place
    q_leaf = Node(LEAF, (), FORMAT.BATCHED, (spec.group_size, spec.head_dim), dtype=spec.field_dtype, name="q")
    q = vTensor(FORMAT.BATCHED, q_leaf.shape, ctx, dtype=q_leaf.dtype, name="q", node=q_leaf)
    flow.forward_indexer(q, SelectionHandle(ctx), CacheMapping(ctx, everything), ctx)
    graph = ctx.graph()
    reached = {id(node) for node in graph.nodes()}
    unused = frozenset(i for i, node in enumerate(ctx.segment_calls) if id(node) not in reached) - in_place
    return _trace_indexer(flow, spec, everything, in_place | unused) if unused else graph


def _positive(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
