"""Prefill and decode of multi-head latent attention, beside others and beside the floor, in one run.

prefill: flowlib's chunked loop (each attention that is installed) against absorbed attention (FlashInfer, FA3,
flowlib's decode kernel) and against SGLang's chunked prefix loop; schedule: packed against even chunks for one long
context and 31 short ones; decode: flows over latents against dense attention to all of them; tiles: tile sizes of both
kernels. Each part passes a gate against float64 first: behind a red one no speed is printed, and the exit status is 1.
On a CPU only the gate runs (interpreted).

    python experiments/bench_mla.py --out out --time-budget 500
    python experiments/bench_mla.py --quick
    python experiments/bench_mla.py --only tiles --tile decode:64,64,8,2
    TRITON_INTERPRET=1 python experiments/bench_mla.py --device cpu --prefill 40+5 --heads 2 --decode-shape 2x40 \
        --budget 16 --decode-page 8 --only prefill,decode
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import bench_decode
import bench_mla_tiles as tiles
import torch
import typer
from bench_mla_decode import LatentBench
from bench_mla_prefill import PrefillBench
from bench_mla_report import Result, render, save
from bench_mla_shapes import (
    BUDGET,
    DECODE_PAGES,
    DECODE_SHAPES,
    QUICK_DECODE,
    MlaWorkload,
    PrefillShape,
    decode_workloads,
    mla_flows,
    prefill_shapes,
    schedule_shapes,
)
from bench_shapes import BenchError, FlowChoice
from bench_timing import measure_bandwidth, measure_matmul
from rich.console import Console
from triton.errors import TritonError

from flowlib.errors import FlowlibError

PARTS = ("prefill", "schedule", "decode", "tiles")
_WIDTH = 250
LIBRARIES = ("FlashInfer", "FA3")
_GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        parts: of PARTS, in this order.
        prefill, schedule, works, choices: shapes of the parts, and flows.
        heads: of the tile sweep; tiles: more tile sizes, by kernel.
        out: folder of the results.
        device: ``cuda``, or ``cpu`` for the gate alone.
        seconds: of replays per number.
        time_budget: seconds after which what is left is skipped.
        gate_only: no times; compile_peers: let FlashInfer compile; without: libraries whose kernels are left out.
    """

    parts: tuple[str, ...]
    prefill: tuple[PrefillShape, ...]
    schedule: tuple[PrefillShape, ...]
    works: tuple[MlaWorkload, ...]
    choices: tuple[FlowChoice, ...]
    heads: tuple[int, ...]
    tiles: tuple[tuple[str, tiles.Tile], ...]
    out: Path
    device: str = "cuda"
    seconds: float = 0.1
    time_budget: float | None = None
    gate_only: bool = False
    compile_peers: bool = False
    without: tuple[str, ...] = ()


