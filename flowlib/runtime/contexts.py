"""Contexts with data: a flow's methods run the plan, and an op called alone runs as a one-op plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowlib.compiler.emit import emit
from flowlib.compiler.load import load_function
from flowlib.compiler.program import Output, TileStage
from flowlib.core.context import ContextBase
from flowlib.core.errors import BatchError, FormatError, ShapeError
from flowlib.core.formats import FORMAT, Mode, Side
from flowlib.core.graph import Node
from flowlib.core.op import LEAF, Op, SegmentOp, SelectOp
from flowlib.core.vtensor import SelectionHandle, vTensor
from flowlib.runtime import reference
from flowlib.runtime.attention import rows_of
from flowlib.runtime.batch import Batch
from flowlib.runtime.plan import Plan
from flowlib.runtime.pool import KVStore, check_integers


class RunContext(ContextBase):
    """A reference or execute context.

    Args:
        plan: gives the spec, and what a flow's methods run.
        store: the pool.
        batch: page table and lengths (indexer side).
        impl: ``"reference"`` (mode REFERENCE) or ``"triton"`` (mode EXECUTE).
        dtype: compute dtype of the reference.
        side: the method that op calls belong to.
    """

    def __init__(
        self,
        plan: Plan,
        store: KVStore,
        batch: Batch | None = None,
        *,
        impl: str = "reference",
        dtype: torch.dtype = torch.float32,
        side: Side = Side.INDEXER,
    ) -> None:
        super().__init__(plan.spec, side)
        plan.check_impl(impl, store.device)
        if side is Side.INDEXER and batch is None:
            raise BatchError("RunContext: batch is missing; forward_indexer needs page table and lengths")
        self.mode = Mode.REFERENCE if impl == "reference" else Mode.EXECUTE  # type: ignore[misc]
        self.plan = plan
        self.store = store
        self._batch = batch
        self.impl = impl
        self.dtype = dtype

    @property
    def batch(self) -> Batch:
        """Page table and lengths. Raises BatchError on the cache side."""
        if self._batch is None:
            raise BatchError("this context has no batch; make it with RunContext(plan, store, batch)")
        return self._batch

    @property
    def rows(self) -> int:
        """Entries of a BATCHED vTensor: query tokens x kv heads."""
        return self.batch.size * self.spec.num_kv_heads

    def check_entries(self, tensor: torch.Tensor, format: FORMAT) -> None:
        if format is FORMAT.PAGED:
            wanted, what = self.store.num_pages * self.spec.num_kv_heads, "num_pages * num_kv_heads"
        elif format is FORMAT.BATCHED:
            wanted, what = self.rows, "rows * num_kv_heads"
        else:
            wanted, what = self.rows * self.batch.width, "rows * num_kv_heads * table width"
        if tensor.shape[0] != wanted:
            raise ShapeError(f"as_vtensor: axis 0 is {tensor.shape[0]}, expected {wanted} ({what}) for {format.name}")

    def run_cache(self, flow: object, cache: Mapping[str, Any], loc: Any) -> None:
        self._check_flow(flow)
        self.plan.update(self.store, loc, impl=self.impl)

    def run_indexer(self, flow: object, q: Any, o: SelectionHandle, cache: Mapping[str, Any]) -> None:
        self._check_flow(flow)
        queries = self._queries(_data(q) if isinstance(q, vTensor) else q)
        dtype = self.dtype if self.mode is Mode.REFERENCE else None
        done = self.plan.step(queries, self.store, self.batch, impl=self.impl, dtype=dtype)
        o.pages, o.lengths = done.pages, done.lengths

    def _queries(self, q: object) -> torch.Tensor:
        """q ``[rows * H_kv, G, D]``, as a flow gets it, or ``[rows, H_q, D]`` as the latter."""
        spec = self.spec
        entries, heads = [self.rows, spec.group_size, spec.head_dim], [self.batch.size, spec.num_heads, spec.head_dim]
        got = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        if not isinstance(q, torch.Tensor) or got not in (entries, heads):
            raise ShapeError(
                f"forward_indexer: 'q' is {got}, expected {entries} [rows * num_kv_heads, G, D] or "
                f"{heads} [rows, H_q, D]"
            )
        return q.reshape(heads)

    def apply(
        self,
        op: Op,
        inputs: tuple[vTensor, ...],
        target: vTensor | SelectionHandle | None,
        result: tuple[FORMAT, tuple[int, int]] | None,
        loc: object,
    ) -> vTensor | None:
        for label, x in zip(op.names, inputs, strict=True):
            if x.data is None:
                raise FormatError(f"{op.label}: '{label}' has no data; make it with as_vtensor")
        if isinstance(op, SelectOp) and isinstance(target, SelectionHandle):
            self._select(op, inputs, target)
            return None
        if result is None:
            raise FormatError(f"{op.label}: can't be called alone")
        if isinstance(op, SegmentOp):
            if op.reads_queries:
                raise FormatError(f"{op.label}: can't be called alone, it reads the queries of a step")
            return self._wrap(result, self._segment(op, inputs))
        node = self._one_op(op, inputs, result)
        if op.saves and isinstance(target, vTensor):
            return self._saved(inputs[0], target)
        if self.side is Side.CACHE:
            return self._written(op, node, inputs, target, loc)
        run = self._tile_reference if self.mode is Mode.REFERENCE else self._tile_execute
        return self._wrap(result, run(node, inputs))

    # -- one tile op over the pages of rows

    def _one_op(self, op: Op, inputs: tuple[vTensor, ...], result: tuple[FORMAT, tuple[int, int]]) -> Node:
        leaves = tuple(Node(LEAF, (), x.format, x.shape, dtype=x.dtype, name=f"x{i}") for i, x in enumerate(inputs))
        return Node(op, leaves, *result)

    def _tile_reference(self, node: Node, inputs: tuple[vTensor, ...]) -> torch.Tensor:
        values = {f"x{i}": self._rows_of(x).to(self.dtype) for i, x in enumerate(inputs)}
        about = rows_of(None, self.store, self.batch, self.spec, self.dtype)
        done = reference.evaluate(
            [node], lambda leaf: values[leaf.name], self._scored(), like=self._like(), rows=about
        )[id(node)]  # fmt: skip
        if node.format is FORMAT.RAGGED:
            done = done.expand(-1, self.batch.width, -1, -1)
        return done.expand(self.rows, -1, *node.shape).flatten(0, 1)

    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.store.device)

    def _rows_of(self, x: vTensor) -> torch.Tensor:
        """``[R, W or 1, r, c]`` of a vTensor of any format."""
        data = _data(x)
        if x.format is FORMAT.BATCHED:
            return data[:, None]
        if x.format is FORMAT.RAGGED:
            return data.view(self.rows, self.batch.width, *x.shape)
        owned = self._owned().repeat_interleave(self.spec.num_kv_heads, 0)
        table = self.batch.page_table.repeat_interleave(self.spec.num_kv_heads, 0)
        head = torch.arange(self.rows, device=data.device)[:, None] % self.spec.num_kv_heads
        return data[torch.where(owned, table, 0).to(torch.int64) * self.spec.num_kv_heads + head]

    def _owned(self) -> torch.Tensor:
        counts = reference.num_pages_of(self.batch, self.spec)
        return torch.arange(self.batch.width, device=self.batch.device) < counts[:, None]

    def _scored(self) -> torch.Tensor:
        counts = reference.num_pages_of(self.batch, self.spec)[:, None]
        logical = torch.arange(self.batch.width, device=self.batch.device)
        scored = (logical >= self.spec.bos) & (logical < counts - self.spec.eos)
        return scored.repeat_interleave(self.spec.num_kv_heads, 0)

    def _tile_execute(self, node: Node, inputs: tuple[vTensor, ...]) -> torch.Tensor:
        batched = node.format is FORMAT.BATCHED
        stage = TileStage("one_op", (Output(node, "y", "rows" if batched else "entries"),))
        entries = (self.rows,) if batched else (self.rows, self.batch.width)
        y = torch.full((*entries, *node.shape), float("nan"), device=self.store.device)
        tensors = {f"x{i}": self._strided(x) for i, x in enumerate(inputs)}
        tensors["y"] = y.view(self.batch.size, -1, node.shape[1]) if batched else y
        slopes = self._slopes()
        if slopes is not None:
            tensors["alibi_slopes"] = slopes
        self._kernel(stage).on_rows(tensors, self.batch)
        return y if batched else y.flatten(0, 1)

    def _slopes(self) -> torch.Tensor | None:
        slopes = self.spec.alibi_slopes
        return None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=self.store.device)

    def _strided(self, x: vTensor) -> torch.Tensor:
        data = _data(x).contiguous()
        if x.format is FORMAT.BATCHED:
            return data.view(self.batch.size, -1, x.shape[1])
        return data.view(self.rows, self.batch.width, *x.shape) if x.format is FORMAT.RAGGED else data

    def _kernel(self, stage: TileStage):  # noqa: ANN202  (a TileKernel; imported late, it needs Triton)
        from flowlib.runtime.execute import TileKernel

        return TileKernel(stage, emit([stage], self.spec, title="OneOp"), self.spec)

    # -- one op with a field as its output

    def _written(self, op: Op, node: Node, inputs: tuple[vTensor, ...], target: object, loc: object) -> vTensor:
        if not isinstance(loc, torch.Tensor):
            raise FormatError(f"{op.label}: loc is {type(loc).__name__}, expected int64 token slots [T]")
        limit = self.store.num_pages * self.spec.page_size
        check_integers(f"{op.label}: loc", loc, "T", limit, self.store.device, lowest=-1)
        if target is None:
            shape = (self.store.num_pages * self.spec.num_kv_heads, *node.shape)
            target = self._wrap((FORMAT.PAGED, node.shape), torch.full(shape, float("nan"), device=self.store.device))
        if not isinstance(target, vTensor) or target.shape != node.shape:
            raise ShapeError(f"{op.label}: 'out' is {target!r}, expected inner sizes {list(node.shape)}")
        if self.mode is Mode.REFERENCE:
            self._written_reference(node, inputs, _data(target), loc)
        else:
            stage = TileStage("one_op", (Output(node, "y", "field"),), on_write=True)
            tensors = {f"x{i}": _data(x).contiguous() for i, x in enumerate(inputs)}
            self._kernel(stage).on_written({**tensors, "y": _data(target)}, loc.contiguous())
        return target

    def _written_reference(self, node: Node, inputs: tuple[vTensor, ...], y: torch.Tensor, loc: torch.Tensor) -> None:
        size, heads = self.spec.page_size, self.spec.num_kv_heads
        pages = torch.div(loc[(loc % size == size - 1) & (loc >= 0)], size, rounding_mode="floor")
        values = {f"x{i}": _data(x).view(-1, heads, *x.shape)[pages].to(self.dtype) for i, x in enumerate(inputs)}
        done = reference.evaluate([node], lambda leaf: values[leaf.name], like=self._like())[id(node)]
        y.view(-1, heads, *node.shape)[pages] = done.expand(-1, -1, *node.shape).to(y.dtype)

    def _saved(self, x: vTensor, target: vTensor) -> vTensor:
        """Save called alone: the value goes into the field at the scored pages."""
        if x.shape != target.shape:
            raise ShapeError(f"Save: 'x' is {x!r}, expected inner sizes {list(target.shape)} of 'out'")
        if self.mode is Mode.EXECUTE:
            leaf = Node(LEAF, (), x.format, x.shape, dtype=x.dtype, name="x0")
            stage = TileStage("one_op", (Output(leaf, "y", "field"),))
            self._kernel(stage).on_rows({"x0": self._strided(x), "y": _data(target)}, self.batch)
            return target
        rows, logical = self._scored().nonzero(as_tuple=True)
        heads = self.spec.num_kv_heads
        pages = self.batch.page_table[rows // heads, logical].to(torch.int64)
        values = self._rows_of(x).expand(-1, self.batch.width, -1, -1)[rows, logical]
        _data(target)[pages * heads + rows % heads] = values.to(self.dtype).to(_data(target).dtype)
        return target

    # -- one segment op, one selection

    def _segment(self, op: SegmentOp, inputs: tuple[vTensor, ...]) -> torch.Tensor:
        x, rows = inputs[0], [self._rows_of(x) for x in inputs]
        if self.mode is Mode.REFERENCE:
            extra = {"rows": rows_of(None, self.store, self.batch, self.spec, self.dtype)} if op.reads_rows else {}
            return op.meaning(*(r.to(self.dtype) for r in rows), scored=self._scored(), **extra).flatten(0, 1)
        planes = [r.to(torch.float32).flatten(2).transpose(1, 2).contiguous() for r in rows]  # [R, r * c, W]
        per_row = op.result_format([x.format], self.side) is FORMAT.BATCHED
        shape = planes[0].shape
        y = planes[0].new_full(shape[:2] if per_row else shape, float("nan"))
        load_function(op.kernel)(
            *planes, y, self.batch.seq_lens, num_kv_heads=self.spec.num_kv_heads, page_size=self.spec.page_size,
            bos=self.spec.bos, eos=self.spec.eos, **op.options(),
            **({"alibi_slopes": self._slopes()} if op.reads_rows else {}),
        )  # fmt: skip
        if per_row:
            return y.view(self.rows, *x.shape)
        return y.transpose(1, 2).reshape(self.rows * self.batch.width, *x.shape)

    def _select(self, op: SelectOp, inputs: tuple[vTensor, ...], o: SelectionHandle) -> None:
        from flowlib.runtime.selection import select_alone

        scores = self._rows_of(inputs[0]).squeeze(-1).transpose(1, 2) if inputs else None
        o.pages, o.lengths = select_alone(op, scores, self._scored(), self.batch, self.spec, self.mode)

    def _wrap(self, result: tuple[FORMAT, tuple[int, int]], data: torch.Tensor) -> vTensor:
        return vTensor(result[0], result[1], self, dtype=data.dtype, data=data)

    def _check_flow(self, flow: object) -> None:
        if type(flow) is not type(self.plan.flow):
            raise FormatError(
                f"{type(flow).__name__}: this context runs the plan of {type(self.plan.flow).__name__}; "
                "make one with RunContext(profile(flow, spec), ...)"
            )


def _data(x: vTensor) -> torch.Tensor:
    if x.data is None:
        raise FormatError(f"{x!r} has no data; make it with as_vtensor")
    return x.data
