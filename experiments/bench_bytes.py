"""Bytes that one layer of a decode step must move through device memory, counted from a plan.

Each input is read once, each output written once; scores and page lists, which cross from one kernel to the next, are
written once and read once. What an implementation reads or writes besides (partial results, a page table once per kv
head) is not counted: the count is what any implementation with these stages would move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import flowlib
from flowlib.core.formats import FORMAT
from flowlib.core.graph import Graph
from flowlib.core.trace import given_fields

INT32 = 4
FP32 = 4


@dataclass(frozen=True)
class Moved:
    """Bytes of one layer by stage; `plan` is the layer's share of what is planned once a step."""

    update: float
    plan: float
    score: float
    select: float
    attend: float

    @property
    def total(self) -> float:
        """Bytes of the layer."""
        return self.update + self.plan + self.score + self.select + self.attend

    def floor_us(self, read_bytes_per_second: float) -> float:
        """The time a layer takes at least, in microseconds, if all bytes went at the read bandwidth."""
        return 1e6 * self.total / read_bytes_per_second


def count_bytes(
    plan: flowlib.Plan,
    lengths: Sequence[int],
    attended: Sequence[Sequence[int]] | None = None,
    *,
    layers: int = 32,
    score_all: bool = False,
) -> Moved:
    """Bytes of one layer of a step of requests of some lengths; each finishes a page in one of page_size steps.

    Args:
        plan: the flow and spec.
        lengths: tokens of each request.
        attended: pages attended by request and page list, where the budget does not tell; see :func:`attended_pages`.
        layers: layers that share the planning.
        score_all: count scores of rows too whose pages all fit in the budget, which need none.
    """
    spec = plan.spec
    lists = attended if attended is not None else [[attended_pages(plan, n)] * _lists(plan) for n in lengths]
    pages = [-(-n // spec.page_size) for n in lengths]
    scored = [max(0, s - spec.bos - spec.eos) for s in pages]
    if not score_all:
        needed = [_needs_scores(plan, n) for n in lengths]
        scored = [n if need else 0 for n, need in zip(scored, needed, strict=True)]
    heads, lanes = spec.num_kv_heads, plan.lanes
    written = sum(1 for n in lengths if n) / spec.page_size
    per_page = _entry_bytes(plan, plan.program.traced.indexer)
    score_bytes = FP32 * lanes if plan.program.selection.scores is not None else 0
    chosen = sum(sum(row) for row in lists)
    return Moved(
        update=written * heads * _entry_bytes(plan, plan.program.traced.cache),
        plan=sum(pages) * 2 * INT32 / layers,
        score=sum(scored) * (heads * (per_page + score_bytes) + (INT32 if per_page else 0)),
        select=sum(scored) * heads * score_bytes + chosen * INT32,
        attend=_attend_bytes(plan, lengths, lists) + chosen * INT32,
    )


def dense_bytes(spec: flowlib.Spec, lengths: Sequence[int]) -> int:
    """Bytes of exact attention over whole rows: K, V, q, o and the page table."""
    pages = sum(-(-n // spec.page_size) for n in lengths)
    tokens = sum(lengths) * spec.num_kv_heads * token_bytes(spec)
    rows = len(lengths) * spec.num_heads * (spec.head_dim + spec.dv) * spec.field_dtype.itemsize
    return tokens + rows + pages * INT32


def token_bytes(spec: flowlib.Spec) -> int:
    """Bytes of one token of one kv head: K and V, or with MLA its latent, which is both."""
    return (spec.head_dim + (0 if spec.is_mla else spec.dv)) * spec.kv_dtype.itemsize


def attended_pages(plan: flowlib.Plan, length: int) -> int:
    """Pages in a list of a request of `length` tokens, if every scored page is eligible."""
    spec = plan.spec
    pages = -(-length // spec.page_size)
    if length <= spec.dense_below:
        return pages
    return min(pages, plan.program.selection.op.budget(spec, pages) + spec.bos + spec.eos)


def _needs_scores(plan: flowlib.Plan, length: int) -> bool:
    return bool(plan.state_fields) or attended_pages(plan, length) < -(-length // plan.spec.page_size)


def _lists(plan: flowlib.Plan) -> int:
    return plan.spec.num_kv_heads * plan.lanes


def _entry_bytes(plan: flowlib.Plan, graph: Graph) -> int:
    """Bytes read and written per (page, kv head): every field, K and V that the graph reads, every field it stores."""
    known = given_fields(plan.spec) | plan.fields
    read = {node.name for node in graph.leaves() if node.format is FORMAT.PAGED}
    return sum(known[name].nbytes for name in read) + sum(known[name].nbytes for name in graph.stores)


def _attend_bytes(plan: flowlib.Plan, lengths: Sequence[int], lists: Sequence[Sequence[int]]) -> int:
    """K and V of the attended tokens, q, o and lse. The last page, which may be short, is in every list."""
    spec = plan.spec
    per_token = token_bytes(spec)
    total = 0
    for length, row in zip(lengths, lists, strict=True):
        missing = -length % spec.page_size
        total += sum(max(0, n * spec.page_size - missing) for n in row) * per_token
    per_head = (spec.head_dim + spec.dv) * spec.field_dtype.itemsize + FP32
    return total + len(lengths) * spec.num_heads * per_head
