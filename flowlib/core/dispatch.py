"""The one function through which every op call goes, in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flowlib.core.errors import FlowlibError, FormatError, located, user_line
from flowlib.core.formats import FORMAT, Side
from flowlib.core.vtensor import Selection, SelectionHandle, vTensor

if TYPE_CHECKING:
    from flowlib.core.context import ContextBase
    from flowlib.core.op import Op

Target = vTensor | SelectionHandle | None


def dispatch(op: Op, args: Sequence[object], *, out: object, loc: object, ctx: object) -> vTensor | None:
    """Checks an op call and hands it to its context.

    Args:
        op: the op.
        args: its inputs, then the output where the side or the op has one.
        out: the output as a keyword.
        loc: token slots int64 ``[T]`` (cache side).
        ctx: the context; may be left out where a vTensor argument carries it.

    Returns:
        The result, or ``None`` from an op that writes ``o``.

    Raises:
        FormatError, ShapeError, OptionError, FlowDefinitionError: with the user's line at the end.
    """
    try:
        context = _context_of(op, args, out, ctx)
        inputs, target = _split_arguments(op, args, out, context)
        op = op.bound(context.spec)
        result = None
        if op.takes_output and (target is not None or not op.selection_value):
            op.infer(*(x.shape for x in inputs))
        else:
            shapes = [x.shape for x in inputs]
            if op.shaped_like_output and isinstance(target, vTensor):
                shapes = [target.shape]
            result = (op.result_format([x.format for x in inputs], context.side), op.infer(*shapes))
        _check_formats(op, inputs, context)
        if op.takes_output:
            lowered = op.lower(*inputs, direct=target is not None)
            if lowered is not None:
                op, scores = lowered
                inputs = (scores,)
                if target is None:
                    return Selection(
                        scores.format, scores.shape, context, dtype=scores.dtype, node=scores.node, data=scores.data
                    )
        return context.apply(op, inputs, target, result, loc)
    except FlowlibError as error:
        raise located(error, user_line()) from None


def _context_of(op: Op, args: Sequence[object], out: object, ctx: object) -> ContextBase:
    from flowlib.core.context import ContextBase

    carried = [a.ctx for a in map(_unpaired, (*args, out)) if isinstance(a, (vTensor, SelectionHandle))]
    if ctx is not None and not isinstance(ctx, ContextBase):
        raise FormatError(f"{op.label}: ctx is {type(ctx).__name__}, expected the context the method was given")
    contexts = carried if ctx is None else [ctx, *carried]
    if not contexts:
        raise FormatError(f"{op.label}: no context: pass ctx=ctx, or an argument that is a vTensor")
    if any(c is not contexts[0] for c in contexts):
        raise FormatError(
            f"{op.label}: arguments of different contexts; a vTensor can't be kept from one method or step to another"
        )
    return contexts[0]


def _split_arguments(
    op: Op, args: Sequence[object], out: object, context: ContextBase
) -> tuple[tuple[vTensor, ...], Target]:
    arity = len(op.names)
    args = [_unpaired(a) for a in args]
    inputs, rest = args[:arity], args[arity:]
    name, listed = op.label, ", ".join(op.names)
    if len(inputs) < arity or len(rest) > 1 or (rest and out is not None):
        raise FormatError(
            f"{name}: takes {arity} input{'s' if arity != 1 else ''} ({listed}) and at most one output, "
            f"got {len(args)} positional argument{'s' if len(args) != 1 else ''}"
        )
    target = rest[0] if rest else out
    for label, value in zip(op.names, inputs, strict=True):
        if not isinstance(value, vTensor):
            raise FormatError(f"{name}: '{label}' is {_kind(value)}, expected a vTensor")
    if op.shaped_like_output and target is None:
        raise FormatError(f"{name}: 'out' is missing, expected a field such as cache['...']")
    if op.takes_output:
        if target is None and op.selection_value:
            return tuple(inputs), None  # type: ignore[return-value]
        if not isinstance(target, SelectionHandle):
            raise FormatError(f"{name}: the last argument is {_kind(target)}, expected 'o', the selection handle")
    elif target is not None and not isinstance(target, vTensor):
        raise FormatError(f"{name}: 'out' is {_kind(target)}, expected a field or None")
    elif op.saves and context.side is Side.CACHE:
        raise FormatError(f"{name}: belongs into forward_indexer; in forward_cache an op takes its field as output")
    elif op.saves and target is None:
        raise FormatError(f"{name}: 'out' is missing, expected a field such as cache['...']")
    elif target is not None and context.side is Side.INDEXER and not op.saves:
        raise FormatError(f"{name}: 'out' is {target!r}, but only Save writes a field in forward_indexer")
    return tuple(inputs), target  # type: ignore[return-value]


def _check_formats(op: Op, inputs: Sequence[vTensor], context: ContextBase) -> None:
    for label, x in zip(op.names, inputs, strict=True):
        if context.side is Side.CACHE and x.format is not FORMAT.PAGED:
            raise FormatError(f"{op.label}: '{label}' is {x.format.name}, expected PAGED in forward_cache")
        if op.across_pages and label not in op.per_row and x.format is FORMAT.BATCHED:
            raise FormatError(
                f"{op.label}: '{label}' is {x!r}, expected RAGGED or PAGED: "
                "it has one entry per row, so there are no pages to work across"
            )
    if op.across_pages and context.side is Side.CACHE:
        raise FormatError(f"{op.label}: works across the pages of a row, so it belongs into forward_indexer")


def _unpaired(value: object) -> object:
    """A selection that was unpacked and packed again is that selection."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Selection) and value[0] is value[1]:
        return value[0]
    return value


def _kind(value: object) -> str:
    if isinstance(value, SelectionHandle):
        return "'o', which is write-only"
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} (learned parameters are not supported)"
    return "missing" if value is None else f"a {type(value).__name__}"
