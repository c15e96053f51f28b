"""Tables on the terminal; written in full where the output is no terminal."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flowlib.core import registry
from flowlib.core.errors import FlowlibError

if TYPE_CHECKING:
    from flowlib.testing.verify import StageResult, VerifyReport

_PLAIN_WIDTH = 160


def console(stderr: bool = False) -> Console:
    """The terminal, or a wide page where the output goes elsewhere."""
    terminal = Console(stderr=stderr, highlight=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def flows(flow_file: str | None) -> None:
    """Prints the registered flows, those of `flow_file` among them."""
    from flowlib import list_flows

    names = list_flows()
    if flow_file is not None:
        registry.load_file(flow_file)
        names = registry.registered()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("flow", "aliases", "page", "fields per page", "what it does"):
        table.add_column(title, justify="right" if title == "page" else "left", overflow="fold")
    for name in names:
        flow_type = registry.find(name)
        doc = (inspect.getdoc(flow_type) or "").partition("\n")[0] if flow_type.__doc__ else ""
        page_size = str(flow_type.default_page_size)
        table.add_row(name, ", ".join(registry.aliases_of(name)), page_size, _fields(name), doc)
    console().print(table)


def _fields(name: str) -> str:
    """The fields of a flow at its default sizes, or why it can't be told."""
    from flowlib import build, profile

    try:
        flow = build(name)
        fields = profile(flow, flow.default_spec()).fields.values()
    except FlowlibError as error:
        return f"({error})"
    return ", ".join(f"{f.name} {list(f.shape)}{' (state)' if f.kind == 'state' else ''}" for f in fields) or "-"


def report(found: VerifyReport) -> None:
    """Prints what was compared: stages down, implementations across, each result the one nearest to its tolerance."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="bold")
    table.title = f"{found.flow}   oracle: {found.oracle}"
    table.add_column("stage")
    table.add_column("oracle max", justify="right")
    for impl in found.impls:
        table.add_column(f"{impl} error", justify="right")
        table.add_column("tolerance", justify="right")
    table.add_column("")
    worst = found.worst()
    for stage in dict.fromkeys(stage for stage, _ in worst):
        row = [worst[stage, impl] for impl in found.impls if (stage, impl) in worst]
        verdict = "[green]ok[/]" if all(r.ok for r in row) else "[red]FAILED[/]"
        table.add_row(stage, _size(row), *_cells(found.impls, stage, worst), verdict)
    out = console()
    out.print(table)
    for impl in found.impls:
        kept, total = found.attended[impl], found.cached[impl]
        out.print(f"{impl}: {kept} of {total} pages attended, {total - kept} skipped; {found.seconds[impl]:.1f} s")
    for r in found.failures:
        out.print(f"[red]FAILED[/] {r.impl}, {r.stage}, {r.case}: {_why(r)}", soft_wrap=True)
    for note in found.notes:
        out.print(f"note: {note}", soft_wrap=True, markup=False)
    out.print()


def _cells(impls: Sequence[str], stage: str, worst: dict[tuple[str, str], StageResult]) -> list[str]:
    cells = []
    for impl in impls:
        r = worst.get((stage, impl))
        cells += ["-", "-"] if r is None else [f"{r.error:.1e}", f"{r.tolerance:.1e}"]
    return cells


def _size(row: Sequence[StageResult]) -> str:
    size = max(r.size for r in row)
    return f"{size:.1e}" if size else "-"


def _why(r: StageResult) -> str:
    return f"error {r.error:.3g}, tolerance {r.tolerance:.3g}" + (f" at {r.note}" if r.note else "")
