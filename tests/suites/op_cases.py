"""What every op is checked with: sizes, and its formula written a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flowlib import ops
from flowlib.core.op import Op, SegmentOp, SelectOp


@dataclass(frozen=True)
class Case:
    """One way to use an op.

    Attributes:
        formula: the op on tensors ``[.., r, c]``, right in any floating dtype; not the op's own code.
        shapes: inner sizes of the inputs.
        options: arguments of the op.
        terms: roundings in a row, for the tolerance.
        domain: "real" or "positive" inputs.
    """

    formula: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, int], ...]
    options: tuple[tuple[str, object], ...] = ()
    terms: int = 2
    domain: str = "real"

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


def binary(formula: Callable[..., torch.Tensor], *options: dict[str, object], domain: str = "real") -> list[Case]:
    """Cases of an elementwise op of two inputs that broadcasts."""
    shapes = [((3, 7), (3, 7)), ((1, 33), (5, 33)), ((3, 1), (1, 24)), ((3, 5), (1, 1))]
    return [
        Case(lambda x, y, o=option: formula(x, y, **o), shape, tuple(option.items()), terms=4, domain=domain)
        for option in options or ({},)
        for shape in shapes
    ]


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
    "GeMV": [Case(product, ((1, k), (1, k)), terms=k + 2) for k in (1, 33, 128)],
}
"""Tile ops by their indexer-side name; a cache-side name has its base's cases."""

ALONE = {"Softmax", "topK", "Reserved"}
"""Ops with tests of their own: they work across pages."""


def base_of(name: str) -> str:
    """``CMax`` -> ``Max``; an indexer-side name itself."""
    base = name[1:]
    if name.startswith("C") and base in ops.__all__ and issubclass(getattr(ops, name), getattr(ops, base)):
        return base
    return name


def tile_names(cache: bool) -> list[str]:
    """Exported names of tile ops on one side."""
    return [n for n in ops.__all__ if base_of(n) in CASES and (base_of(n) != n) == cache]


def missing() -> list[str]:
    """Exported ops that no test knows."""
    return [n for n in ops.__all__ if base_of(n) not in CASES and n not in ALONE]


def is_across_pages(name: str) -> bool:
    """Whether an exported op works across the pages of a row."""
    return issubclass(getattr(ops, name), (SegmentOp, SelectOp))
