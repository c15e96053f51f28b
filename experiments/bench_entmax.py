"""Entmax decoding beside dense softmax, full entmax and the memory floor: top-k and Gaussian selection.

A batch is decoded over paged caches of iid normal keys, as in EntmaxKV's public benchmark (arXiv:2605.21649), whose
options these are. For each batch and context: time of a step and of its stages, from CUDA graphs over caches that take
turns; the same kernel over every page; FlashInfer's dense softmax over the same caches; bytes a step must move, and
what that takes at the read bandwidth measured in the same run. A correctness gate (sampled heads against float64)
comes first: behind a red one no speed is printed, and the exit status is 1. On a CPU only the gate runs, interpreted.

    python experiments/bench_entmax.py gaussian --out out
    python experiments/bench_entmax.py gaussian --stats-dtype float8_e4m3fn --batch 1
    python experiments/bench_entmax.py statistics
    python experiments/bench_entmax.py topk --coverage 0.25 --kv-len 32k,64k,128k --batch 1
    TRITON_INTERPRET=1 python experiments/bench_entmax.py topk --device cpu --gate-only --kv-len 300 --batch 1
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import triton
import typer
from bench_entmax_gate import gate
from bench_entmax_measure import Timing, measure
from bench_entmax_report import Result, render, save
from bench_entmax_scene import (
    DTYPES,
    GAUSSIAN,
    STATS_DTYPES,
    TOPK,
    Options,
    Scene,
    Work,
    check_options,
    parse_sizes,
    told,
    works,
)
from bench_entmax_stats import qualities, quality_table
from bench_gate import Verdict
from bench_peers import Peers
from bench_shapes import BenchError
from bench_timing import measure_bandwidth
from rich.console import Console
from triton.errors import TritonError

import flowlib
from flowlib.errors import FlowlibError

_WIDTH = 270
_CACHE_SHARE = 0.7
_BANDWIDTH_VALUES = 1 << 30
_BANDWIDTH_SECONDS = 0.2


@dataclass(frozen=True)
class How:
    """How to run.

    Args:
        timing: replays.
        out: folder of the results.
        device: ``cuda``, or ``cpu`` for the gate alone.
        time_budget: seconds after which what is left is skipped.
        gate_only: no times.
        compile_peers: let FlashInfer compile.
    """

    timing: Timing
    out: Path
    device: str = "cuda"
    time_budget: float | None = None
    gate_only: bool = False
    compile_peers: bool = False


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        options: numbers of the run.
        works: batches and lengths.
        fixed: tokens of the work that shows the fixed cost; 0 without one.
        how: on which device, how often, where to.
    """

    options: Options
    works: tuple[Work, ...]
    fixed: int
    how: How


