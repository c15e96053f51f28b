"""What `bench_mla.py` prints and saves: the gate, tables, goals, JSON, and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_measure import STAGES
from bench_mla_decode import OWN, LatentRow
from bench_mla_prefill import PrefillRow
from bench_mla_shapes import WORKSPACE_ROWS
from bench_mla_tiles import TileRow
from bench_result import BenchResult, gate_table
from bench_timing import Timed
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PREFILL_STAGES = (
    "project new", "attend new", "gather", "project", "(product)", "absorb", "attend", "restore", "merge",
)  # fmt: skip
DENSE = ("FlashInfer", "FA3", OWN)
PREFILL_GOAL, SCHEDULE_GOAL, DECODE_GOAL = 1.5, 3.0, 4.0


@dataclass
class Result(BenchResult):
    """Everything a run found.

    Attributes:
        rates: ``read`` and ``copy`` bytes and ``matmul`` operations a second; empty until measured.
        prefill: rows of prefill and of schedules.
        decode: rows of flows.
        tiles: rows of tile sizes.
    """

    rates: dict[str, float] = field(default_factory=dict)
    prefill: list[PrefillRow] = field(default_factory=list)
    decode: list[LatentRow] = field(default_factory=list)
    tiles: list[TileRow] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        """Whether there is a number."""
        return bool(self.prefill or self.decode or self.tiles)


@dataclass(frozen=True)
class Goal:
    """What must be reached: `got` times as fast as `over`, where `wanted` is asked."""

    what: str
    over: str
    wanted: float
    got: float

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.got >= self.wanted


def goals(result: Result) -> list[Goal]:
    """The goals whose shapes were measured."""
    return [*_prefill_goals(result.prefill), *_schedule_goals(result.prefill), *_decode_goals(result.decode)]


def _prefill_goals(rows: Sequence[PrefillRow]) -> list[Goal]:
    found = []
    shapes = dict.fromkeys(r.shape for r in rows if r.part == "prefill" and (r.shape.context, r.shape.new) == (
        (60_000,), (4096,)))  # fmt: skip
    for shape in shapes:
        own = [r for r in rows if r.shape == shape and r.part == "prefill" and r.own and not r.absorbed]
        others = [r for r in rows if r.shape == shape and r.part == "prefill" and r.absorbed]
        if own and others:
            best, over = (min(x, key=lambda r: r.whole.us) for x in (own, others))
            what = f"{best.name}, {shape.label}, {shape.heads} heads"
            found.append(Goal(what, over.name, PREFILL_GOAL, over.whole.us / best.whole.us))
    return found


def _schedule_goals(rows: Sequence[PrefillRow]) -> list[Goal]:
    """As served, without a graph: with many chunks the launches of a chunk are part of its time."""
    found = []
    even = {(r.shape, r.name): r for r in rows if r.part == "schedule"}
    for row in rows:
        other = even.get((row.shape, f"{row.name}, even"))
        if row.part == "schedule" and other is not None and row.shape.workspace == WORKSPACE_ROWS:
            device = f"from graphs {other.whole.us / row.whole.us:.2f}x"
            what = f"{row.name}, packed, {row.shape.heads} heads, without a graph ({device})"
            found.append(Goal(what, "the even split", SCHEDULE_GOAL, other.eager / row.eager))
    return found


def _decode_goals(rows: Sequence[LatentRow]) -> list[Goal]:
    found = []
    for row in rows:
        dense = row.fastest_dense
        if row.standard and row.asked == "16x64k" and "128 heads" in row.shape and dense is not None:
            found.append(Goal(f"{row.flow}, {row.shape}", f"dense {dense[0]}", DECODE_GOAL, row.speedup or 0.0))
    return found


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def prefill_table(rows: Sequence[PrefillRow], part: str) -> Table:
    """One line a variant; milliseconds a layer."""
    right = (*PREFILL_STAGES, "whole", "+-", "no graph", "GB", "TFLOP", "floor", "ratio", "chunks", "caches")
    table = _table(f"{part.capitalize()}, milliseconds a layer", ("context + new", "heads", "variant"), right)
    for row in rows:
        if row.part != part:
            continue
        shape, moved = row.shape, row.moved
        where = shape.label + (f" ({shape.workspace:,} rows)" if part == "schedule" else "")
        table.add_row(
            where, str(shape.heads), row.name, *(_ms(row.stages.get(name)) for name in PREFILL_STAGES), _ms(row.whole),
            f"{100 * row.whole.spread:.1f} %", f"{row.eager / 1e3:.3f}", f"{moved.bytes / 1e9:.2f}",
            f"{moved.flops / 1e12:.2f}", f"{row.floor_us / 1e3:.3f}", f"{row.floor_ratio:.2f}", str(row.chunks or "-"),
            str(row.copies),
        )  # fmt: skip
    return table


def decode_table(rows: Sequence[LatentRow]) -> Table:
    """One line a flow and workload; microseconds a layer."""
    right = (*STAGES, "step", "+-", *DENSE, "speed-up", "MB", "GFLOP", "floor", "ratio", "pools")
    table = _table("Decode step, microseconds a layer", ("batch x context", "flow"), right)
    for row in rows:
        dense, speed = [_us(row.dense.get(name)) for name in DENSE], row.speedup
        table.add_row(
            row.shape, row.flow, *(_us(row.stages.get(name)) for name in STAGES), f"{row.step.us:.2f}",
            f"{100 * row.step.spread:.1f} %", *dense, "-" if speed is None else f"{speed:.2f}x",
            f"{row.moved.total / 1e6:.1f}", f"{row.flops / 1e9:.1f}", f"{row.floor_us:.2f}", f"{row.floor_ratio:.2f}",
            str(row.pools),
        )  # fmt: skip
    return table


def tile_table(rows: Sequence[TileRow]) -> Table:
    """One line a tile size, the fastest of each case first."""
    table = _table(
        "Tile sizes, microseconds", ("kernel", "case", "tile, warps, stages"), ("splits", "time", "+-", "rate", "")
    )
    for row in sorted(rows, key=lambda r: (r.kernel, r.case, r.time.us)):
        usual = "built in" if row.usual else ""
        table.add_row(row.kernel, row.case, str(row.tile), str(row.splits), f"{row.time.us:.2f}",
                      f"{100 * row.time.spread:.1f} %", row.rate, usual)  # fmt: skip
    return table


def _ms(timed: Timed | None) -> str:
    return "-" if timed is None else f"{timed.us / 1e3:.3f}"


def _us(timed: Timed | None) -> str:
    return "-" if timed is None else f"{timed.us:.2f}"


def render(result: Result, console: Console) -> None:
    """Prints the gate, and speeds only behind a green one."""
    console.print(gate_table(result.verdicts))
    if not result.green:
        console.print("The gate is red: no speed is printed.")
        for note in result.notes:
            console.print(f"- {note}")
        return
    console.print("The gate is green.")
    if result.rates:
        read, matmul = result.rates["read"] / 1e12, result.rates["matmul"] / 1e12
        console.print(f"Read bandwidth {read:.2f} TB/s (a large sum), bf16 products {matmul:.0f} TFLOP/s.")
    for part in ("prefill", "schedule"):
        if any(row.part == part for row in result.prefill):
            console.print(prefill_table(result.prefill, part))
    if result.prefill:
        console.print(
            "Stages are timed alone, whole and stages from CUDA graphs, no graph: by the wall clock. (product) is the "
            "matrix product within project. floor: each stage's bytes at the read bandwidth or operations at the rate "
            "of products, whichever take longer, one stage after the other. caches: other contexts that take turns."
        )
    if result.decode:
        console.print(decode_table(result.decode))
        console.print(
            "update: every row finishes a page; in a step it is part of score, and a row in page_size finishes one. "
            "plan: the layer's share. flowlib: its own kernel, dense."
        )
    if result.tiles:
        console.print(tile_table(result.tiles))
    for goal in goals(result):
        verdict = "met" if goal.met else "MISSED"
        console.print(f"Goal {verdict}: {goal.what}: {goal.got:.2f}x over {goal.over}, wanted {goal.wanted:g}x")
    for note in result.notes:
        console.print(f"- {note}")


def as_json(result: Result) -> dict[str, Any]:
    """The result; behind a red gate nothing but the gate."""
    return result.as_json(
        lambda: {
            "rates_per_second": result.rates,
            "prefill": [_row_json(row) for row in result.prefill],
            "decode": [_row_json(row) for row in result.decode],
            "tiles": [dataclasses.asdict(row) for row in result.tiles],
            "goals": [dataclasses.asdict(goal) | {"met": goal.met} for goal in goals(result)],
        }
    )


def _row_json(row: PrefillRow | LatentRow) -> dict[str, Any]:
    more: dict[str, Any] = {"floor_us": row.floor_us, "floor_ratio": row.floor_ratio}
    if isinstance(row, LatentRow):
        more["speedup"] = row.speedup
    return dataclasses.asdict(row) | more


def save(result: Result, folder: Path, picture: bool = True) -> list[Path]:
    """Writes ``bench_mla.json`` and, if asked, with matplotlib and a green gate, ``bench_mla.png``."""

    def paint(path: Path) -> None:
        from bench_mla_picture import draw

        draw(result.prefill, result.decode, path)

    wanted = picture and result.green and (result.prefill or result.decode)
    return result.save(folder, "bench_mla", lambda: as_json(result), paint if wanted else None)
