"""Is latent prefill in chunks the same as one causal attention over everything, and would we notice if it were not?

Workspace sizes, both schedules, the gather, the merge and the whole loop are held against known numbers and float64
oracles; then known bugs are put into the loop, one at a time, and must be seen. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import mla_checks as checks
import torch
import typer
from h2o_cli import Device, Impl, console, finish, prepare, refusals, table, verdict
from rich.progress import Progress


def show(section: checks.Section) -> bool:
    """Prints a table and its verdict; whether it is right."""
    marked = [[*row.cells, "ok" if row.ok else "WRONG"] for row in section.rows]
    table(section.title, [*section.columns, ""], marked)
    wrong = [row.cells[0] for row in section.rows if not row.ok]
    verdict(section.title, section.ok, f"first wrong: {wrong[0]}" if wrong else f"{len(marked)} lines")
    return section.ok


def sections(impls: tuple[str, ...], device: str, full: bool, mutations: bool) -> Iterator[checks.Section]:
    """The tables, one after the other."""
    yield checks.check_workspace()
    yield checks.check_even()
    yield checks.check_packed()
    yield checks.check_gather(impls, device)
    yield checks.check_merge(impls, device, full)
    yield checks.check_lse_bases(impls, device)
    yield checks.check_keyless(impls, device)
    for impl in impls:
        rows = tuple(checks.check_loop(impl, device, full))
        title = f"Loop, {impl} on {device}: at most {checks.GATE:.0e} from float64"
        yield checks.Section(title, checks.LOOP_COLUMNS, rows)
    if mutations:
        title = f"Known bugs in the loop, float64: some case must exceed {checks.GATE:.0e}"
        yield checks.Section(title, checks.MUTATION_COLUMNS, tuple(checks.check_mutations()))


def main(
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.cpu,
    impl: Annotated[list[Impl] | None, typer.Option(help="How it runs; both where not given.")] = None,
    full: Annotated[bool, typer.Option(help="The whole matrix of merges; 16 heads in the large batches.")] = False,
    mutations: Annotated[bool, typer.Option(help="Put known bugs into the loop.")] = True,
) -> None:
    """Verifies chunked prefill of latent attention. On the CPU kernels are interpreted, over a small set of cases."""
    impls = tuple(dict.fromkeys(one.value for one in impl)) if impl else ("reference", "triton")
    good = []
    with refusals():
        for one in impls:
            prepare(device, Impl(one))
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("verifying", total=7 + len(impls) + mutations)
            for section in sections(impls, device.value, full, mutations):
                good.append(show(section))
                progress.advance(task)
    console.print(f"{sum(good)} of {len(good)} tables are right")
    finish(all(good))


if __name__ == "__main__":
    torch.set_num_threads(1)  # oracles are many small operations
    typer.run(main)
