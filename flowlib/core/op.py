"""One op, one definition: signature, meaning, emission and padding identity side by side.

A *tile op* works inside one entry (axes 1 and 2) and knows nothing of paging: neighbours fuse into one kernel.
A *segment op* works across the scored pages of a row (axis 0) and ends a kernel.
A *select op* writes the selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from flowlib.core import float8
from flowlib.core.dispatch import dispatch
from flowlib.core.errors import FormatError, OptionError, ShapeError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.spec import Spec
from flowlib.core.vtensor import vTensor

Inner = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A value in an emitted kernel: a Triton block ``[pages or 1, r', c']`` with r', c' padded to powers of two.

    Attributes:
        name: the variable.
        shape: the true inner sizes ``(r, c)``.
        paged: whether axis 0 runs over pages (else it is 1).
        dtype: the storage dtype of a block just loaded, ``None`` once it is fp32.
        pad: what the padded lanes of axes 1 and 2 hold, if known.
        flat: the same block as ``[pages · r, c']`` where it was loaded so; else empty.
        unit: what the variable must be multiplied by, a power of two, where that is not 1; :meth:`Emitter.fp32` does,
            who takes the block :meth:`Emitter.raw` must.
        parts: how many bfloat16 values add up to each value of an fp32 block whose padded lanes hold 0, where it is
            finite and not below 2^-118; 0 where nobody knows.
    """

    name: str
    shape: Inner
    paged: bool
    dtype: torch.dtype | None = None
    pad: float | None = None
    flat: str = ""
    unit: str = ""
    parts: int = 0


class Emitter(Protocol):
    """What an op's emission may ask of the kernel writer."""

    def fp32(self, x: Block) -> str:
        """The block as an fp32 expression."""
        ...

    def raw(self, x: Block) -> str | None:
        """The block in its storage dtype with padded lanes 0, if it was just loaded, else ``None``; mind its unit."""
        ...

    def filled(self, x: Block, value: float, axis: int) -> str:
        """The block as an fp32 expression whose padded lanes along `axis` hold `value`."""
        ...

    def let(self, expression: str, shape: Inner, *inputs: Block) -> Block:
        """Assigns an fp32 expression to a new variable; it is paged if an input is."""
        ...

    def call(self, function: str, *arguments: str, results: int = 1) -> list[str]:
        """Calls the jitted function ``module:name`` and assigns its results to new variables."""
        ...

    def same(self, expression: str, x: Block) -> Block:
        """Assigns an elementwise expression of `x` that is exact in the dtype of `x`, keeps 0 where it is 0 and means
        the same in any unit."""
        ...

    def constant(self, value: float, shape: Inner) -> Block:
        """A block of one value."""
        ...

    def positions(self) -> Block:
        """The logical page numbers as fp32, ``[pages, 1, 1]``."""
        ...

    def row_length(self) -> str:
        """The tokens of the row, an int64 expression."""
        ...

    def of_heads(self, tensor: str) -> Block:
        """An fp32 tensor ``[H_q]`` of the step at the row's query heads, ``[1, G, 1]``."""
        ...

    def lanes(self, size: int, axis: int) -> str:
        """The index along inner `axis` of `size`, an int32 expression that broadcasts over the other axes."""
        ...

    def rearranged(self, x: Block, shape: Inner, row: str, column: str) -> Block:
        """The block ``[r, c]`` of `shape` whose entry (i, j) is x[row, column]; `row` and `column` are Python-like
        integer expressions of ``{i}`` and ``{j}``."""
        ...

    def padded(self, size: int) -> int:
        """The power of two that an inner axis of `size` is padded to."""
        ...

    def pages(self, x: Block) -> int:
        """Size of axis 0 of the block."""
        ...


