"""One decode step, stage by stage, beside dense attention and beside the memory floor.

For each flow and shape: time of update, planning, score, select, attend and of the whole step per layer, from CUDA
graphs of 32 layers whose pools rotate, dense FlashInfer and FlashAttention 3 over the same pools in the same run, the
bytes a step must move and the time that takes at the read bandwidth measured in the same run. A correctness gate comes
first: behind a red one no speed is printed, and the exit status is 1. On a CPU only the gate runs (interpreted).

    python experiments/bench_decode.py --out out --time-budget 240
    python experiments/bench_decode.py --quick
    TRITON_INTERPRET=1 python experiments/bench_decode.py --device cpu --shape 2x64 --top-k 2 --head-dim 16
"""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import bench_gate
import torch
import triton
import typer
from bench_bytes import count_bytes
from bench_measure import LAYERS, measure_dense, measure_flow
from bench_peers import Peers
from bench_pools import MAX_POOLS, Arena, Problem, Rotation, make_pools, needed, pool_bytes, problem, rotation
from bench_report import Result, render, save
from bench_shapes import FLOWS, QUICK_SHAPES, SHAPES, BenchError, FlowChoice, Numbers, Workload, parse_flow, workloads
from bench_timing import Bandwidth, measure_bandwidth
from rich.console import Console
from triton.errors import TritonError

import flowlib
from flowlib.errors import FlowlibError

_ARENA_SHARE = 0.55
_MEMORY_SHARE = 0.85
_GATE_SHARE = 0.5
_WIDTH = 210


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        works, choices: workloads and flows.
        out: folder of the results.
        device: ``cuda``, or ``cpu`` for the gate alone.
        seconds: of replays per number.
        time_budget: seconds after which what is left is skipped.
        stages_only: no dense kernels.
        gate_only: no times.
        compile_peers: let FlashInfer compile.
        more: numbers of the spec besides.
    """

    works: tuple[Workload, ...]
    choices: tuple[FlowChoice, ...]
    out: Path
    device: str = "cuda"
    seconds: float = 0.1
    time_budget: float | None = None
    stages_only: bool = False
    gate_only: bool = False
    compile_peers: bool = False
    dense_below: int = 0

    def plan(self, choice: FlowChoice, work: Workload) -> flowlib.Plan:
        """A flow's plan; flows with state take no `dense_below`."""
        plan = choice.plan(work)
        return plan if plan.state_fields or not self.dense_below else choice.plan(work, dense_below=self.dense_below)