class Bench:
    """One run.

    Args:
        settings: what to run.
        console: where its progress goes.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console, self.start = settings, console, time.monotonic()
        facts = {"torch": torch.__version__, "triton": triton.__version__, "flowlib": flowlib.__version__}
        self.result = Result({**facts}, _told(settings), settings.fixed)
        self.device, self.cuda, self.l2, self.failed = settings.how.device, settings.how.device != "cpu", 1, False
        self.support: dict[Work, float] = {}
        if self.cuda:
            found = torch.cuda.get_device_properties(self.device)
            self.l2 = found.L2_cache_size
            self.result.machine |= {"gpu": found.name, "l2_bytes": self.l2, "memory_bytes": found.total_memory}

    def run(self) -> int:
        """The exit status: 0, or 1 behind a red gate, after a failure, or without a single number."""
        settings, how, result = self.settings, self.settings.how, self.result
        self._gate()
        timed = self.cuda and not how.gate_only
        if result.green and timed:
            self._measure()
        elif result.green:
            result.note("gate only: no speed is measured" + ("" if self.cuda else " on a CPU"))
        paths = save(result, how.out, settings.options.method)
        render(result, self.console)
        self.console.print("Saved: " + ", ".join(str(p) for p in paths) + f" after {self._seconds():.0f} s")
        return 0 if result.green and not self.failed and (result.rows or not timed) else 1

    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _gate(self) -> None:
        """Every work, until one is red; what does not fit the memory is left out, and noted."""
        for work in self.settings.works:
            self.console.print(f"[{self._seconds():4.0f} s] gate: {work.label}")
            try:
                verdicts, self.support[work] = gate(self._scene(work))
            except torch.cuda.OutOfMemoryError:
                self.result.note(f"{work.label} does not fit the GPU's memory")
                verdicts = []
            except (TritonError, RuntimeError) as error:
                verdicts = [self._crashed(work, error)]
            self._free()
            self.result.verdicts += verdicts
            if not all(v.ok for v in verdicts):
                return

    def _crashed(self, work: Work, error: BaseException) -> Verdict:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Verdict(self.settings.options.method, work.label, "run", "all", float("inf"), 0.0, False, text)

    def _scene(self, work: Work) -> Scene:
        scene = Scene(self.settings.options, work, self.device)
        scene.add_cache()
        return scene

    def _free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _measure(self) -> None:
        how, result = self.settings.how, self.result
        memory = torch.empty(_BANDWIDTH_VALUES, dtype=torch.bfloat16, device=self.device).normal_()
        result.bandwidth = asdict(measure_bandwidth(memory, _BANDWIDTH_SECONDS))
        del memory
        peers = Peers(how.compile_peers)
        result.machine["peers"] = peers.versions
        for work in self.support:
            self._free()
            if how.time_budget is not None and self._seconds() > how.time_budget:
                result.note(f"{work.label}: skipped, the time budget of {how.time_budget:.0f} s is spent")
                continue
            self.console.print(f"[{self._seconds():4.0f} s] time: {work.label}")
            try:
                self._measure_work(work, peers)
            except torch.cuda.OutOfMemoryError:
                result.note(f"{work.label} does not fit the GPU's memory with what its kernels work in")
            except (TritonError, RuntimeError) as error:
                self.failed = True
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                result.note(f"{work.label}: not measured to its end: {text}")
            save(result, how.out, self.settings.options.method, picture=False)

    def _measure_work(self, work: Work, peers: Peers) -> None:
        how, scene = self.settings.how, self._scene(work)
        self._free()
        free = int(_CACHE_SHARE * torch.cuda.mem_get_info()[0])
        row, refused = measure(
            scene, peers, how.timing, self.support[work], self.result.bandwidth["read"], self.l2, free,
            how.compile_peers,
        )  # fmt: skip
        self.result.rows.append(row)
        for name, why in refused.items():
            self.result.note(f"{name} is not measured{'' if name in peers.absent else f' at {work.label}'}: {why}")


def _told(settings: Settings) -> dict[str, object]:
    return told(settings.options) | {
        "works": [asdict(w) for w in settings.works], "fixed": settings.fixed, **asdict(settings.how.timing),
        "time_budget": settings.how.time_budget,
    }  # fmt: skip


KvLen = Annotated[str, typer.Option(help="Contexts, comma separated: 32k,64k,1m; the query's own token counts.")]
Batch = Annotated[str, typer.Option(help="Batches, comma separated.")]
KvHeads = Annotated[int, typer.Option(help="kv heads.", min=1)]
Heads = Annotated[int, typer.Option(help="Query heads.", min=1)]
HeadDim = Annotated[int, typer.Option(help="Size of a head.", min=1)]
PageSize = Annotated[int, typer.Option(help="Tokens per page, a power of two.", min=1)]
Dtype = Annotated[str, typer.Option(help=f"Of the cache and the queries: {', '.join(DTYPES)}.")]
Alpha = Annotated[float, typer.Option(help="Of entmax, above 1 and at most 2.")]
Warmup = Annotated[int, typer.Option(help="Replays before those that count.", min=0)]
Iters = Annotated[int, typer.Option(help="Replays that count.", min=1)]
Fixed = Annotated[int, typer.Option(help="Tokens of the single row that shows the fixed cost; 0 leaves it out.", min=0)]
Budget = Annotated[float | None, typer.Option(help="Seconds after which what is left is skipped.")]
Coverage = Annotated[float, typer.Option(help="Share of the pages that topk attends to.")]
Certify = Annotated[bool, typer.Option("--certify", help="Keep the bounds as well: certificates.")]
StatsDtype = Annotated[
    str, typer.Option(help=f"Of means and deviations: {', '.join(STATS_DTYPES)}; float8 is that of the bounds, too.")
]
GateOnly = Annotated[bool, typer.Option("--gate-only", help="Correctness only.")]
CompilePeers = Annotated[bool, typer.Option("--compile-peers", help="Let FlashInfer compile a kernel.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu for the gate alone.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON and PNG files.")]

KV_LENS, BATCHES, FIXED = "32k,64k,128k,256k,512k,1m", "1,8,16", 1024
_HELP = "Entmax decoding beside dense softmax, full entmax and the memory floor."
app = typer.Typer(add_completion=False, help=_HELP, pretty_exceptions_enable=False)


@app.command()
def topk(
    kv_len: KvLen = KV_LENS, batch: Batch = BATCHES, kv_heads: KvHeads = 8, heads: Heads = 8, head_dim: HeadDim = 64,
    page_size: PageSize = 16, dtype: Dtype = "float16", alpha: Alpha = 1.5,
    coverage: Coverage = 0.25,
    stats_dtype: StatsDtype = "float32",
    warmup: Warmup = 10, iters: Iters = 50, fixed_len: Fixed = FIXED, time_budget: Budget = None,
    gate_only: GateOnly = False, compile_peers: CompilePeers = False, device: Device = "cuda", out: Out = Path("out"),
) -> None:  # fmt: skip
    """The pages with the highest bounds of each query head, and the last one."""
    options = Options(
        TOPK, kv_heads, heads, head_dim, page_size, alpha=alpha, coverage=coverage,
        stats_dtype=_dtype("--stats-dtype", stats_dtype, STATS_DTYPES),
    )  # fmt: skip
    how = How(Timing(warmup, iters), out, device, time_budget, gate_only, compile_peers)
    _start(options, dtype, kv_len, batch, fixed_len, how)


@app.command()
def gaussian(
    kv_len: KvLen = KV_LENS, batch: Batch = BATCHES, kv_heads: KvHeads = 8, heads: Heads = 8, head_dim: HeadDim = 64,
    page_size: PageSize = 16, dtype: Dtype = "float16", alpha: Alpha = 1.5,
    tau_mode: Annotated[str, typer.Option(help="exact, corrected or fixed.")] = "corrected",
    niter: Annotated[int, typer.Option(help="Steps of tau_mode corrected.", min=0)] = 3,
    safety_margin_z: Annotated[float, typer.Option(help="Deviations by which the threshold is lowered.")] = 0.0,
    max_quantile: Annotated[float, typer.Option(help="Quantile of a page's likely maximum.")] = 0.995,
    excess: Annotated[float, typer.Option(help="Share of the height above typical maxima that is taken off.")] = 0.1,
    certify: Certify = False,
    stats_dtype: StatsDtype = "float32",
    warmup: Warmup = 10, iters: Iters = 50, fixed_len: Fixed = FIXED, time_budget: Budget = None,
    gate_only: GateOnly = False, compile_peers: CompilePeers = False, device: Device = "cuda", out: Out = Path("out"),
) -> None:  # fmt: skip
    """The pages whose likely largest score exceeds an estimated threshold, and the last one."""
    options = Options(
        GAUSSIAN, kv_heads, heads, head_dim, page_size, alpha=alpha, tau_mode=tau_mode.lower(), niter=niter,
        safety_margin_z=safety_margin_z, max_quantile=max_quantile, excess=excess, certify=certify,
        stats_dtype=_dtype("--stats-dtype", stats_dtype, STATS_DTYPES),
    )  # fmt: skip
    how = How(Timing(warmup, iters), out, device, time_budget, gate_only, compile_peers)
    _start(options, dtype, kv_len, batch, fixed_len, how)


@app.command()
def statistics(
    kv_len: KvLen = "32k,64k,128k", batch: Batch = "1", kv_heads: KvHeads = 8, heads: Heads = 8, head_dim: HeadDim = 64,
    page_size: PageSize = 16, dtype: Dtype = "float16", alpha: Alpha = 1.5,
    select: Annotated[str, typer.Option(help="gaussian or topk.")] = GAUSSIAN, coverage: Coverage = 0.25,
    offset: Annotated[float, typer.Option(help="Deviation of what all keys of a channel have in common.")] = 0.0,
    certify: Certify = False, device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:  # fmt: skip
    """What dtypes of the statistics do to a selection: weight kept and error, by the reference; no times."""
    if select not in (GAUSSIAN, TOPK):
        raise typer.BadParameter(f"--select {select}: expected {GAUSSIAN} or {TOPK}")
    options = Options(
        select, kv_heads, heads, head_dim, page_size, alpha=alpha, coverage=coverage, certify=certify
    )  # fmt: skip
    console = _console()
    try:
        options = dataclasses.replace(options, dtype=_dtype("--dtype", dtype))
        check_options(options)
        asked = works(parse_sizes("--batch", batch), parse_sizes("--kv-len", kv_len), 0)
        rows = [row for work in asked for row in qualities(options, work, offset, device)]
    except (BenchError, FlowlibError) as error:
        _refuse(console, error)
    console.print(quality_table(select, rows))


def _dtype(option: str, name: str, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in known:
        raise typer.BadParameter(f"{option} {name}: expected one of {', '.join(known)}")
    return known[name]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)


def _refuse(console: Console, error: Exception) -> NoReturn:
    console.print(f"bench_entmax: {error}", style="red")
    raise typer.Exit(2) from None


def _start(options: Options, dtype: str, kv_len: str, batch: str, fixed: int, how: How) -> None:
    console = _console()
    try:
        options = dataclasses.replace(options, dtype=_dtype("--dtype", dtype))
        check_options(options)
        if how.device == "cpu" and not how.gate_only:
            raise BenchError("a CPU is not timed: --device cpu needs --gate-only, which runs the gate alone")
        if how.device != "cpu" and not torch.cuda.is_available():
            raise BenchError("no CUDA GPU is at hand: on a CPU, --device cpu --gate-only runs the gate alone")
        asked = works(parse_sizes("--batch", batch), parse_sizes("--kv-len", kv_len), fixed)
        code = Bench(Settings(options, asked, fixed, how), console).run()
    except (BenchError, FlowlibError) as error:
        _refuse(console, error)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
