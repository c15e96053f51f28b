"""Ops that write the selection, and selections for Union."""

from __future__ import annotations

from typing import ClassVar

import torch

from flowlib.core.errors import FormatError, OptionError, ShapeError
from flowlib.core.op import Block, Emitter, Inner, SelectOp, TileOp, broadcast, number
from flowlib.core.vtensor import Selection, vTensor
from flowlib.ops.pages import KeepNucleus, KeepTop, best

UNBOUNDED = 1 << 30
"""A budget that no row exceeds."""


class topK(SelectOp):
    """The budget's best pages of scores ``[S, 1, 1]``, or ``[S, G, 1]`` for a selection per query head.

    Deterministic: ties go to the lower page; scores of -inf and NaN are never selected, not even to fill the budget;
    the selection is in ascending order.
    """

    def __init__(self) -> None:
        super().__init__(None)

    def infer(self, x: Inner, *others: Inner) -> Inner:
        if x[1] != 1:
            raise ShapeError(
                f"{type(self).__name__}: axis 2 of 'x' is {x[1]}, expected 1: scores are [S, 1, 1], or [S, G, 1] for a "
                "selection per query head; use Transpose, or swap the arguments of GeMM"
            )
        return x

    def meaning(self, x: torch.Tensor, scored: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        entries = x.transpose(1, 2)[..., None]  # [R, W, lanes, 1]
        return best(entries, scored, budget[:, None, None, None]).squeeze(-1).transpose(1, 2)


class _BestOf(topK):
    """topK with a budget of its own; what the ops below end in."""

    def __init__(self, k: int) -> None:
        SelectOp.__init__(self, k)


class approxTopK(topK):
    """topK; `tolerate_ratio` of wrong picks would be allowed, and the exact kernel makes none.

    Args:
        tolerate_ratio: at least 0.
    """

    def __init__(self, tolerate_ratio: float = 0.0) -> None:
        super().__init__()
        if not tolerate_ratio >= 0:
            raise OptionError(f"approxTopK: tolerate_ratio is {tolerate_ratio}, expected at least 0")
        self.tolerate_ratio = tolerate_ratio


class TopK(topK):
    """A selection of the `k` best pages, for :class:`Union`; or with ``o`` a topK with a budget of its own."""

    selection_value: ClassVar[bool] = True

    def __init__(self, k: int) -> None:
        SelectOp.__init__(self, _pages("TopK", "k", k))

    def lower(self, x: vTensor, *, direct: bool) -> tuple[SelectOp, vTensor]:
        return _limited(self.k, x, direct)


class topP(topK):
    """The fewest scored pages whose mass is at least `p`, best first, and at most `max_k` of them.

    Args:
        p: share of the mass, in (0, 1].
        max_k: most pages; ``None`` means no limit.
        input: ``"logits"`` (mass is softmax(scale · x) over the scored pages) or ``"mass"``.
        scale: factor of logits; ``None`` means the spec's attention scale.

    Source: Lin et al., Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning (arXiv:2502.02770).
    """

    selection_value: ClassVar[bool] = True

    def __init__(self, p: float, max_k: int | None = None, input: str = "logits", scale: float | None = 1.0) -> None:
        SelectOp.__init__(self, UNBOUNDED if max_k is None else _pages("topP", "max_k", max_k))
        if not 0.0 < number(self, "p", p) <= 1.0:
            raise OptionError(f"topP: p is {p}, expected a number above 0 and at most 1")
        if scale is not None and not number(self, "scale", scale) > 0:
            raise OptionError(f"topP: scale is {scale!r}, expected a positive number, or None for the spec's scale")
        if input not in ("logits", "mass"):
            raise OptionError(f"topP: input is {input!r}, expected 'logits' or 'mass'")
        self.p = float(p)
        self.input = input
        self.scale = scale

    def lower(self, x: vTensor, *, direct: bool) -> tuple[SelectOp, vTensor]:
        return _limited(self.k, KeepNucleus(self.p, self.input, self.scale)(x), direct)


class Threshold(topK):
    """Every scored page with x > tau, at most the best `max_k`; tau is BATCHED ``[B, 1, 1]`` or ``[B, G, 1]``.

    Args:
        max_k: most pages; ``None`` means no limit.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "tau")
    per_row: ClassVar[tuple[str, ...]] = ("tau",)
    selection_value: ClassVar[bool] = True

    def __init__(self, max_k: int | None = None) -> None:
        SelectOp.__init__(self, UNBOUNDED if max_k is None else _pages("Threshold", "max_k", max_k))

    def infer(self, x: Inner, tau: Inner) -> Inner:
        return broadcast(self, super().infer(x), super().infer(tau))

    def lower(self, x: vTensor, tau: vTensor, *, direct: bool) -> tuple[SelectOp, vTensor]:
        return _limited(self.k, KeepAbove()(x, tau), direct)


class Union(topK):
    """The pages of either of two selections."""

    names: ClassVar[tuple[str, ...]] = ("a", "b")

    def __init__(self) -> None:
        SelectOp.__init__(self, UNBOUNDED)

    def infer(self, a: Inner, b: Inner) -> Inner:
        return broadcast(self, super().infer(a), super().infer(b))

    def lower(self, a: vTensor, b: vTensor, *, direct: bool) -> tuple[SelectOp, vTensor]:
        for name, value in (("a", a), ("b", b)):
            if not isinstance(value, Selection):
                raise FormatError(
                    f"Union: '{name}' is {value!r}, expected a selection: TopK(k)(x), or topP or Threshold without 'o'"
                )
        return _BestOf(UNBOUNDED), KeepEither()(a, b)


class Reserved(SelectOp):
    """The reserved pages only: the first `bos` and the last `eos` of the row."""

    names: ClassVar[tuple[str, ...]] = ()
    scored: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__(None)

    def infer(self) -> Inner:
        return (1, 1)

    def meaning(self, x: torch.Tensor, scored: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scored)[:, None, :]


class KeepAbove(TileOp):
    """x where x > tau, else -inf."""

    names: ClassVar[tuple[str, ...]] = ("x", "tau")

    def infer(self, x: Inner, tau: Inner) -> Inner:
        return broadcast(self, x, tau)

    def meaning(self, x: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        return torch.where(x > tau, x, float("-inf"))

    def emit(self, e: Emitter, x: Block, tau: Block) -> Block:
        text = f'tl.where({e.fp32(x)} > {e.fp32(tau)}, {e.fp32(x)}, float("-inf"))'
        return e.let(text, broadcast(self, x.shape, tau.shape), x, tau)


class KeepEither(TileOp):
    """0 where a or b is above -inf, else -inf."""

    names: ClassVar[tuple[str, ...]] = ("a", "b")

    def infer(self, a: Inner, b: Inner) -> Inner:
        return broadcast(self, a, b)

    def meaning(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        chosen = (a > float("-inf")) | (b > float("-inf"))
        return torch.zeros(chosen.shape, dtype=a.dtype, device=a.device).masked_fill(~chosen, float("-inf"))

    def emit(self, e: Emitter, a: Block, b: Block) -> Block:
        text = f'tl.where(tl.maximum({e.fp32(a)}, {e.fp32(b)}) > float("-inf"), 0.0, float("-inf"))'
        return e.let(text, broadcast(self, a.shape, b.shape), a, b)


def _limited(k: int | None, scores: vTensor, direct: bool) -> tuple[SelectOp, vTensor]:
    """The best k of scores that are -inf where a page is out; a selection kept as a value is cut to k itself."""
    limit = UNBOUNDED if k is None else k
    return _BestOf(limit), scores if direct or limit == UNBOUNDED else KeepTop(limit)(scores)


def _pages(op: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{op}: {name} is {value!r}, expected a number of pages of at least 0")
    return value
