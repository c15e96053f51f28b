"""Reference mode: graphs interpreted op by op in torch, in any dtype up to float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flowlib.core import float8
from flowlib.core.attention import Entmax
from flowlib.core.errors import BackendError
from flowlib.core.formats import FORMAT
from flowlib.core.graph import Graph, Node, topological
from flowlib.core.op import SegmentOp, SelectOp, SourceOp, TileOp
from flowlib.core.rows import RowOp, Rows
from flowlib.core.spec import Spec
from flowlib.runtime.attention import Weighted, certified, entmax, listed, rows_of
from flowlib.runtime.batch import Batch
from flowlib.runtime.entmax import unestimated
from flowlib.runtime.pool import KVStore

if TYPE_CHECKING:
    from flowlib.runtime.plan import Plan

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Attended:
    """What one reference step computes; see :class:`flowlib.runtime.plan.StepOutput`."""

    o: torch.Tensor
    lse: torch.Tensor | None
    pages: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor | None
    tau: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    certified: torch.Tensor | None = None


def evaluate(
    outputs: Iterable[Node],
    leaf: Callable[[Node], torch.Tensor],
    scored: torch.Tensor | None = None,
    *,
    like: torch.Tensor,
    rows: Rows | None = None,
) -> dict[int, torch.Tensor]:
    """Values of all nodes that `outputs` reach, by ``id(node)``.

    Args:
        outputs: the nodes wanted; select ops are left to the caller.
        leaf: value of a leaf; leading axes of all leaves broadcast, the last two are the entry's.
        scored: bool ``[R, W]``, the pages segment ops see.
        like: gives dtype and device of constants.
        rows: what ops may know of the R rows beside their pages.
    """
    values: dict[int, torch.Tensor] = {}
    for node in topological(outputs):
        inputs = [values[id(x)] for x in node.inputs if id(x) in values]
        if node.name:
            values[id(node)] = leaf(node)
        elif isinstance(node.op, RowOp) and rows is not None:
            values[id(node)] = node.op.row_values(rows)[:, None]
        elif isinstance(node.op, SourceOp):
            values[id(node)] = node.op.values(0 if scored is None else scored.shape[1], like)
        elif isinstance(node.op, TileOp):
            values[id(node)] = node.op.meaning(*inputs)
        elif isinstance(node.op, SegmentOp) and scored is not None:
            extra = {"rows": rows} if node.op.reads_rows else {}
            values[id(node)] = node.op.meaning(*inputs, scored=scored, **extra)
        elif not isinstance(node.op, SelectOp):
            raise BackendError(f"{node} has no meaning here")
    return values


def update_fields(graph: Graph, store: KVStore, loc: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Runs ``forward_cache`` for the pages whose last slot is in `loc`; stores nothing before all is computed."""
    spec = store.plan.spec
    last = loc[(loc % spec.page_size == spec.page_size - 1) & (loc >= 0)]
    pages = torch.div(last, spec.page_size, rounding_mode="floor")
    if not graph.stores or pages.numel() == 0:
        return

    def leaf(node: Node) -> torch.Tensor:
        return store.scales_of(dtype) if node.name == float8.SCALES else _page_tokens(node.name, store, pages, dtype)

    values = evaluate(graph.stores.values(), leaf, like=torch.empty(0, dtype=dtype, device=store.device))
    for name, node in graph.stores.items():
        value = values[id(node)].expand(len(pages), spec.num_kv_heads, *node.shape)
        rounding = store.plan.fields[name].rounding
        store.fields[name][pages] = _coded(store, value, rounding) if rounding else value.to(store.fields[name].dtype)


def _coded(store: KVStore, value: torch.Tensor, rounding: str) -> torch.Tensor:
    """Codes of a float8 summary ``[n, H_kv, r, c]``; counts the bounds that are cut."""
    scales = store.scales_of(value.dtype)
    if store.saturated is not None:
        store.saturated += float8.broken(value, scales, rounding).sum()
    return float8.encode(value, scales, rounding)


def num_pages_of(batch: Batch, spec: Spec) -> torch.Tensor:
    """Pages of each row of the batch, int64 ``[rows]``."""
    return torch.div(batch.seq_lens.to(torch.int64) + spec.page_size - 1, spec.page_size, rounding_mode="floor")


