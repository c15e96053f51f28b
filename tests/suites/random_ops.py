"""Random uses of every tile op, and random small flows, as hypothesis strategies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

import flowlib
from flowlib import ops
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Op, SegmentOp, SelectOp, SourceOp, TileOp

Inner = tuple[int, int]
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 24])
SMALL = st.floats(-2.0, 2.0, width=32)
WHERE = {"WhereEqual", "WhereGreater", "WhereGreaterEqual", "WhereLess", "WhereLessEqual", "WhereNotEqual"}
POSITIVE = {"Log", "Sqrt", "Divide"}
"""Ops whose inputs are drawn positive, and whose coefficients stay positive."""
SHARED = {"GeMM": ("K",), "GeMV": ("K", "vector")}


def tile_names() -> list[str]:
    """Indexer-side names of the exported tile ops that compute something from their inputs."""
    exported = set(ops.__all__)
    names = [n for n in ops.__all__ if not (n.startswith("C") and n[1:] in exported)]
    return [n for n in names if _is_tile(getattr(ops, n))]


def _is_tile(op_type: type[Op]) -> bool:
    return (
        issubclass(op_type, TileOp) and not issubclass(op_type, (SourceOp, SegmentOp, SelectOp)) and not op_type.saves
    )


@dataclass(frozen=True)
class Use:
    """An op with sizes it takes.

    Attributes:
        op: the op.
        shapes: inner sizes of its inputs.
        domain: "real" or "positive" inputs.
    """

    op: Op
    shapes: tuple[Inner, ...]
    domain: str = "real"


@st.composite
def uses(draw: st.DrawFn, name: str) -> Use:
    """An exported tile op with random options and sizes."""
    op_type = getattr(ops, name)
    r, c = draw(SIZES), draw(SIZES)
    if name == "Reshape":
        total = r * c
        r2 = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        return Use(op_type(-1, r2, total // r2), ((r, c),))
    if name.endswith("Interleave"):
        dim, k = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 3, 4)))
        return Use(op_type(dim=dim, k=k), ((r * k, c) if dim == 1 else (r, c * k),))
    if name == "MaskSlice":
        dim = draw(st.sampled_from((1, 2)))
        start, end = sorted((draw(st.integers(0, (r, c)[dim - 1])), draw(st.integers(0, (r, c)[dim - 1]))))
        return Use(op_type(start, end, dim, draw(SMALL), draw(SMALL)), ((r, c),))
    if name == "Kron":
        dim = draw(st.sampled_from(((1, 2), 1, 2)))
        sizes = st.sampled_from((1, 2, 3, 5))
        shared = draw(sizes)
        x, y = ([draw(sizes) if i + 1 in _dims(dim) else shared for i in (0, 1)] for _ in range(2))
        return Use(op_type(dim), ((x[0], x[1]), (y[0], y[1])))
    if name in SHARED:
        rows = (1, 1) if name == "GeMV" else (r, draw(SIZES))
        return Use(op_type(), ((rows[0], c), (rows[1], c)))
    domain = "positive" if name in POSITIVE else "real"
    op = draw(_made(op_type, name in POSITIVE))
    if len(op.names) == 1:
        return Use(op, ((r, c),), domain)
    x, y = draw(_broadcastable(r, c)), draw(_broadcastable(r, c))
    return Use(op, (x, y), domain)


def _dims(dim: object) -> tuple[int, ...]:
    return dim if isinstance(dim, tuple) else (dim,)  # type: ignore[return-value]


@st.composite
def _made(draw: st.DrawFn, op_type: type[Op], positive: bool) -> Op:
    parameters = set() if op_type.__init__ is object.__init__ else set(op_type.__init__.__code__.co_varnames)
    coefficient = st.floats(0.125, 2.0, width=32) if positive else SMALL
    if {"lo", "hi"} <= parameters:
        return op_type(*sorted((draw(SMALL), draw(SMALL))))
    if "dim" in parameters:
        return op_type(dim=draw(st.sampled_from((1, 2))))
    if "beta" in parameters:
        return op_type(alpha=draw(coefficient), beta=draw(coefficient))
    return op_type()


def _broadcastable(r: int, c: int) -> st.SearchStrategy[Inner]:
    return st.tuples(st.sampled_from((r, 1)), st.sampled_from((c, 1)))


# -- flows

UNARY = [ops.Abs(), ops.Sigmoid(), ops.Silu(), ops.Relu(0.0, 0.25), ops.Add_Mul(0.5, -1.0), ops.Clamp(-1.5, 2.0)]
BINARY = [ops.Multiply(), ops.Add(0.5, -1.0), ops.Maximum(), ops.Minimum(), ops.GeMM()]
REDUCTIONS = [ops.Mean, ops.Max, ops.Min, ops.L2Norm]
SEGMENTS = [ops.Softmax(scale=0.5), ops.Max(dim=0), ops.Mean(dim=0), ops.Conv1d([0.25, 0.5, 0.25])]
LARGEST = 2048
"""Elements of one entry, at most."""


@dataclass(frozen=True)
class Program:
    """A straight program: each step is an op and the earlier values it takes; the last is ``[S, 1, 1]``."""

    steps: tuple[tuple[Op, tuple[int, ...]], ...]
    finish: str = "topK"

    def __repr__(self) -> str:
        shown = "; ".join(f"v{i + len(LEAVES)} = {op}{args}" for i, (op, args) in enumerate(self.steps))
        return f"Program({shown}; {self.finish})"

    def run(self, leaves: list[object], ctx: object) -> object:
        """The last value, op by op."""
        values = list(leaves)
        for op, args in self.steps:
            values.append(op(*(values[i] for i in args), ctx=ctx))
        return values[-1]


LEAVES = ("q", "mean", "high", "halves")


class RandomFlow(flowlib.vFlow):
    """A flow around a program. Its fields: mean and maximum of a page's keys, and means of its halves."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def create_cache(self, page_size, head_dim):
        return {"mean": (1, head_dim), "high": (1, head_dim), "halves": (2, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        ops.CMean(dim=1)(cache["k"], cache["mean"], loc=loc, ctx=ctx)
        ops.CMax(dim=1)(cache["k"], cache["high"], loc=loc, ctx=ctx)
        ops.CMeanInterleave(dim=1, k=4)(cache["k"], cache["halves"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        scores = self.program.run([q, *(cache[name] for name in LEAVES[1:])], ctx)
        kept = ops.Sum(dim=2)(ops.Maximum()(cache["mean"], cache["high"], ctx=ctx), ctx=ctx)
        halves = ops.Max(dim=1)(ops.Sum(dim=2)(cache["halves"], ctx=ctx), ctx=ctx)
        tiny = ops.Add(alpha=2.0**-20, beta=2.0**-20)(kept, halves, ctx=ctx)  # every field is read
        finish(self.program.finish, ops.Add()(scores, tiny, ctx=ctx), o, ctx)


def finish(name: str, scores: flowlib.vTensor, o: flowlib.SelectionHandle, ctx: flowlib.ContextBase) -> None:
    """Ends a flow in one of the selecting ops."""
    if name == "topP":
        ops.topP(0.7)(scores, o, ctx=ctx)
    elif name == "Threshold":
        ops.Threshold(max_k=3)(scores, ops.Mean(dim=0)(scores, ctx=ctx), o, ctx=ctx)
    elif name == "Union":
        low = ops.Add_Mul(beta=-1.0)(scores, ctx=ctx)
        ops.Union()(ops.TopK(2)(scores, ctx=ctx), ops.TopK(1)(low, ctx=ctx), o, ctx=ctx)
    elif name == "TopK":
        ops.TopK(3)(scores, o, ctx=ctx)
    else:
        getattr(ops, name)()(scores, o, ctx=ctx)


@dataclass
class _Builder:
    """Values so far: inner sizes and whether there is one per page."""

    shapes: list[tuple[Inner, bool]]
    steps: list[tuple[Op, tuple[int, ...]]] = field(default_factory=list)

    def add(self, op: Op, *args: int) -> int:
        shape = op.infer(*(self.shapes[i][0] for i in args))
        per_row = isinstance(op, SegmentOp) and op.result_format([FORMAT.RAGGED], Side.INDEXER) is FORMAT.BATCHED
        self.shapes.append((shape, any(self.shapes[i][1] for i in args) and not per_row))
        self.steps.append((op, args))
        return len(self.shapes) - 1


@st.composite
def programs(draw: st.DrawFn, group: int, head_dim: int, finishes: tuple[str, ...] = ("topK",)) -> Program:
    """Two to six random steps, then what it takes to get ``[S, 1, 1]``."""
    build = _Builder([((group, head_dim), False), ((1, head_dim), True), ((1, head_dim), True), ((2, head_dim), True)])
    for _ in range(draw(st.integers(2, 6))):
        op, args = draw(_steps(build))
        build.add(op, *args)
    last = len(build.shapes) - 1
    if not build.shapes[last][1]:  # one per row: make it one per page
        last = build.add(ops.Mean(dim=2), last)
        last = build.add(ops.Multiply(), last, 1)
    shape = build.shapes[last][0]
    if shape[0] > 1:
        last = build.add(draw(st.sampled_from(REDUCTIONS[:3]))(dim=1), last)
    if shape[1] > 1:
        build.add(draw(st.sampled_from(REDUCTIONS[:3]))(dim=2), last)
    return Program(tuple(build.steps), draw(st.sampled_from(finishes)))


@st.composite
def _steps(draw: st.DrawFn, build: _Builder) -> tuple[Op, tuple[int, ...]]:
    """A step that fits the values so far; a value of the last steps is preferred, so that programs get deep."""
    count = len(build.shapes)
    x = draw(st.integers(0, count - 1) | st.just(count - 1))
    choices: list[tuple[Op, tuple[int, ...]]] = [(op, (x,)) for op in UNARY]
    choices += [(reduction(dim=dim), (x,)) for reduction in REDUCTIONS for dim in (1, 2)]
    choices += [(ops.Transpose(), (x,)), (ops.MaskSlice(0, 1, 2, 0.5, 1.0), (x,))]
    if build.shapes[x][1]:
        choices += [(op, (x,)) for op in SEGMENTS]
    pairs = [(op, (x, y)) for op in BINARY for y in range(count) if _fits(op, build.shapes[x][0], build.shapes[y][0])]
    return draw(st.sampled_from(choices) | st.sampled_from(pairs) if pairs else st.sampled_from(choices))


def _fits(op: Op, x: Inner, y: Inner) -> bool:
    try:
        r, c = op.infer(x, y)
    except flowlib.errors.ShapeError:
        return False
    return r * c <= LARGEST


def dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from((torch.float32, torch.bfloat16))