class MlaBench:
    """One run.

    Args:
        settings: what to run.
        console: where its progress goes.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        self.start = time.monotonic()
        told = {k: v for k, v in asdict(settings).items() if k not in ("out", "device")}
        self.result = Result(bench_decode.machine(settings.device), told)
        self.timing = settings.device != "cpu" and not settings.gate_only
        self.l2 = torch.cuda.get_device_properties(settings.device).L2_cache_size if self.timing else 1
        self.failed = False

    def run(self) -> int:
        """The exit status: 0, or 1 behind a red gate, after a failure, or without a single number."""
        if self.timing:
            self._measure_rates()
        else:
            self.result.note("gate only: no speed is measured" + ("" if self.settings.device != "cpu" else " on a CPU"))
        parts: dict[str, Callable[[], None]] = {
            "prefill": lambda: self._prefill("prefill", self.settings.prefill),
            "schedule": lambda: self._prefill("schedule", self.settings.schedule),
            "decode": self._decode, "tiles": self._tiles,
        }  # fmt: skip
        for part in self.settings.parts:
            try:
                parts[part]()
            except (RuntimeError, TritonError) as error:
                self.failed = True
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self.result.note(f"{part}: not measured to its end: {text}")
            if self.timing:
                torch.cuda.empty_cache()
            if self.result.verdicts and not self.result.green:
                break
        paths = save(self.result, self.settings.out)
        render(self.result, self.console)
        self.console.print("Saved: " + ", ".join(str(p) for p in paths) + f" after {self._seconds():.0f} s")
        return 0 if self.result.green and (self.result.timed or not self.timing) and not self.failed else 1

    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _told(self, text: str) -> None:
        self.console.print(f"[{self._seconds():4.0f} s] {text}")

    def _spent(self, what: str) -> bool:
        """Whether nothing more may begin; what is skipped is noted."""
        budget = self.settings.time_budget
        spent = budget is not None and self._seconds() >= budget
        if spent:
            self.result.note(f"{what}: skipped, the time budget of {budget:.0f} s is spent")
        return spent

    def _measure_rates(self) -> None:
        device, seconds = self.settings.device, 2 * self.settings.seconds
        memory = torch.empty(_GIB, dtype=torch.bfloat16, device=device).normal_()
        found = asdict(measure_bandwidth(memory, seconds))
        del memory
        self.result.rates = {**found, "matmul": measure_matmul(device, seconds)}

    def _prefill(self, part: str, shapes: Sequence[PrefillShape]) -> None:
        rates = (self.result.rates["read"], self.result.rates["matmul"]) if self.timing else None
        bench = PrefillBench(
            self.settings.device, self.settings.seconds, self.l2, rates, self.settings.compile_peers,
            self.result.note, self.settings.without,
        )  # fmt: skip
        for shape in shapes:
            where = f"{shape.label}, {shape.heads} heads, workspace {shape.workspace:,}"
            if self._spent(f"{part} {where}"):
                continue
            self._told(f"{part}: {where}")
            before = len(bench.verdicts)
            for row in bench.run(part, shape):
                self.result.prefill.append(row)
            self.result.verdicts += bench.verdicts[before:]
            self.failed |= bench.failed
            if not self.result.green:
                return
            save(self.result, self.settings.out, picture=False)

    def _decode(self) -> None:
        s = self.settings
        left = None if s.time_budget is None else max(0.0, s.time_budget - self._seconds())
        asked = bench_decode.Settings(
            s.works, s.choices, s.out, s.device, s.seconds, left, gate_only=s.gate_only, compile_peers=s.compile_peers
        )

        def keep() -> None:
            self.result.decode = bench.rows(s.works, self.result.rates["matmul"])
            save(self.result, s.out, picture=False)

        bench = LatentBench(asked, self.console, keep, s.without)
        bench.collect()
        self.result.verdicts += bench.result.verdicts
        if bench.result.rows and self.result.green:
            keep()
        self.failed |= bench.failed
        for note in bench.result.notes:
            self.result.note(note)

    def _tiles(self) -> None:
        s = self.settings
        for case in tiles.cases(s.device, self.l2, s.heads, small=s.device == "cpu"):
            if self._spent(f"tiles, {case.name}"):
                continue
            self._told(f"tiles: {case.kernel}, {case.name}")
            self.result.verdicts += tiles.gate(case)
            if not self.result.green:
                return
            if self.timing:
                more = [tile for kernel, tile in s.tiles if kernel == case.kernel]
                self.result.tiles += tiles.sweep(
                    case, (*more, *tiles.TILES[case.kernel]), s.seconds / 3, self.result.note
                )


def _libraries(text: str) -> tuple[str, ...]:
    """The names of ``FlashInfer,FA3``. Raises BenchError."""
    names = tuple(text.split(",")) if text else ()
    for name in names:
        if name not in LIBRARIES:
            raise BenchError(f"--without is {text!r}, expected names among {', '.join(LIBRARIES)}")
    return names


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise BenchError(f"{name} {text}: expected numbers of at least 1, comma separated")
    return found


def _parts(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    wrong = [part for part in asked if part not in PARTS]
    if wrong:
        raise BenchError(f"--only {wrong[0]}: expected some of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in asked)


def main(
    only: Annotated[str, typer.Option(help="Parts, comma separated; tiles too, if asked for.")] = "",
    prefill: Annotated[str, typer.Option(help="Context+new tokens, comma separated: 60000+4096,32k+512.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads, comma separated.")] = "16,128",
    page: Annotated[int, typer.Option(help="Tokens per page of prefill.", min=1, max=128)] = 16,
    workspace: Annotated[str, typer.Option(help="Workspace rows of the schedules, comma separated.")] = "65536,32768",
    decode_shape: Annotated[str, typer.Option(help="Batch x context, comma separated: 16x64k.")] = "",
    decode_page: Annotated[str, typer.Option(help="Page sizes of decode, comma separated.")] = "",
    budget: Annotated[int, typer.Option(help="Tokens chosen besides the reserved pages.", min=1)] = BUDGET,
    flow: Annotated[list[str] | None, typer.Option(help="A flow over latents; may be repeated.")] = None,
    tile: Annotated[
        list[str] | None, typer.Option(help="decode:HEADS,TOKENS,WARPS,STAGES or prefill:QUERIES,KEYS,WARPS,STAGES.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The goals' shapes only, short timing.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Replays per number, in seconds (0.1; --quick: 0.03).")] = None,
    time_budget: Annotated[float | None, typer.Option(help="Seconds after which what is left is skipped.")] = None,
    gate_only: Annotated[bool, typer.Option("--gate-only", help="Correctness only.")] = False,
    compile_peers: Annotated[bool, typer.Option("--compile-peers", help="Let FlashInfer compile kernels.")] = False,
    without: Annotated[
        str, typer.Option(help="Libraries left out, comma separated: FlashInfer, FA3; some builds end the process.")
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the gate alone.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder for bench_mla.json and .png.")] = Path("out"),
) -> None:
    """Times latent prefill and decode beside others and the floor, behind a correctness gate."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    try:
        if device != "cpu" and not torch.cuda.is_available():
            raise BenchError("no CUDA GPU is at hand: on a CPU, --device cpu runs the gate alone")
        asked = tuple(prefill.split(",")) if prefill else ("60000+4096",) if quick else ()
        shapes = tuple(decode_shape.split(",")) if decode_shape else QUICK_DECODE if quick else DECODE_SHAPES
        pages = _numbers("--decode-page", decode_page) if decode_page else DECODE_PAGES[:1] if quick else DECODE_PAGES
        count = _numbers("--heads", heads)
        rows = _numbers("--workspace", workspace)
        settings = Settings(
            _parts(only or "prefill,schedule,decode"), tuple(prefill_shapes(asked, count, page)),
            tuple(schedule_shapes(count, page, rows[:1] if quick else rows)),
            tuple(decode_workloads(shapes, count, pages, budget)), mla_flows(flow or ()), count,
            tuple(tiles.parse_tile(t) for t in tile or ()), out, device,
            seconds if seconds is not None else 0.03 if quick else 0.1, time_budget, gate_only, compile_peers,
            _libraries(without),
        )  # fmt: skip
        code = MlaBench(settings, console).run()
    except (BenchError, FlowlibError) as error:
        console.print(f"bench_mla: {error}", style="red")
        raise typer.Exit(2) from None
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
