"""The page that lists every op, written from the definitions.

python -m flowlib.testing.document > docs/ops.md
python -m flowlib.testing.document --write docs/ops.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowlib import ops
from flowlib.core.errors import FlowlibError, OptionError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Op, SegmentOp, SelectOp, SourceOp
from flowlib.core.rows import HintOp, RowOp
from flowlib.core.spec import Spec

OpType = type[Op]

INTRODUCTION = """\
# Ops

Written from the definitions in `flowlib/ops` by `python -m flowlib.testing.document`; a test keeps it so.

A value is `[L, r, c]`. Its format says what axis 0 is: `B` one entry per row (request, kv head), `S` one entry per \
page of each row, `P` one entry per physical page and kv head (fields). `r` and `c` are the sizes of one entry; axes 1 \
and 2 broadcast where they are 1. Arithmetic is fp32 (float64 in the reference when asked for); fields and buffers are \
stored in their own dtype. `G` is the number of query heads per kv head; scores to select by are `[S, n, 1]` with \
n = 1, or n = G for a selection per query head.

Indexer side, in `forward_indexer`: `y = op(x[, y], ctx=ctx)`, and an op that selects ends in `o`: `op(x, o, ctx=ctx)`.
Cache side, in `forward_cache`: `op(x[, y], out, loc=loc, ctx=ctx)` with a field, or `None` for a temporary, as `out`. \
An op with a second name starting with C is one definition; both names work on both sides.

- **tile** ops work inside one entry; neighbours become one kernel.
- **segment** ops work across the scored pages `[bos, S - eos)` of a row and end a kernel.
- **selection** ops write `o`, the page list of every row.
- **hints** tell attention something beside the selection: `op(x, o, ctx=ctx)`.

