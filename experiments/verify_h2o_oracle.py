"""Do the token-level H2O flows accumulate true attention over many decode steps, and choose by it?

The flow runs through the real planner, indexer and selection over a paged pool, beside an independent float64
recurrence. Three verdicts; exit status 1 if one fails.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import torch
import typer
from h2o_cli import Device, Impl, console, finish, prepare, refusals, table, verdict
from h2o_judge import judge
from h2o_oracle import MEAN_QUERY, PER_HEAD, Options, Result, run
from rich.progress import Progress


class Flow(str, Enum):
    """The two flows."""

    gqa = PER_HEAD
    plain = MEAN_QUERY


class StateDtype(str, Enum):
    """dtype of hh_score."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def show(result: Result) -> None:
    """The table of the reported steps."""
    o = result.options
    dtype = str(o.state_dtype).removeprefix("torch.")
    rows = [
        [
            str(s.seed), str(s.step), f"{s.error:.1e}", f"{s.mass:.2f} / {s.expected:.2f}", f"{s.rounded_mass:.2f}",
            f"{s.largest:.3f} / {s.exact_largest:.3f}", f"{s.overlap:.0%}", f"{s.boundary:.2f}", f"{s.ratio:.5f}",
        ]
        for s in sorted(result.snapshots, key=lambda s: (s.seed, s.step))
    ]  # fmt: skip
    columns = [
        "seed", "step", "relative error", "mass / expected", "rounding alone", "max / exact", "overlap",
        "boundary, ulps", "score ratio",
    ]  # fmt: skip
    title = (
        f"{o.flow}: {o.steps} steps, {o.seq_len} tokens, {o.scored} scored, top-k {o.top_k}, group {o.group}, "
        f"{o.kv_heads} kv heads, decay {o.decay}, {dtype} state; {o.impl} on {o.device}"
    )
    console.print(title, soft_wrap=True)
    table("Worst kv head of each request, against float64", columns, rows)


def main(
    flow: Annotated[Flow, typer.Option(help="The flow.")] = Flow.gqa,
    steps: Annotated[int, typer.Option(help="Decode steps.", min=1)] = 600,
    seq_len: Annotated[int, typer.Option(help="Tokens of the request.", min=1)] = 128,
    group: Annotated[int, typer.Option(help="Query heads per kv head.", min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of a key.", min=1)] = 128,
    top_k: Annotated[int, typer.Option(help="Tokens chosen, besides the reserved ones.", min=1)] = 32,
    bos: Annotated[int, typer.Option(help="First tokens, always attended, never scored.", min=0)] = 4,
    eos: Annotated[int, typer.Option(help="Last tokens, always attended, never scored.", min=1)] = 8,
    decay: Annotated[float, typer.Option(help="Factor of the earlier sum; 1 is the plain sum.")] = 0.984375,
    state_dtype: Annotated[StateDtype, typer.Option(help="dtype of hh_score.")] = StateDtype.bfloat16,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds, from --seed on: a request each, in one batch.", min=1)] = 1,
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.cpu,
    impl: Annotated[Impl, typer.Option(help="How it runs.")] = Impl.reference,
) -> None:
    """Compares a token-level H2O flow with a float64 recurrence over the scored window."""
    with refusals():
        prepare(device, impl)
        options = Options(
            flow=flow.value, steps=steps, seq_len=seq_len, group=group, kv_heads=kv_heads, head_dim=head_dim,
            top_k=top_k, bos=bos, eos=eos, decay=decay, state_dtype=getattr(torch, state_dtype.value),
            seeds=tuple(range(seed, seed + seeds)), device=device.value, impl=impl.value,
        )  # fmt: skip
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("decoding", total=steps)
            result = run(options, lambda done: progress.update(task, completed=done))
    show(result)
    verdicts = judge(result)
    for v in verdicts:
        verdict(v.name, v.ok, v.text)
    finish(all(v.ok for v in verdicts))


if __name__ == "__main__":
    typer.run(main)
