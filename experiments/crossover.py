"""From which context on is a sparse step faster than attending to everything, with the same kernels?

For each batch size the context grows from the budget; at each one the step runs twice, sparse and with `dense_below`
above the context, from CUDA graphs whose pools rotate. The crossover is the first context where sparse is faster.

    python experiments/crossover.py --flow gqa_quest_sparse_attention
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_bytes import count_bytes
from bench_measure import LAYERS, measure_step
from bench_pools import Arena, make_pools, pool_bytes, problem, rotation
from bench_shapes import BenchError, Numbers, Workload, canonical, parse_flow
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowlib.errors import FlowlibError

FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_COVERED = (1 << 31) - 1


def workload(batch: int, context: int, numbers: Numbers) -> Workload:
    """`batch` requests of `context` tokens."""
    lengths = (context,) * batch
    return Workload(canonical(lengths), lengths, numbers, False)


def compare(flow: str, work: Workload, arena: Arena, seconds: float) -> tuple[float, float]:
    """Microseconds a layer of the sparse step and of the dense one."""
    made, l2 = problem(work, "cuda"), torch.cuda.get_device_properties(0).L2_cache_size
    times = []
    for below in (0, _COVERED):
        plan = parse_flow(flow).plan(work, dense_below=below)
        moved = count_bytes(plan, work.lengths, layers=LAYERS, score_all=True)
        turn = rotation(moved.total, [], l2, arena.size // pool_bytes(work), LAYERS)
        times.append(measure_step(plan, made, make_pools(plan, made, arena, turn.step), seconds).us)
    return times[0], times[1]


def main(
    flow: Annotated[str, typer.Option(help="A flow without state, or name+fp8.")] = "gqa_quest_sparse_attention",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma separated.")] = "1,4,16,64",
    top_k: Annotated[int, typer.Option(help="Pages chosen besides the reserved ones.", min=1)] = 128,
    seconds: Annotated[float, typer.Option(help="Of replays per number.")] = 0.02,
    out: Annotated[Path, typer.Option(help="Folder for crossover.json.")] = Path("out"),
) -> None:
    """Prints sparse and dense times over contexts, and the crossover of each batch size."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    numbers = Numbers(top_k=top_k)
    covered = (top_k + numbers.bos + numbers.eos) * numbers.page_size
    table = Table(title=f"{flow}: microseconds a layer", title_justify="left", box=SIMPLE_HEAD)
    for name in ("batch", "context", "context / budget", "sparse", "dense"):
        table.add_column(name, justify="right")
    found: dict[int, int | None] = {}
    rows = []
    try:
        if not torch.cuda.is_available():
            raise BenchError("no CUDA GPU is at hand")
        arena = Arena(24 << 30, "cuda")
        for size in (int(n) for n in batch.split(",")):
            found[size] = None
            for factor in FACTORS:
                context = int(factor * covered) // numbers.page_size * numbers.page_size
                sparse, dense = compare(flow, workload(size, context, numbers), arena, seconds)
                rows.append({"batch": size, "context": context, "sparse_us": sparse, "dense_us": dense})
                table.add_row(str(size), f"{context:,}", f"{factor:g}", f"{sparse:.1f}", f"{dense:.1f}")
                if factor > 1 and sparse < dense:
                    found[size] = context
                    break
    except (BenchError, FlowlibError) as error:
        console.print(f"crossover: {error}", style="red")
        raise typer.Exit(2) from None
    console.print(table)
    for size, context in found.items():
        told = f"{context:,} tokens, {context / covered:.2g} budgets" if context else "none up to the longest context"
        console.print(f"Crossover at batch {size}: {told}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "crossover.json").write_text(json.dumps({"flow": flow, "budget_tokens": covered, "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
