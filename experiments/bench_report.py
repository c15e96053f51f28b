"""What `bench_decode.py` prints and saves: the gate, the table, JSON, and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_measure import STAGES, Row
from bench_result import BenchResult, gate_table
from bench_shapes import FLOAT8
from bench_timing import Timed
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

DENSE = ("FlashInfer", "FA3")
MAX_FLOOR_RATIO = 1.5
"""Goal at a batch of at least 16 and contexts of at least 32k."""
GOALS = {
    "gqa_quest_sparse_attention": {"16x32k": 6.2, "16x128k": 11.0, "64x32k": 7.0, "1x128k": 5.0, "16x8k": 2.6},
    "block_sparse_attention": {"16x32k": 8.0, "16x128k": 17.0, "64x32k": 9.5, "1x128k": 6.0, "16x8k": 2.9},
}
"""Speed-up over the faster dense kernel."""
COVERED_GOAL = 0.97
"""Speed-up where the budget covers the context, at a batch of at least 16."""
SINGLE_COVERED_US = 3.0
"""Microseconds beyond dense where the budget covers the context of a single request."""


@dataclass
class Result(BenchResult):
    """Everything a run found.

    Attributes:
        bandwidth: ``read`` and ``copy``, bytes a second; empty until measured.
        rows: one per flow and workload.
    """

    bandwidth: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def speed_table(rows: Sequence[Row]) -> Table:
    """One line a row; microseconds a layer."""
    table = Table(
        title="Decode step, microseconds a layer (median of graph replays)", title_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("batch x context", no_wrap=True)
    table.add_column("flow", no_wrap=True)
    for name in (*STAGES, "step", "+-", *DENSE, "speed-up", "goal", "MB", "floor", "ratio", "pools"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    """The cells of one line."""
    dense = {name: _fastest(row.dense, name) for name in DENSE}
    reused = "" if row.reuse.get("step", 0.0) >= 8 else f" ({row.reuse.get('step', 0.0):.1f}x L2)"
    return [
        row.shape,
        row.flow.replace("_sparse_attention", ""),
        *(_us(row.stages.get(name)) for name in STAGES),
        f"{row.step.us:.2f}",
        f"{100 * row.step.spread:.1f} %",
        *(_us(dense[name]) for name in DENSE),
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
        goal_text(row),
        f"{row.moved.total / 1e6:.1f}",
        f"{row.floor_us:.2f}",
        f"{row.floor_ratio:.2f}{_over_floor(row)}",
        f"{row.pools}{reused}",
    ]


def _us(timed: Timed | None) -> str:
    return "-" if timed is None else f"{timed.us:.2f}"


def _fastest(dense: Mapping[str, Timed], name: str) -> Timed | None:
    own = [timed for full, timed in dense.items() if full.split()[0] == name]
    return min(own, key=lambda timed: timed.us) if own else None


def goal_text(row: Row) -> str:
    """The goal of a line and whether it is met; empty where there is none."""
    dense = row.fastest_dense
    if not row.standard or dense is None:
        return ""
    goals, batch = GOALS.get(row.flow.removesuffix(FLOAT8).partition("(")[0], {}), int(row.asked.split("x")[0])
    if goals and row.attended == 1.0 and batch == 1:
        extra = row.step.us - dense[1].us
        return f"+{SINGLE_COVERED_US:g} us: {extra:+.1f} {_met(extra <= SINGLE_COVERED_US)}"
    goal = COVERED_GOAL if goals and row.attended == 1.0 and batch >= 16 else goals.get(row.asked)
    return "" if goal is None else f"{goal:g}x {_met(dense[1].us / row.step.us >= goal)}"


def _over_floor(row: Row) -> str:
    """A mark where the floor ratio misses its goal."""
    batch, _, context = row.asked.partition("x")
    wanted = row.standard and int(batch) >= 16 and context in ("32k", "64k", "128k")
    return "!" if wanted and row.floor_ratio > MAX_FLOOR_RATIO else ""


def _met(met: bool) -> str:
    return "yes" if met else "no"


def render(result: Result, console: Console) -> None:
    """Prints the gate, and speeds only behind a green one."""
    console.print(gate_table(result.verdicts))
    if not result.green:
        console.print("The gate is red: no speed is printed.")
        return
    console.print("The gate is green.")
    if result.bandwidth:
        read, copy = result.bandwidth["read"] / 1e12, result.bandwidth["copy"] / 1e12
        console.print(f"Read bandwidth {read:.2f} TB/s (a large sum), copy {copy:.2f} TB/s counting both ways.")
    if result.rows:
        console.print(speed_table(result.rows))
        console.print(
            "update: every row finishes a page; timed alone. In a step it is part of score, and a row in page_size "
            "finishes one, as on average. plan: the layer's share. "
            "score: all stages between query and selection. select: its scores lie in the L2, as after scoring. "
            "MB: bytes that must move, floor: those at the read bandwidth. pools: distinct pools in the step's graphs. "
            f"!: more than {MAX_FLOOR_RATIO:g} times the floor, the goal at batch 16 and contexts of 32k or more."
        )
    for note in result.notes:
        console.print(f"- {note}")


def as_json(result: Result) -> dict[str, Any]:
    """The result; behind a red gate nothing but the gate."""
    return result.as_json(
        lambda: {"bandwidth_bytes_per_second": result.bandwidth, "rows": [_row_json(row) for row in result.rows]}
    )


def _row_json(row: Row) -> dict[str, Any]:
    found = {**dataclasses.asdict(dataclasses.replace(row, stages={}, dense={}))}
    for name in ("stages", "dense"):
        found[name] = {key: dataclasses.asdict(timed) for key, timed in getattr(row, name).items()}
    dense = row.fastest_dense
    return found | {
        "bytes": row.moved.total,
        "floor_us": row.floor_us,
        "floor_ratio": row.floor_ratio,
        "fastest_dense": None if dense is None else dense[0],
        "speedup": row.speedup,
        "goal": goal_text(row),
    }


def save(result: Result, folder: Path, picture: bool = True) -> list[Path]:
    """Writes ``bench_decode.json`` and, if asked, with matplotlib and a green gate, ``bench_decode.png``."""
    wanted = picture and result.green and result.rows
    paint = (lambda path: draw(result.rows, path)) if wanted else None
    return result.save(folder, "bench_decode", lambda: as_json(result), paint)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Stages stacked beside the floor and the whole step, and speed-ups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row.shape}\n{row.flow.replace('_sparse_attention', '')}" for row in rows]
    places = list(range(len(rows)))
    figure, (times, gains) = pyplot.subplots(
        2, 1, figsize=(max(8.0, 1.1 * len(rows)), 10), sharex=True, constrained_layout=True
    )
    bottom = [0.0] * len(rows)
    for name in STAGES:
        heights = [row.stages[name].us / row.step.us if name in row.stages else 0.0 for row in rows]
        times.bar(places, heights, bottom=bottom, label=name, width=0.7)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, row in enumerate(rows):
        times.text(i, max(bottom[i], 1.0) + 0.02, f"{row.step.us:.1f} us", ha="center", fontsize=8)
    times.plot(places, [row.floor_us / row.step.us for row in rows], "k_", markersize=24, label="floor")
    times.axhline(1.0, color="grey", linewidth=0.8)
    times.set_ylabel("share of the whole step (stages timed alone)")
    times.legend(ncols=6, fontsize=8, loc="lower right")
    gains.bar(places, [row.speedup or 0.0 for row in rows], width=0.7, color="tab:green")
    for i, row in enumerate(rows):
        text = "-" if row.speedup is None else f"{row.speedup:.1f}x"
        gains.text(i, row.speedup or 0.0, text, ha="center", va="bottom")
    gains.axhline(1.0, color="grey", linewidth=0.8)
    gains.set_ylabel("speed-up over the faster dense kernel")
    gains.set_xticks(places, labels, rotation=60, ha="right", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