`q.mean(dim, keepdim=True)` is `Mean(dim)` of any value."""

KINDS = {
    "tile": "Tile ops",
    "segment": "Segment ops",
    "selection": "Selection ops",
    "hint": "Hints",
}


class Size(int):
    """A size with a name that arithmetic carries along."""

    text: str

    def __new__(cls, value: int, text: str) -> Size:
        size = super().__new__(cls, value)
        size.text = text
        return size

    def __mul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"{_text(self)}·{_text(other)}")

    def __floordiv__(self, other: int) -> Size:
        return Size(int(self) // int(other), f"{_text(self)}/{_text(other)}")


_SPEC = Spec(group_size=Size(3, "G"))
R, C, ONE = Size(14, "r"), Size(22, "c"), Size(1, "1")
SAMPLES: dict[str, object] = {
    "first": -1, "r": Size(22, "r'"), "c": Size(14, "c'"), "k": Size(2, "k"), "start": 0, "end": 1, "lo": 0.0,
    "hi": 1.0, "p": 0.5, "weight": (1.0,), "alpha": 1.5,
}  # fmt: skip
"""Arguments of ops that have no default, to try them with."""
PROBES: dict[int, list[tuple[tuple[int, int], ...]]] = {
    0: [()],
    1: [((R, C),), ((Size(3, "n"), ONE),)],
    2: [
        ((Size(3, "Nx"), Size(5, "K")), (Size(7, "Ny"), Size(5, "K"))),
        ((R, C), (R, C)),
        ((ONE, Size(5, "K")), (ONE, Size(5, "K"))),
        ((Size(3, "n"), ONE), (Size(3, "n"), ONE)),
    ],
}
"""Sizes of inputs, the most telling first; the first that an op accepts is shown."""


def families() -> list[tuple[str, str]]:
    """Every exported op once: its name, and its cache-side name or ``""``."""
    exported = set(ops.__all__)
    second = {"C" + name for name in exported if "C" + name in exported}
    return [(name, "C" + name if "C" + name in exported else "") for name in ops.__all__ if name not in second]


def page() -> str:
    """The whole page, Markdown."""
    sections = [INTRODUCTION]
    for kind, title in KINDS.items():
        rows = [_row(name, twin) for name, twin in families() if kind_of(getattr(ops, name)) == kind]
        head = ["| op | inputs and result | formats | meaning | runs as |", "|---|---|---|---|---|"]
        sections.append("\n".join([f"## {title}", "", *head, *rows]))
    return "\n\n".join(sections) + "\n"


def kind_of(op_type: OpType) -> str:
    """``"tile"``, ``"segment"``, ``"selection"`` or ``"hint"``."""
    if issubclass(op_type, SelectOp):
        return "selection"
    if issubclass(op_type, HintOp):
        return "hint"
    return "segment" if issubclass(op_type, SegmentOp) else "tile"


def _row(name: str, twin: str) -> str:
    op_type = getattr(ops, name)
    label = f"`{name}{_signature(op_type)}`" + (f"<br>`{twin}`" if twin else "")
    cells = [label, "<br>".join(_shapes(op_type)), _formats(op_type), _meaning(op_type), _runs_as(op_type)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _signature(op_type: OpType) -> str:
    if op_type.__init__ is object.__init__:
        return "()"
    shown = []
    for parameter in list(inspect.signature(op_type.__init__).parameters.values())[1:]:
        default = "" if parameter.default is inspect.Parameter.empty else f"={_literal(parameter.default)}"
        shown.append(parameter.name + default)
    return f"({', '.join(shown)})"


def _literal(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def instances(op_type: OpType) -> Iterator[tuple[str, Op]]:
    """The op made in every way that may change its shapes: a label (``"dim 1"`` or ``""``) and the op.

    Raises:
        OptionError: a parameter has no default and no sample to try it with.
    """
    names = [] if op_type.__init__ is object.__init__ else list(inspect.signature(op_type.__init__).parameters)[1:]
    parameters = inspect.signature(op_type.__init__).parameters
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty or n == "k"]
    needed = {n: _sample(op_type, n) for n in required if n != "dim"}
    dims: Sequence[object] = (1, 2, (1, 2), 0) if "dim" in names else (None,)
    for dim in dims:
        try:
            yield ("" if dim is None else f"dim {dim}", op_type(**needed, **({} if dim is None else {"dim": dim})))
        except OptionError:
            continue


def _sample(op_type: OpType, name: str) -> object:
    if name not in SAMPLES:
        raise OptionError(f"{op_type.__name__}: no sample of its argument {name!r}; add one to SAMPLES")
    return SAMPLES[name]


def _shapes(op_type: OpType) -> list[str]:
    found: dict[str, list[str]] = {}
    for label, op in instances(op_type):
        found.setdefault(_shape(op), []).append(label)
    if len(found) == 1:
        return list(found)
    return [f"{', '.join(labels)}: {shape}" for shape, labels in found.items()]


def _shape(op: Op) -> str:
    op = op.bound(_SPEC)
    for sizes in PROBES[len(op.names)]:
        try:
            result = op.infer((R, C)) if op.shaped_like_output else op.infer(*sizes)
        except FlowlibError:
            continue
        axis = "S" if op.across_pages else "."
        inputs = ", ".join(f"{name} {_entry(size, axis)}" for name, size in zip(op.names, sizes, strict=True))
        per_row = isinstance(op, RowOp) or (op.across_pages and not op.takes_output and _is_per_row(op))
        target = "`o`" if op.takes_output else "a field" if op.saves else _entry(result, "B" if per_row else axis)
        return f"{inputs} → {target}" if inputs else f"→ {target}"
    raise OptionError(f"{type(op).__name__}: takes none of the sizes in PROBES; add some it takes")


def _is_per_row(op: Op) -> bool:
    return op.result_format([FORMAT.RAGGED], Side.INDEXER) is FORMAT.BATCHED


def _entry(size: Sequence[int], axis: str) -> str:
    return f"`[{axis}, {_text(size[0])}, {_text(size[1])}]`"


def _text(size: int) -> str:
    return size.text if isinstance(size, Size) else str(size)


def _formats(op_type: OpType) -> str:
    if issubclass(op_type, SelectOp):
        return "S, P → `o`" if op_type.names else "→ `o`"
    if op_type.saves:
        return "B, S, P → P"
    if issubclass(op_type, HintOp):
        return "S, P → `o`" if op_type.per_page else "B → `o`"
    if issubclass(op_type, SegmentOp):
        inputs, per_row = "S, P " if op_type.names else "", _is_per_row(next(instances(op_type))[1])
        return f"{inputs}→ {'B' if per_row else 'S'}"
    if issubclass(op_type, RowOp):
        return "→ B"
    if issubclass(op_type, SourceOp):
        return "→ P" if op_type.shaped_like_output else "→ S"
    across = [op for _, op in instances(op_type) if op.across_pages]
    reduced = {op.result_format([FORMAT.RAGGED], Side.INDEXER) for op in across}
    return "all B → B, else → S" + ("; dim 0: S, P → B" if FORMAT.BATCHED in reduced else "")


def _meaning(op_type: OpType) -> str:
    text = inspect.cleandoc(op_type.__doc__ or "").replace("``", "`").replace(":class:`", "`")
    return " ".join(line.strip() for line in text.splitlines() if line.strip()).replace("Args:", "Arguments:")


def _runs_as(op_type: OpType) -> str:
    if kind_of(op_type) == "selection":
        own = op_type.lower is SelectOp.lower
        return "`kernels.select:launch_select`" if own else "other ops, then `kernels.select:launch_select`"
    if kind_of(op_type) == "hint":
        return "`kernels.entmax:launch_entmax`"
    kernels = sorted({op.kernel.removeprefix("flowlib.") for _, op in instances(op_type) if isinstance(op, SegmentOp)})
    if kind_of(op_type) == "segment":
        return ", ".join(f"`{kernel}`" for kernel in kernels)
    return "fused" + "".join(f"; dim 0: `{kernel}`" for kernel in kernels)


def main(arguments: Sequence[str]) -> int:
    """Prints the page, or writes it: ``--write PATH``. Returns the exit status."""
    if not arguments:
        sys.stdout.write(page())
        return 0
    if len(arguments) != 2 or arguments[0] != "--write":
        sys.stderr.write("usage: python -m flowlib.testing.document [--write PATH]\n")
        return 2
    Path(arguments[1]).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