def step(plan: Plan, q: torch.Tensor, store: KVStore, batch: Batch, dtype: torch.dtype) -> Attended:
    """One decode step: scores, selection, attention, all in `dtype`; state fields are saved at its end."""
    counts = num_pages_of(batch, plan.spec)
    rows = _Rows(plan, store, batch, q, dtype)
    chosen, scores, saved, hints = rows.select()
    pages, lengths = page_lists(chosen, counts, plan.spec, plan.max_selected)
    if isinstance(plan.attention, Entmax):
        done, certain = _attend_entmax(plan, plan.attention, q, store, batch, pages, rows, hints, dtype)
        attended = Attended(done.o, None, pages, lengths, scores, done.tau, done.mass, certain)
    else:
        o, lse = attend(q, store, batch, pages, plan.spec, dtype)
        attended = Attended(o, lse, pages, lengths, scores)
    rows.save(saved)
    return attended


class _Rows:
    """The indexer of one step, over all rows at once: values are ``[R, W or 1, r, c]``."""

    def __init__(self, plan: Plan, store: KVStore, batch: Batch, q: torch.Tensor, dtype: torch.dtype) -> None:
        self.plan, self.store, self.batch, self.q, self.dtype = plan, store, batch, q, dtype
        self.heads = plan.spec.num_kv_heads
        self.counts = num_pages_of(batch, plan.spec)
        self.width = max(1, int(self.counts.max())) if self.counts.numel() else 1
        logical = torch.arange(self.width, device=batch.device)
        owned = logical < self.counts[:, None]  # [bs, W]
        table = torch.nn.functional.pad(batch.page_table, (0, max(0, self.width - batch.width)))
        self.table = torch.where(owned, table[:, : self.width], 0).to(torch.int64)
        scored = (logical >= plan.spec.bos) & (logical < self.counts[:, None] - plan.spec.eos)
        self.scored = scored.repeat_interleave(self.heads, 0)  # [R, W]

    def select(self) -> tuple[torch.Tensor, torch.Tensor | None, Values, Values]:
        """The choice, bool ``[R, lanes, W]``, its scores ``[R, lanes, W]``, the values to save by field, the hints."""
        graph, spec = self.plan.program.traced.indexer, self.plan.spec
        selection = graph.selection
        if selection is None or not isinstance(selection.op, SelectOp):
            raise BackendError("the graph has no selection")
        like = torch.empty(0, dtype=self.dtype, device=self.batch.device)
        wanted = [*graph.stores.values(), *graph.hints.values(), *selection.inputs]
        about = rows_of(self.q, self.store, self.batch, spec, self.dtype)
        values = evaluate(wanted, self._leaf, self.scored, like=like, rows=about)
        scores = None
        if selection.inputs:
            entries = values[id(selection.inputs[0])].expand(len(self.scored), self.width, -1, -1)
            scores = entries.squeeze(-1).transpose(1, 2)
        budgets = torch.tensor([selection.op.budget(spec, n) for n in self.counts.tolist()], device=self.batch.device)
        budgets = budgets.to(torch.int64).repeat_interleave(self.heads)
        chosen = selection.op.meaning(scores, self.scored, budgets)  # type: ignore[arg-type]
        whole = self.plan.in_full(self.batch.seq_lens).repeat_interleave(self.heads)
        if scores is not None:
            scores = scores.masked_fill(whole[:, None, None], float("nan"))
        saved = {
            name: values[id(node)].expand(len(self.scored), self.width, *node.shape)
            for name, node in graph.stores.items()
        }
        hints = {name: values[id(node)].expand(len(self.scored), -1, -1, -1) for name, node in graph.hints.items()}
        return chosen | whole[:, None, None], scores, saved, hints

    def save(self, saved: dict[str, torch.Tensor]) -> None:
        """Writes state fields at the scored pages."""
        rows, logical = self.scored.nonzero(as_tuple=True)
        pages = self.table[rows // self.heads, logical]
        for name, values in saved.items():
            field = self.store.fields[name]
            field[pages, rows % self.heads] = values[rows, logical].to(field.dtype)

    def _leaf(self, node: Node) -> torch.Tensor:
        spec = self.plan.spec
        if node.format is FORMAT.BATCHED:
            return self.q.reshape(len(self.scored), 1, spec.group_size, spec.head_dim).to(self.dtype)
        entries = _page_tokens(node.name, self.store, self.table.flatten(), self.dtype)  # [bs * W, H, r, c]
        entries = entries.view(self.batch.size, self.width, self.heads, *node.shape)
        return entries.transpose(1, 2).flatten(0, 1)


def _attend_entmax(
    plan: Plan, attention: Entmax, q: torch.Tensor, store: KVStore, batch: Batch, pages: torch.Tensor, rows: _Rows,
    hints: Values, dtype: torch.dtype,
) -> tuple[Weighted, torch.Tensor | None]:  # fmt: skip
    """Attention over page lists, and the certificates where there is a bound."""
    estimate = hints["estimate"].reshape(batch.size, plan.spec.num_heads) if "estimate" in hints else None
    tokens = listed(q, store, batch, pages, plan.spec, dtype)
    done = entmax(tokens, plan.spec, attention, estimate, unestimated(plan, batch.seq_lens))
    if "bound" not in hints:
        return done, None
    bounds = hints["bound"].expand(-1, rows.width, -1, -1)
    return done, certified(bounds, rows.scored, pages, done, attention.alpha - 1.0, plan.spec.num_kv_heads)


def page_lists(
    chosen: torch.Tensor, pages_of_row: torch.Tensor, spec: Spec, max_selected: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending page lists from a choice ``[R, lanes, W]``, reserved pages added once.

    Returns:
        pages int32 ``[bs, H_kv * lanes, max_selected]`` padded with -1, and lengths int32 ``[bs, H_kv * lanes]``.
    """
    rows, lanes, width = chosen.shape
    logical = torch.arange(width, device=chosen.device)
    total = pages_of_row.repeat_interleave(spec.num_kv_heads)[:, None, None]
    listed = (chosen | (logical < spec.bos) | (logical >= total - spec.eos)) & (logical < total)
    lengths = listed.sum(-1)
    order = torch.where(listed, logical, width).sort(-1).values[..., :max_selected]
    pages = torch.full((rows, lanes, max_selected), -1, dtype=torch.int32, device=chosen.device)
    pages[..., : order.shape[-1]] = torch.where(order < width, order, -1).to(torch.int32)
    lists = spec.num_kv_heads * lanes
    return pages.view(-1, lists, max_selected), lengths.to(torch.int32).view(-1, lists)


def attend(
    q: torch.Tensor, store: KVStore, batch: Batch, pages: torch.Tensor, spec: Spec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of q ``[bs, H_q, D]`` over logical page lists ``[bs, H_kv or H_q, M]``.

    Returns:
        o ``[bs, H_q, Dv]`` and lse ``[bs, H_q]`` (natural log) in `dtype`; an empty row gives 0 and -inf.
    """
    scores, v = listed(q, store, batch, pages, spec, dtype)
    size, longest = scores.shape[0], scores.shape[3]
    lse = torch.logsumexp(scores, -1) if longest else scores.new_full(scores.shape[:-1], float("-inf"))
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return (weights @ v).view(size, spec.num_heads, spec.dv), lse.view(size, spec.num_heads)


def _page_tokens(name: str, store: KVStore, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Entries of a field, or K or V de-scaled, of some physical pages: ``[n, H_kv, r, c]`` in `dtype`."""
    spec = store.plan.spec
    if name in store.fields:
        entries = store.fields[name][pages].to(dtype)
        return entries * store.scales_of(dtype) if store.plan.fields[name].rounding else entries
    values, scale = (store.v, spec.v_scale) if name == "v" else (store.k, spec.k_scale)
    slots = pages[:, None] * spec.page_size + torch.arange(spec.page_size, device=pages.device)
    return values[slots].transpose(1, 2).to(dtype) * scale


def widened(scores: torch.Tensor | None, batch: Batch) -> torch.Tensor | None:
    """Scores of the pages that the longest row has, NaN for the other columns of the page table."""
    if scores is None:
        return None
    return torch.nn.functional.pad(scores, (0, batch.width - scores.shape[-1]), value=float("nan"))
