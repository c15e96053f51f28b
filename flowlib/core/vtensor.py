"""vTensor: a rank-3 value ``[L, r, c]`` with a format that says what axis 0 means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from flowlib.core.errors import FormatError, ShapeError
from flowlib.core.formats import FORMAT
from flowlib.core.graph import Node

if TYPE_CHECKING:
    from flowlib.core.context import ContextBase
    from flowlib.core.op import Op

OpType = TypeVar("OpType", bound="type[Op]")
_SUGAR: dict[str, type[Op]] = {}


def sugar(method: str) -> Callable[[OpType], OpType]:
    """Class decorator of an op: makes it the meaning of ``vtensor.<method>(dim, keepdim=True)``."""

    def record(op_type: OpType) -> OpType:
        _SUGAR[method] = op_type
        return op_type

    return record


class vTensor:
    """A rank-3 value of the language.

    In profile mode it has a graph node and no data; in the other modes it has data and no node.

    Attributes:
        format: what axis 0 means.
        shape: ``(r, c)``, the sizes of one entry.
        dtype: storage dtype, or ``None`` for a computed value.
        ctx: the context it belongs to.
        name: the field's name, or ``""``.
    """

    __slots__ = ("ctx", "data", "dtype", "format", "name", "node", "shape")

    def __init__(
        self,
        format: FORMAT,
        shape: tuple[int, int],
        ctx: ContextBase,
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        node: Node | None = None,
        data: torch.Tensor | None = None,
    ) -> None:
        self.format = format
        self.shape = shape
        self.ctx = ctx
        self.dtype = dtype
        self.name = name
        self.node = node
        self.data = data

    def __repr__(self) -> str:
        return f"{self.name or 'vTensor'} [{self.format.value}, {self.shape[0]}, {self.shape[1]}]"

    def mean(self, dim: int, keepdim: bool = False) -> vTensor:
        """The Mean op over inner axis `dim` (1 or 2); ``keepdim`` must be true, vTensors always have rank 3."""
        if not keepdim:
            raise ShapeError(f"{self!r}.mean: keepdim must be True, vTensors always have rank 3")
        return _SUGAR["mean"](dim=dim)(self)  # type: ignore[call-arg]


class Selection(vTensor):
    """Scores ``[S, lanes, 1]`` that are -inf at the pages that are not selected.

    It unpacks into itself twice: flows of the language's later versions take a selection as two values.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Selection]:
        return iter((self, self))


class SelectionHandle:
    """``o`` in ``forward_indexer``: a write-only handle for the selection."""

    __slots__ = ("ctx", "lengths", "pages")

    def __init__(self, ctx: ContextBase) -> None:
        self.ctx = ctx
        self.pages: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None

    def __repr__(self) -> str:
        return "o"


def as_vtensor(tensor: torch.Tensor, format: FORMAT, ctx: ContextBase) -> vTensor:
    """A real tensor ``[L, r, c]`` as a vTensor of a reference or execute context.

    Raises:
        FormatError: `tensor` is no rank-3 tensor, `format` no FORMAT, or the context is a profile context.
    """
    if not isinstance(format, FORMAT):
        raise FormatError(f"as_vtensor: format is {format!r}, expected FORMAT.BATCHED, FORMAT.RAGGED or FORMAT.PAGED")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
        got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise FormatError(f"as_vtensor: 'tensor' is {got}, expected a tensor [L, r, c]")
    ctx.check_entries(tensor, format)
    return vTensor(format, (tensor.shape[1], tensor.shape[2]), ctx, dtype=tensor.dtype, data=tensor)
