"""What `bench_entmax.py` prints and saves: the gate, the table, JSON, and a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_entmax_measure import FLASHINFER, OWN_SOFTMAX, STAGES, Row, Sample
from bench_entmax_scene import GAUSSIAN
from bench_result import BenchResult, gate_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

FIXED_GOAL_US = 35.0
"""Goal of a Gaussian step over the shortest context, a single row."""
SOFTMAX_GOALS = {1: (1 << 18, 1.0), 16: (1 << 15, 1.0)}
"""By batch: from so many tokens on, so many times faster than FlashInfer."""
LONG_TOKENS, LONG_SOFTMAX, LONG_FULL = 1 << 20, 3.5, 5.0
"""For a single row of a million tokens: times faster than dense softmax, and than every page by the same kernel."""


@dataclass
class Result(BenchResult):
    """Everything a run found.

    Attributes:
        fixed: tokens of the work that shows the fixed cost; 0 without one.
        bandwidth: ``read`` and ``copy``, bytes a second; empty until measured.
        rows: one per batch and length.
    """

    fixed: int = 0
    bandwidth: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def fixed_us(self) -> float | None:
        """The time of the step over the shortest context; a step costs that whatever it reads."""
        own = [row.step.median for row in self.rows if (row.batch, row.tokens) == (1, self.fixed)]
        return own[0] if own else None


def goals(row: Row) -> str:
    """The goals of a line and whether they are met; empty where there are none."""
    found, softmax = [], row.over(FLASHINFER)
    if not row.standard or row.method != GAUSSIAN or softmax is None:
        return ""
    start, wanted = SOFTMAX_GOALS.get(row.batch, (math.inf, 1.0))
    if row.batch == 1 and row.tokens == LONG_TOKENS:
        found = [(softmax, LONG_SOFTMAX, "softmax"), (row.over_full, LONG_FULL, "full")]
    elif row.tokens >= start:
        found = [(softmax, wanted, "softmax")]
    return ", ".join(f"{goal:g}x {name} {'yes' if got >= goal else 'no'}" for got, goal, name in found)


def speed_table(rows: Sequence[Row]) -> Table:
    """One line a row; microseconds a step."""
    title = "Decode step, microseconds (median of graph replays; least and 90th percentile of the step)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("batch x context", *STAGES, "step", "min", "p90", "full entmax", FLASHINFER, OWN_SOFTMAX):
        table.add_column(name, justify="right", no_wrap=True)
    shares = ("over softmax", "over full", "goal", "pages", "most", "of", "certified")
    for name in (*shares, "MB", "floor", "ratio", "pools"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    """The cells of one line."""
    mean, most, total = row.selected
    reused = "" if row.reuse >= 8 else f" ({row.reuse:.1f}x L2)"
    softmax = row.over(FLASHINFER)
    return [
        f"{row.batch} x {row.tokens:,}", *(_us(row.stages.get(name)) for name in STAGES), _us(row.step),
        f"{row.step.least:.2f}", f"{row.step.p90:.2f}", _us(row.full), _us(row.softmax.get(FLASHINFER)),
        _us(row.softmax.get(OWN_SOFTMAX)), "-" if softmax is None else f"{softmax:.2f}x", f"{row.over_full:.2f}x",
        goals(row), f"{mean:.0f} ({100 * mean / total:.0f} %)", str(most), str(total), f"{100 * row.certified:.0f} %",
        f"{row.bytes / 1e6:.1f}", f"{row.floor_us:.2f}", f"{row.floor_ratio:.2f}", f"{row.pools}{reused}",
    ]  # fmt: skip


def _us(sample: Sample | None) -> str:
    return "-" if sample is None else f"{sample.median:.2f}"


def render(result: Result, console: Console) -> None:
    """Prints the gate, and speeds only behind a green one."""
    console.print(gate_table(result.verdicts))
    if not result.green:
        console.print("The gate is red: no speed is printed.")
    else:
        console.print("The gate is green.")
        _speeds(result, console)
    for note in result.notes:
        console.print(f"- {note}")


def _speeds(result: Result, console: Console) -> None:
    if result.bandwidth:
        read, copy = result.bandwidth["read"] / 1e12, result.bandwidth["copy"] / 1e12
        console.print(f"Read bandwidth {read:.2f} TB/s (a large sum), copy {copy:.2f} TB/s counting both ways.")
    if result.rows:
        console.print(speed_table(result.rows))
        console.print(
            "Stages are timed alone, their inputs in the L2; the token's append is not part of a step. full entmax: "
            "the same kernel over every page. MB: what must move (K of selected pages, V of tokens with mass, "
            "statistics of every page), floor: at the read bandwidth. pools: caches that take turns."
        )
    if result.fixed_us is not None:
        text = f"Fixed cost of a step (1 x {result.fixed:,}): {result.fixed_us:.2f} us"
        met = "yes" if result.fixed_us < FIXED_GOAL_US else "no"
        gaussian = any(row.method == GAUSSIAN for row in result.rows)
        console.print(text + (f", goal below {FIXED_GOAL_US:g}: {met}." if gaussian else "."))


def as_json(result: Result) -> dict[str, Any]:
    """The result; behind a red gate nothing but the gate."""
    return result.as_json(
        lambda: {
            "bandwidth_bytes_per_second": result.bandwidth, "fixed_us": result.fixed_us,
            "rows": [_row_json(row) for row in result.rows],
        }
    )  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "floor_us": row.floor_us, "floor_ratio": row.floor_ratio, "over_full": row.over_full,
        "over_softmax": row.over(FLASHINFER), "over_own_softmax": row.over(OWN_SOFTMAX), "goal": goals(row),
    }  # fmt: skip


def save(result: Result, folder: Path, method: str, picture: bool = True) -> list[Path]:
    """Writes ``bench_entmax_<method>.json`` and, if asked, with matplotlib and a green gate, the ``.png``."""
    wanted = picture and result.green and result.rows
    paint = (lambda path: draw(result.rows, path)) if wanted else None
    return result.save(folder, f"bench_entmax_{method}", lambda: as_json(result), paint)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Times by context for each batch, logarithmic: the step, every page, dense softmax, and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({row.batch for row in rows})
    figure, axes = pyplot.subplots(
        1, len(batches), figsize=(6.0 * len(batches), 5.0), squeeze=False, constrained_layout=True
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        own = sorted((row for row in rows if row.batch == batch), key=lambda row: row.tokens)
        lines = {rows[0].method: [(r.tokens, r.step.median) for r in own]}
        lines["full entmax"] = [(r.tokens, r.full.median) for r in own]
        for name in (FLASHINFER, OWN_SOFTMAX):
            lines[name] = [(r.tokens, r.softmax[name].median) for r in own if name in r.softmax]
        for name, points in lines.items():
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.plot([r.tokens for r in own], [r.floor_us for r in own], "k--", label="floor")
        axis.set(title=f"batch {batch}", xlabel="tokens", ylabel="microseconds a step", xscale="log", yscale="log")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