class Op:
    """Base of all ops. An op instance holds parameters and may be used at several call sites."""

    names: ClassVar[tuple[str, ...]] = ("x",)
    """Names of the inputs, for messages; their number is the arity."""
    takes_output: ClassVar[bool] = False
    """Whether the call's last argument on the indexer side is ``o``."""
    across_pages: ClassVar[bool] = False
    """Whether it works along axis 0, the scored pages of a row."""
    per_row: ClassVar[tuple[str, ...]] = ()
    """Inputs of an op across pages that have one entry per row."""
    selection_value: ClassVar[bool] = False
    """Whether it may be called without ``o`` and then gives a selection for Union."""
    shaped_like_output: ClassVar[bool] = False
    """Whether its result has the inner sizes of its output."""
    finite: ClassVar[bool] = False
    """Whether finite inputs give finite results, short of overflow: no score of finite fields is -inf or NaN then."""
    by_column: ClassVar[bool] = False
    """Whether each column of its result depends on that column of its inputs alone; an op may say so by a property."""
    saves: ClassVar[bool] = False
    """Whether its output on the indexer side is a field."""

    def __call__(self, *args: object, out: vTensor | None = None, loc: object = None, ctx: object = None) -> Any:
        """Calls the op: ``op(x[, y], ctx=ctx)``, on the cache side ``op(x[, y], out, loc=loc, ctx=ctx)``."""
        return dispatch(self, args, out=out, loc=loc, ctx=ctx)

    def __str__(self) -> str:
        inner = ", ".join(f"{k}={v}" for k, v in self.parameters().items())
        return f"{self.label}({inner})"

    @property
    def label(self) -> str:
        """What messages call the op."""
        return type(self).__name__

    def parameters(self) -> dict[str, object]:
        """The parameters two equal ops share."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def bound(self, spec: Spec) -> Op:
        """This op with the parameters that depend on the spec resolved; itself if there are none."""
        return self

    def lower(self, *inputs: vTensor, direct: bool) -> tuple[Op, vTensor] | None:
        """See :meth:`SelectOp.lower`."""
        return None

    def infer(self, *shapes: Inner) -> Inner:
        """Inner sizes of the result. Raises ShapeError."""
        raise NotImplementedError(f"{type(self).__name__}.infer")

    def rounding(self, *inputs: str) -> str:
        """How a scaled float8 summary that holds its result is rounded, given the same of its inputs: ``"up"`` for what
        bounds from above, ``"down"`` for what bounds from below, else ``"nearest"``."""
        return "nearest"

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        """BATCHED if all inputs are, else RAGGED (indexer side) or PAGED (cache side)."""
        if side is Side.CACHE:
            return FORMAT.PAGED
        return FORMAT.BATCHED if all(f is FORMAT.BATCHED for f in formats) else FORMAT.RAGGED


class TileOp(Op):
    """Works inside one entry."""

    def meaning(self, *xs: torch.Tensor) -> torch.Tensor:
        """The op on tensors ``[..., r, c]`` whose leading axes broadcast; correct in float64."""
        raise NotImplementedError(f"{type(self).__name__}.meaning")

    def emit(self, e: Emitter, *xs: Block) -> Block:
        """Writes the op's Triton text."""
        raise NotImplementedError(f"{type(self).__name__}.emit")

    def between(self, *shapes: Inner) -> int:
        """Elements per entry of the largest block that the emission makes on its way, if larger than its result."""
        return 0


