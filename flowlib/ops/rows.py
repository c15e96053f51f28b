"""What a row is beside its pages, and what attention is told about it."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch

from flowlib.core.op import Block, Emitter, Inner, TileOp, literal
from flowlib.core.rows import HintOp, RowOp, Rows
from flowlib.core.spec import Spec


class QueryPosition(RowOp):
    """The position of the row's query token, its length less 1: ``[B, 1, 1]``."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def infer(self) -> Inner:
        return (1, 1)

    def row_values(self, rows: Rows) -> torch.Tensor:
        return rows.query_position[:, None, None]

    def emit(self, e: Emitter) -> Block:
        text = f"({e.row_length()} - 1).to(tl.float32) + tl.zeros([1, 1, 1], tl.float32)"
        return e.let(text, (1, 1))


class AlibiSlopes(RowOp):
    """The spec's ALiBi slope of each query head of the row, ``[B, G, 1]``; 0 where the spec has none."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def __init__(self) -> None:
        self.size = 1
        self.given = False

    def bound(self, spec: Spec) -> AlibiSlopes:
        resolved = copy.copy(self)
        resolved.size, resolved.given = spec.group_size, spec.alibi_slopes is not None
        return resolved

    def infer(self) -> Inner:
        return (self.size, 1)

    def row_values(self, rows: Rows) -> torch.Tensor:
        return rows.slopes[:, :, None]

    def emit(self, e: Emitter) -> Block:
        return e.of_heads("alibi_slopes") if self.given else e.constant(0.0, (self.size, 1))


class Scaled(TileOp):
    """x times the factor of q·k in attention, the spec's ``scale`` (head_dim ** -0.5 unless given)."""

    finite: ClassVar[bool] = True
    by_column: ClassVar[bool] = True

    def __init__(self) -> None:
        self.scale = 1.0

    def bound(self, spec: Spec) -> Scaled:
        resolved = copy.copy(self)
        resolved.scale = float(spec.softmax_scale)
        return resolved

    def infer(self, x: Inner) -> Inner:
        return x

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def emit(self, e: Emitter, x: Block) -> Block:
        return e.let(f"{e.fp32(x)} * {literal(self.scale)}", x.shape, x)


class ScoreBound(HintOp):
    """Tells attention that no score in a page exceeds x, ``[S, 1, 1]`` or ``[S, G, 1]``.

    A step with entmax then says for each query head whether its output is certainly that of the whole row: no page left
    out can hold a token above the threshold. A NaN certifies nothing.
    """

    hint: ClassVar[str] = "bound"


class TauEstimate(HintOp):
    """Gives attention an estimate x, BATCHED ``[B, G, 1]``, of entmax's threshold: see ``tau_mode`` of ``Entmax``."""

    hint: ClassVar[str] = "estimate"
    per_page: ClassVar[bool] = False
