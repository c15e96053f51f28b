"""What `bench_serving.py` prints and saves: the gate, the table, JSON, and a picture."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_serving_gate import Verdict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass
class Row:
    """One workload on one server. Times are seconds; ``ttft`` and ``tpot`` are median and 95th percentile."""

    model: str
    workload: str
    server: str
    flow: str | None
    tokens_per_second: float
    step: float
    steps: list[float]
    ttft: list[float]
    tpot: list[float]
    counted: dict[str, int]

    @property
    def share(self) -> float | None:
        """Pages attended of pages cached; ``None`` without a flow."""
        cached = self.counted.get("pages_cached", 0)
        return self.counted["pages_attended"] / cached if cached else None


@dataclass
class Result:
    """Everything a run found.

    Attributes:
        machine: GPU and versions.
        settings: the command line and what all servers were started with.
        verdicts: of the gate.
        rows: what was measured.
        skipped: what was not, with the reason.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    verdicts: list[Verdict] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether the gate saw something and nothing wrong."""
        return bool(self.verdicts) and all(v.ok for v in self.verdicts)

    @property
    def proven(self) -> bool:
        """Whether every row of a flow counted pages."""
        return all(row.share is not None for row in self.rows if row.flow)

    def speedup(self, row: Row) -> float | None:
        """Tokens per second over those of the fastest dense server; ``None`` where none was measured."""
        dense = [
            r.tokens_per_second
            for r in self.rows
            if r.flow is None and (r.model, r.workload) == (row.model, row.workload)
        ]
        return row.tokens_per_second / max(dense) if dense else None


def gate_table(verdicts: list[Verdict]) -> Table:
    """The gate's findings."""
    title = "gate: log probabilities against transformers in float64"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("server", "error", "tolerance", "pages attended", ""):
        table.add_column(name, justify="left" if name == "server" else "right")
    for v in verdicts:
        counted = v.counted
        pages = f"{counted['pages_attended']:,} of {counted['pages_cached']:,}" if counted else "all"
        bound = f"{'> ' if v.sees else ''}{v.tolerance:.1e}"
        table.add_row(v.server, f"{v.error:.1e}", bound, pages, "[green]ok[/]" if v.ok else "[red]FAILED[/]")
    return table


def speed_table(result: Result, model: str) -> Table:
    """One line per workload and server of a model."""
    table = Table(box=SIMPLE_HEAD, title=f"{model}, random weights", title_justify="left")
    for title in ("workload", "server", "tok/s", "speed-up", "TPOT ms p50", "p95", "TTFT ms p50", "p95", "pages"):
        table.add_column(title, justify="left" if title in ("workload", "server") else "right")
    last = None
    for row in sorted((r for r in result.rows if r.model == model), key=lambda r: _order(result, r.workload)):
        gain = result.speedup(row)
        table.add_row(
            row.workload if row.workload != last else "",
            row.server,
            f"{row.tokens_per_second:,.1f}",
            "-" if gain is None else f"{gain:.2f}",
            *(f"{1000 * t:.2f}" for t in row.tpot),
            *(f"{1000 * t:,.0f}" for t in row.ttft),
            "all" if row.flow is None else "-" if row.share is None else f"{100 * row.share:.1f} %",
        )
        last = row.workload
    return table


def render(result: Result, console: Console) -> None:
    """Prints everything."""
    console.print(gate_table(result.verdicts))
    if not result.green:
        console.print("[red]The gate is not green: no speed is printed.[/]")
        return
    for model in dict.fromkeys(row.model for row in result.rows):
        console.print(speed_table(result, model))
    for skip in result.skipped:
        what = f"{skip['model']}, {skip['server']}, {skip['workload']}"
        console.print(f"not measured: {what}: {skip['reason']}", markup=False)
    if not result.proven:
        console.print("[red]A server of a flow counted no pages: nothing shows that it was sparse.[/]")


def as_json(result: Result) -> dict[str, Any]:
    """The result as plain values."""
    rows = [dataclasses.asdict(r) | {"share": r.share, "speedup": result.speedup(r)} for r in result.rows]
    return {
        "machine": result.machine,
        "settings": result.settings,
        "gate": [dataclasses.asdict(v) | {"ok": v.ok} for v in result.verdicts],
        "rows": rows if result.green else [],
        "skipped": result.skipped,
    }


def save(result: Result, folder: Path) -> list[Path]:
    """Writes ``serving.json``, and ``serving.png`` if there is something to draw; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "serving.json"
    text.write_text(json.dumps(as_json(result), indent=1), encoding="utf-8")
    if not (result.green and result.rows):
        return [text]
    return [text, draw(result, folder / "serving.png")]


def draw(result: Result, path: Path) -> Path:
    """Bars of decoded tokens per second, one panel per model and one group per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in result.rows))
    servers = list(dict.fromkeys(row.server for row in result.rows))
    size = (11, 4 * len(models))
    figure, axes = pyplot.subplots(len(models), 1, figsize=size, squeeze=False, constrained_layout=True)
    width = 0.8 / len(servers)
    for axis, model in zip(axes[:, 0], models, strict=True):
        mine = [row for row in result.rows if row.model == model]
        names = sorted({row.workload for row in mine}, key=lambda name: _order(result, name))
        for i, server in enumerate(servers):
            bars = {names.index(r.workload): r.tokens_per_second for r in mine if r.server == server}
            axis.bar([x + (i - (len(servers) - 1) / 2) * width for x in bars], list(bars.values()), width, label=server)
        axis.set_xticks(range(len(names)), names)
        axis.set_yscale("log")
        axis.set_title(f"{model}, random weights")
        axis.set_xlabel("batch x context")
        axis.set_ylabel("decoded tokens per second")
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _order(result: Result, workload: str) -> int:
    return result.settings["workloads"].index(workload)