class Bench:
    """One run.

    Args:
        settings: what to run.
        console: where its progress goes.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        self.start = time.monotonic()
        self.result = Result(machine(settings.device), _told(settings))
        self.cuda = settings.device != "cpu"
        self.l2 = torch.cuda.get_device_properties(settings.device).L2_cache_size if self.cuda else 1
        self.plans = self._plans()
        self.gated: list[Workload] = []
        self.failed = False

    def run(self) -> int:
        """The exit status: 0, or 1 behind a red gate, after a failure, or without a single number."""
        self.collect()
        paths = save(self.result, self.settings.out)
        render(self.result, self.console)
        self.console.print("Saved: " + ", ".join(str(p) for p in paths) + f" after {self._seconds():.0f} s")
        timed = bool(self.result.rows) or self.settings.gate_only or not self.cuda
        return 0 if self.result.green and timed and not self.failed else 1

    def collect(self) -> None:
        """Fills in the result: the gate, and behind a green one the times."""
        settings = self.settings
        arena = self.arena(self._arena_bytes())
        for work in self.plans:
            if self._left(_GATE_SHARE) or not self.gated:
                self._gate(work, arena)
            else:
                self.result.note(f"{work.label}: skipped, half of the time budget went into the gate before it")
            if not self.result.green:
                break
        if self.result.green and self.cuda and not settings.gate_only:
            self._measure(arena)
        elif self.result.green:
            self.result.note("gate only: no speed is measured" + ("" if self.cuda else " on a CPU"))

    def arena(self, size: int) -> Arena:
        """Memory for the pools."""
        return Arena(size, self.settings.device)

    def peers(self) -> Peers:
        """The dense kernels to measure beside."""
        return Peers(self.settings.compile_peers)

    def keep(self) -> None:
        """Saves what is known so far."""
        save(self.result, self.settings.out, picture=False)

    def _plans(self) -> dict[Workload, list[tuple[FlowChoice, flowlib.Plan]]]:
        """The flows' plans by workload; a flow that refuses the numbers of a workload is left out there, and noted."""
        found: dict[Workload, list[tuple[FlowChoice, flowlib.Plan]]] = {}
        for choice in self.settings.choices:
            choice.build()
            for work in self.settings.works:
                try:
                    found.setdefault(work, []).append((choice, self.settings.plan(choice, work)))
                except FlowlibError as error:
                    self.result.note(f"{choice.label} does not run {work.label}: {error}")
        made = {work: found[work] for work in self.settings.works if found.get(work)}
        if not made:
            raise BenchError("; ".join(self.result.notes))
        return made

    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _left(self, share: float = 1.0) -> bool:
        budget = self.settings.time_budget
        return budget is None or self._seconds() < share * budget

    def _gate(self, work: Workload, arena: Arena) -> None:
        made = problem(work, self.settings.device)
        for choice, plan in self.plans[work]:
            self.console.print(f"[{self._seconds():4.0f} s] gate: {work.label}, {choice.label}")
            try:
                store = make_pools(plan, made, arena, 1)[0]
                verdicts = bench_gate.gate(choice, bench_gate.run_step(plan, made, store))
            except (TritonError, RuntimeError) as error:
                verdicts = [bench_gate.crashed(choice, work.label, error)]
            self.result.verdicts += verdicts
            if bench_gate.failures(verdicts):
                return
        self.gated.append(work)

    def _measure(self, arena: Arena) -> None:
        settings = self.settings
        gc.collect()
        gc.freeze()  # every capture collects garbage: what is imported by now need not be looked at again
        found = self._bandwidth(arena)
        peers = None if settings.stages_only else self.peers()
        if peers is None:
            self.result.note("dense kernels are not measured (--stages-only)")
        else:
            self.result.machine["peers"] = peers.versions
        for work in self.gated:
            if not self._left():
                self.result.note(f"{work.label}: skipped, the time budget of {settings.time_budget:.0f} s is spent")
                continue
            try:
                self._measure_work(work, arena, peers, found)
            except (RuntimeError, TritonError) as error:
                self.failed = True
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self.result.note(f"{work.label}: not measured to its end: {text}")
            gc.collect()
            torch.cuda.empty_cache()
            self.keep()

    def _bandwidth(self, arena: Arena) -> Bandwidth:
        found = measure_bandwidth(arena.k, 2 * self.settings.seconds)
        self.result.bandwidth = asdict(found)
        return found

    def _measure_work(self, work: Workload, arena: Arena, peers: Peers | None, found: Bandwidth) -> None:
        settings, made = self.settings, problem(work, self.settings.device)
        plans = [plan for _, plan in self.plans[work]]
        turn = self._rotation(made, plans, arena)
        dense = {}
        if peers is not None:
            stores = make_pools(plans[0], made, arena, turn.step)
            dense, refused = measure_dense(peers, made, stores, settings.seconds)
            for name, why in refused.items():
                where = "" if name in peers.absent else f" at {work.label}"
                self.result.note(f"{name} is not measured{where}: {why}")
            del stores
        for choice, plan in self.plans[work]:
            self.console.print(f"[{self._seconds():4.0f} s] time: {work.label}, {choice.label}, {turn.pools} pools")
            stores = make_pools(plan, made, arena, turn.pools)
            row = measure_flow(
                choice.label, plan, made, stores, turn, settings.seconds, found.read, self.l2, dense
            )  # fmt: skip
            self.result.rows.append(row)
            del stores

    def _rotation(self, made: Problem, plans: Sequence[flowlib.Plan], arena: Arena) -> Rotation:
        """Pools for all flows of a workload: as the flow that reads least needs them."""
        counts = [count_bytes(p, made.workload.lengths, layers=LAYERS, score_all=True) for p in plans]
        fields = max(p.field_bytes_per_page for p in plans) * made.num_pages
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        fit = min(arena.size // pool_bytes(made.workload), int(_MEMORY_SHARE * free / fields) if fields else 1 << 30)
        stages = [size for c in counts for size in (c.score, c.attend)]
        return rotation(min(c.total for c in counts), stages, self.l2, int(fit), LAYERS)

    def _arena_bytes(self) -> int:
        """K and V for the hungriest workload, as far as the memory goes; for the gate one pool is enough."""
        sizes = {work: pool_bytes(work) for work in self.plans}
        if not self.cuda or self.settings.gate_only:
            return max(sizes.values())
        wanted = 0
        for work, size in sizes.items():
            counts = [count_bytes(p, work.lengths, layers=LAYERS, score_all=True) for _, p in self.plans[work]]
            most = max(needed(x, self.l2) for c in counts for x in (c.total, c.score, c.attend))
            turn = rotation(min(c.total for c in counts), [], self.l2, 1 << 30, LAYERS)
            wanted = max(wanted, size * max(turn.step, min(most, MAX_POOLS)))
        free = torch.cuda.mem_get_info()[0]
        limit = int(_ARENA_SHARE * free)
        if limit < max(sizes.values()):
            raise BenchError(
                f"one pool of the largest shape needs {max(sizes.values()) / 1e9:.1f} GB of K and V, "
                f"{limit / 1e9:.1f} GB are at hand"
            )
        return max(min(wanted, limit), max(sizes.values()), 8 << 30 if limit > 8 << 30 else 0)


def machine(device: str) -> dict[str, object]:
    """The GPU and the versions."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flowlib": flowlib.__version__,
    }
    if device != "cpu":
        found = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": found.name, "multiprocessors": found.multi_processor_count, "l2_bytes": found.L2_cache_size,
            "memory_bytes": found.total_memory,
        }  # fmt: skip
    return facts


def _told(settings: Settings) -> dict[str, object]:
    return {
        "flows": [c.label for c in settings.choices],
        "workloads": [{"label": w.label, "lengths": w.lengths, **asdict(w.numbers)} for w in settings.works],
        "seconds": settings.seconds, "time_budget": settings.time_budget, "stages_only": settings.stages_only,
        "dense_below": settings.dense_below, "layers": LAYERS,
    }  # fmt: skip


def main(
    shape: Annotated[str, typer.Option(help="Batch x context, comma separated: 16x32k, 1x2048, 16xragged.")] = "",
    flow: Annotated[
        list[str] | None, typer.Option(help='A flow, name+fp8, or name:{"option": value}; may be repeated.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three shapes, short timing: under a minute.")] = False,
    also: Annotated[
        bool, typer.Option("--also", help="Also a ragged batch, other groups, head and page sizes.")
    ] = False,
    group_size: Annotated[int, typer.Option(help="Query heads per kv head.", min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(help="kv heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens per page.", min=1, max=128)] = 16,
    top_k: Annotated[int, typer.Option(help="Pages chosen besides the reserved ones.", min=0)] = 128,
    bos: Annotated[int, typer.Option(help="First pages, always attended.", min=0)] = 1,
    eos: Annotated[int, typer.Option(help="Last pages, always attended.", min=1)] = 1,
    dense_below: Annotated[int, typer.Option(help="Rows up to this many tokens in full.", min=0)] = 0,
    time_budget: Annotated[float | None, typer.Option(help="Seconds after which what is left is skipped.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Replays per number, in seconds (0.1; --quick: 0.03).")] = None,
    stages_only: Annotated[bool, typer.Option("--stages-only", help="flowlib's stages only, no peers.")] = False,
    gate_only: Annotated[bool, typer.Option("--gate-only", help="Correctness only.")] = False,
    compile_peers: Annotated[bool, typer.Option("--compile-peers", help="Let FlashInfer compile a kernel.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for the gate alone.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder for bench_decode.json and .png.")] = Path("out"),
) -> None:
    """Times one decode step of flows beside dense attention and the memory floor, behind a correctness gate."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    try:
        if device != "cpu" and not torch.cuda.is_available():
            raise BenchError("no CUDA GPU is at hand: on a CPU, --device cpu runs the gate alone")
        shapes = tuple(shape.split(",")) if shape else QUICK_SHAPES if quick else SHAPES
        numbers = Numbers(group_size, kv_heads, head_dim, page_size, top_k, bos, eos)
        settings = Settings(
            tuple(workloads(shapes, numbers, also)), tuple(parse_flow(f) for f in flow or FLOWS), out, device,
            seconds if seconds is not None else 0.03 if quick else 0.1, time_budget, stages_only, gate_only,
            compile_peers, dense_below,
        )  # fmt: skip
        code = Bench(settings, console).run()
    except (BenchError, FlowlibError) as error:
        console.print(f"bench_decode: {error}", style="red")
        raise typer.Exit(2) from None
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
