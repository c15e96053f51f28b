"""What every op is checked with: sizes, and its formula written a second time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flowlib import FORMAT, ops
from flowlib.core.op import Op


@dataclass(frozen=True)
class Case:
    """One way to use an op.

    Attributes:
        formula: the op on tensors ``[.., r, c]``, right in any floating dtype; not the op's own code.
        shapes: inner sizes of the inputs.
        options: arguments of the op.
        terms: roundings in a row, for the tolerance.
        domain: of the inputs: "real", "positive", or "integers" (small ones, so that ties occur).
        formats: formats tried, where not every one is.
    """

    formula: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, int], ...]
    options: tuple[tuple[str, object], ...] = ()
    terms: int = 2
    domain: str = "real"
    formats: tuple[tuple[FORMAT, ...], ...] = ()

    def make(self, name: str) -> Op:
        """The op under one of its names."""
        return getattr(ops, name)(**dict(self.options))

    def __str__(self) -> str:
        sizes = ",".join("x".join(map(str, shape)) for shape in self.shapes)
        return "-".join([sizes, *(f"{k}={v}" for k, v in self.options)])


def reduction(formula: Callable[[torch.Tensor, int], torch.Tensor], per_term: int = 1) -> list[Case]:
    """Cases of a reduction over axis 1 and 2, given the formula over one axis, which it keeps."""
    cases = [(1, (5, 7)), (1, (16, 80)), (2, (3, 33)), (2, (1, 96))]
    return [
        Case(lambda x, d=dim: formula(x, d - 3), (shape,), (("dim", dim),), terms=per_term * shape[dim - 1] + 2)
        for dim, shape in cases
    ]


def unary(formula: Callable[..., torch.Tensor], *options: dict[str, object], domain: str = "real") -> list[Case]:
    """Cases of an elementwise op of one input."""
    return [
        Case(lambda x, o=option: formula(x, **o), (shape,), tuple(option.items()), terms=6, domain=domain)
        for option in options or ({},)
        for shape in ((3, 33), (1, 1))
    ]


def compared(holds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Case]:
    """Cases of 0 where a comparison holds and -inf elsewhere."""
    return binary(lambda x, y: torch.where(holds(x, y), 0.0, -math.inf).to(x.dtype), domain="integers")


def grouped(formula: Callable[[torch.Tensor], torch.Tensor]) -> list[Case]:
    """Cases of a reduction of each k consecutive elements, given the formula over the last axis."""
    cases = [(1, 2, (8, 16)), (1, 3, (9, 5)), (2, 4, (2, 64)), (2, 5, (3, 20)), (1, 1, (3, 3))]
    return [
        Case(
            lambda x, d=dim, k=k: formula(x.unflatten(d - 3, (-1, k)).movedim(d - 3, -1)),
            (shape,), (("dim", dim), ("k", k)), terms=k + 2,
        )
        for dim, k, shape in cases
    ]  # fmt: skip


def moved(formula: Callable[..., torch.Tensor], *cases: tuple[tuple[int, int], dict[str, object]]) -> list[Case]:
    """Cases of an op of one input, given (inner sizes, options)."""
    return [Case(lambda x, o=o: formula(x, **o), (shape,), tuple(o.items())) for shape, o in cases]


def binary(formula: Callable[..., torch.Tensor], *options: dict[str, object], domain: str = "real") -> list[Case]:
    """Cases of an elementwise op of two inputs that broadcasts."""
    shapes = [((3, 7), (3, 7)), ((1, 33), (5, 33)), ((3, 1), (1, 24)), ((3, 5), (1, 1))]
    return [
        Case(lambda x, y, o=option: formula(x, y, **o), shape, tuple(option.items()), terms=4, domain=domain)
        for option in options or ({},)
        for shape in shapes
    ]


def kron(x: torch.Tensor, y: torch.Tensor, dim: object) -> torch.Tensor:
    """Element by element: out[i, j] = x[i // ry, j // cy] · y[i % ry, j % cy] along the axes in `dim`."""
    along = dim if isinstance(dim, tuple) else (dim,)
    sizes = [x.shape[a] * y.shape[a] if a + 3 in along else max(x.shape[a], y.shape[a]) for a in (-2, -1)]

    def index(axis: int, i: int) -> tuple[int, int]:
        if axis + 3 in along:
            return divmod(i, y.shape[axis])
        return min(i, x.shape[axis] - 1), min(i, y.shape[axis] - 1)

    rows = []
    for i in range(sizes[0]):
        (xi, yi), row = index(-2, i), []
        for j in range(sizes[1]):
            xj, yj = index(-1, j)
            row.append(x[..., xi, xj] * y[..., yi, yj])
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...nk,...mk->...mn", x, y)


CASES: dict[str, list[Case]] = {
    "Multiply": binary(lambda x, y: x * y),
    "Maximum": binary(lambda x, y: torch.where(x > y, x, y)),
    "Minimum": binary(lambda x, y: torch.where(x < y, x, y)),
    "Add": binary(lambda x, y, alpha=1.0, beta=1.0: alpha * x + beta * y, {}, {"alpha": 0.5, "beta": -3.0}),
    "Sum": reduction(lambda x, d: x.cumsum(d).select(d, -1).unsqueeze(d)),
    "Mean": reduction(lambda x, d: x.mean(d, keepdim=True)),
    "Max": reduction(lambda x, d: x.max(d, keepdim=True).values),
    "Min": reduction(lambda x, d: x.min(d, keepdim=True).values),
    "L2Norm": reduction(lambda x, d: torch.linalg.vector_norm(x, dim=d, keepdim=True), per_term=2),
    "GeMM": [
        Case(product, ((nx, k), (ny, k)), terms=k + 2)
        for nx, ny, k in [(3, 5, 24), (1, 1, 96), (4, 1, 64), (7, 3, 80), (1, 16, 33), (9, 1, 128)]
    ],
    "Divide": binary(lambda x, y: x / y, domain="positive"),
    "WhereEqual": compared(torch.eq),
    "WhereNotEqual": compared(torch.ne),
    "WhereGreater": compared(torch.gt),
    "WhereGreaterEqual": compared(torch.ge),
    "WhereLess": compared(torch.lt),
    "WhereLessEqual": compared(torch.le),
    "Std": reduction(lambda x, d: x.std(d, correction=0, keepdim=True), per_term=3),
    "MeanInterleave": grouped(lambda x: x.mean(-1)),
    "MaxInterleave": grouped(lambda x: x.max(-1).values),
    "MinInterleave": grouped(lambda x: x.min(-1).values),
    "Add_Mul": unary(lambda x, alpha=0.0, beta=1.0: x * beta + alpha, {}, {"alpha": 0.5, "beta": -2.0}),
    "Abs": unary(lambda x, alpha=0.0, beta=1.0: (x * beta + alpha).abs(), {}, {"alpha": 0.5, "beta": -2.0}),
    "Exp": unary(lambda x, alpha=0.0, beta=1.0: torch.exp(x * beta + alpha), {}, {"alpha": 0.5, "beta": -2.0}),
    "Log": unary(lambda x, alpha=0.0, beta=1.0: torch.log(x * beta + alpha), {}, {"alpha": 0.5, "beta": 2.0},
                 domain="positive"),
    "Scaled": unary(lambda x: x * 0.25),
    "Sqrt": unary(lambda x: x**0.5, domain="positive"),
    "Clamp": unary(lambda x, lo, hi: torch.clip(x, lo, hi), {"lo": -0.5, "hi": 0.75}),
    "Relu": unary(lambda x, alpha=0.0, beta=0.0: torch.where(x < alpha, beta * x, x), {}, {"alpha": 0.25, "beta": 0.5}),
    "Sigmoid": unary(lambda x, alpha=0.0, beta=-1.0: torch.sigmoid(-(beta * x + alpha)), {}, {"alpha": 0.5, "beta": 2}),
    "Silu": unary(
        lambda x, alpha=0.0, beta=-1.0: x * torch.sigmoid(-(beta * x + alpha)), {}, {"alpha": 0.5, "beta": 2}
    ),
    "Transpose": moved(lambda x: torch.einsum("...rc->...cr", x), ((3, 5), {}), ((1, 33), {}), ((4, 16), {})),
    "Reshape": moved(
        lambda x, first, r, c: torch.stack([x.flatten(-2)[..., i * c : (i + 1) * c] for i in range(r)], -2),
        ((3, 10), {"first": -1, "r": 5, "c": 6}), ((4, 16), {"first": -1, "r": 8, "c": 8}),
        ((1, 24), {"first": -1, "r": 24, "c": 1}),
    ),
    "MaskSlice": moved(
        lambda x, start, end, dim, alpha=1.0, beta=0.0: torch.tensor([
            [alpha if start <= (i, j)[dim - 1] < end else beta for j in range(x.shape[-1])] for i in range(x.shape[-2])
        ], dtype=x.dtype).expand_as(x),
        ((3, 33), {"start": 5, "end": 20, "dim": 2}), ((5, 7), {"start": 0, "end": 3, "dim": 1, "alpha": 2.5}),
        ((3, 4), {"start": 2, "end": 2, "dim": 2, "beta": -1.0}),
    ),
    "Kron": [
        Case(lambda x, y, d=dim: kron(x, y, d), shapes, (("dim", dim),))
        for dim, shapes in [((1, 2), ((2, 3), (3, 2))), (1, ((3, 5), (2, 5))), (2, ((1, 4), (3, 4)))]
    ],
    "Load": [Case(lambda x: x * 1.0, (shape,), formats=((FORMAT.PAGED,),)) for shape in ((3, 33), (1, 1))],
    "GeMV": [Case(product, ((1, k), (1, k)), terms=k + 2) for k in (1, 33, 128)],
}
"""Tile ops by their indexer-side name; a cache-side name has its base's cases."""

ALONE = {
    "Softmax", "Normalize", "L2Normalize", "Conv1d", "GaussianTau", "topK", "approxTopK", "TopK", "topP",
    "Threshold", "Union", "Reserved", "Fill", "CFill", "Save", "PagePosition", "QueryPosition", "AlibiSlopes",
    "GaussianFloor", "TailFloor", "ScoreBound", "TauEstimate",
}
"""Ops with tests of their own: they work across pages, or have no input, or write a field from the indexer."""


def base_of(name: str) -> str:
    """``CMax`` -> ``Max``; an indexer-side name itself."""
    base = name[1:]
    if name.startswith("C") and base in ops.__all__ and issubclass(getattr(ops, name), getattr(ops, base)):
        return base
    return name


def tile_names(cache: bool) -> list[str]:
    """Exported names of tile ops on one side."""
    return [n for n in ops.__all__ if base_of(n) in CASES and (base_of(n) != n) == cache and n not in ALONE]


def missing() -> list[str]:
    """Exported ops that no test knows."""
    return [n for n in ops.__all__ if base_of(n) not in CASES and n not in ALONE]