class SourceOp(TileOp):
    """A tile op without inputs.

    Its meaning depends on where it is used.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def values(self, width: int, like: torch.Tensor) -> torch.Tensor:
        """The op for rows of `width` pages: ``[1, width or 1, r, c]`` in the dtype and on the device of `like`."""
        raise NotImplementedError(f"{type(self).__name__}.values")


class SegmentOp(Op):
    """Works across the scored pages of a row; ends a kernel."""

    across_pages: ClassVar[bool] = True
    aliasable: ClassVar[bool] = True
    """Whether the launch function may write its result over its input."""
    in_place: ClassVar[bool] = False
    """Whether flows of the language's first version call it for its effect on its argument."""
    reads_rows: ClassVar[bool] = False
    """Whether its meaning takes :class:`flowlib.core.rows.Rows` as `rows`, and its launch function ALiBi slopes."""
    reads_queries: ClassVar[bool] = False
    """Whether it reads a step's queries and keys, too, so that it can't be called alone."""
    kernel: ClassVar[str] = ""
    """Import string ``module:function`` of the launch function."""
    scratch: ClassVar[str] = ""
    """Import string of a function of the widest row's pages, which gives the shapes, for a row's entry, of the fp32
    buffers that the launch function takes besides, by argument."""

    def meaning(self, *xs: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """The op on ``[R, W, r, c]`` with the mask ``[R, W]`` of scored pages."""
        raise NotImplementedError(f"{type(self).__name__}.meaning")

    def options(self) -> dict[str, object]:
        """Keyword arguments of the launch function."""
        return {}

    def also_gives(self, other: SegmentOp) -> str:
        """The argument with which the launch function writes the result of `other`, of the same inputs, as well.

        Empty where it can't.
        """
        return ""


class SelectOp(Op):
    """Writes the selection; the indexer ends in one.

    Args:
        k: most pages chosen per row; ``None`` means the spec's budget.
    """

    takes_output: ClassVar[bool] = True
    across_pages: ClassVar[bool] = True
    scored: ClassVar[bool] = True
    """Whether it looks at scores (False: reserved pages only)."""

    def __init__(self, k: int | None = None) -> None:
        self.k = k

    def limits(self, spec: Spec) -> tuple[int, int]:
        """(pages, 16-bit fixed-point share of a row's pages): the larger of both is the budget."""
        if not self.scored:
            return 0, 0
        return (spec.top_k, spec.ratio_q16) if self.k is None else (self.k, 0)

    def budget(self, spec: Spec, num_pages: int) -> int:
        """Most pages chosen for a row of `num_pages` pages, the reserved ones not counted."""
        top_k, ratio = self.limits(spec)
        return max(top_k, (num_pages * ratio) >> 16)

    def covered_pages(self, spec: Spec) -> int:
        """Rows of at most so many pages are within the budget and the reserved pages, up to ``spec.max_pages``."""
        low, high = 0, spec.max_pages
        while low < high:  # what the budget leaves out grows with the row
            middle = (low + high + 1) // 2
            covered = middle - spec.bos - spec.eos <= self.budget(spec, middle)
            low, high = (middle, high) if covered else (low, middle - 1)
        return low

    def lower(self, *inputs: vTensor, direct: bool) -> tuple[SelectOp, vTensor] | None:
        """The op as calls of other ops that end in a selection of scores; ``None`` if it is one already.

        `direct` says that the selection goes to ``o``; else its scores are kept as a value.
        """
        return None

    def meaning(self, x: torch.Tensor, scored: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        """Chosen pages bool ``[R, lanes, W]`` of scores ``[R, lanes, W]``, scored pages ``[R, W]``, budgets ``[R]``."""
        raise NotImplementedError(f"{type(self).__name__}.meaning")


_OpT = TypeVar("_OpT", bound=type[Op])


def cache_side(op_type: _OpT) -> _OpT:
    """The op under its cache-side name, ``C`` + name: the same definition."""
    name = "C" + op_type.__name__
    doc = f"{op_type.__name__} with a field as its output: ``op(x, out, loc=loc, ctx=ctx)``.\n\n{op_type.__doc__}"
    return type(name, (op_type,), {"__doc__": doc, "__module__": op_type.__module__})  # type: ignore[return-value]


def broadcast(op: Op, *shapes: Inner) -> Inner:
    """Inner sizes of an elementwise result: equal, or 1.

    Raises:
        ShapeError: naming op, argument, axis and both sizes.
    """
    sizes = list(shapes[0])
    for name, shape in zip(op.names[1:], shapes[1:], strict=True):
        for axis in (0, 1):
            if shape[axis] != sizes[axis] and 1 not in (shape[axis], sizes[axis]):
                raise ShapeError(
                    f"{type(op).__name__}: axis {axis + 1} of '{name}' is {shape[axis]}, expected {sizes[axis]} or 1 "
                    f"to match '{op.names[0]}' {list(shapes[0])}"
                )
            sizes[axis] = max(sizes[axis], shape[axis])
    return sizes[0], sizes[1]


def literal(value: float) -> str:
    """A number as Triton text."""
    return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'


def number(op: Op | str, name: str, value: object) -> float:
    """`value` as a float. Raises OptionError if it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        label = op if isinstance(op, str) else op.label
        raise OptionError(f"{label}: {name} is {value!r}, expected a number")
    return float(value)


def is_power_of_2(n: int) -> bool:
    """Whether `n` is a power of two."""
    return n & (n - 1) == 0


def check_inner_dim(op: Op, dim: object) -> int:
    """`dim` if it is 1 or 2. Raises OptionError."""
    if dim not in (1, 2):
        raise OptionError(f"{type(op).__name__}: dim is {dim!r}, expected 1 or 2 (an axis inside an entry)")
    return int(dim)  # type: ignore[arg-type]


class Leaf(Op):
    """A value the graph reads: ``q``, a field, or a buffer."""

    names: ClassVar[tuple[str, ...]] = ()


LEAF = Leaf()


FLOAT8 = "flowlib.kernels.scaled_float8"
"""Where kernels find what :mod:`flowlib.core.float8` is in torch."""


class Stored(TileOp):
    """A value as a field holds it: rounded to the field's dtype, or to a scaled float8, whose scale is an input too."""

    def __init__(self, dtype: torch.dtype, rounding: str = "") -> None:
        self.dtype = dtype
        self.direction = rounding

    def infer(self, x: Inner, scale: Inner = (1, 1)) -> Inner:
        return x

    def rounding(self, *inputs: str) -> str:
        return inputs[0]

    def meaning(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if scale is None:
            return x.to(self.dtype).to(x.dtype)
        return float8.decode(float8.encode(x, scale, self.direction), scale, x.dtype)

    def emit(self, e: Emitter, x: Block, scale: Block | None = None) -> Block:
        if scale is None:
            return e.let(f"{e.fp32(x)}.to({TRITON_DTYPES[self.dtype]}).to(tl.float32)", x.shape, x)
        code = e.call(f"{FLOAT8}:encode", e.fp32(x), scale.name, f'"{self.direction}"')[0]
        return e.let(e.call(f"{FLOAT8}:decode", code, scale.name)[0], x.shape, x)


TRITON_DTYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float8_e4m3fn: "tl.float8e4nv",
}
"""Triton's names of the storage dtypes."""


def check_field_dtype(name: str, dtype: object) -> torch.dtype:
    """`dtype`, or the dtype of that name, if a field can have it. Raises FormatError."""
    if isinstance(dtype, str):
        dtype = next((t for t in TRITON_DTYPES if str(t) == f"torch.{dtype}"), dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in TRITON_DTYPES:
        known = ", ".join(str(t).removeprefix("torch.") for t in TRITON_DTYPES)
        raise FormatError(f"create_cache: dtype of field {name!r} is {dtype!r}, expected one of {known}")
    return dtype  # type: ignore[return-value]
