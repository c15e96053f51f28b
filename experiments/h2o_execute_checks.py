"""Are the kernels behind Fill, Add and Save right when called alone?

Fill must zero exactly the pages that are written. Add and Save, 800 times over 128 tokens in a bfloat16 field, must
stay near the float64 recurrence; the plain sum (decay 1) is shown beside it, not judged. Exit status 1 on any failure.
"""

from __future__ import annotations

from typing import Annotated

import typer
from h2o_alone import TOUCHED, Accumulated, Filled, accumulate, fill
from h2o_cli import Device, Impl, console, finish, prepare, refusals, table, verdict

ERROR, LARGEST, RATIO = 0.10, 200.0, 0.99


def check_fill(results: list[Filled]) -> bool:
    """Shows what Fill zeroed, and whether that is right."""
    rows = [
        [str(r.page_size), ", ".join(map(str, r.zeroed)) or "none", "yes" if r.others_kept else "NO"] for r in results
    ]
    table("Fill(0.0) in a pool of 64 pages of 7.5", ["page size", "zeroed pages", "others kept"], rows)
    ok = all(r.ok for r in results)
    verdict("Fill", ok, f"expected exactly pages {', '.join(map(str, TOUCHED))} to be 0, for every kv head")
    return ok


def check_accumulation(judged: Accumulated, shown: Accumulated, tokens: int, steps: int) -> bool:
    """Shows both sums, and judges the decayed one."""
    rows = [
        [
            f"{a.decay}", f"{a.error:.2e}", f"{a.largest:.2f} / {a.exact_largest:.2f}", f"{a.ratio:.4f}",
            f"{a.moved} of {a.must_move}", "judged" if a is judged else "shown",
        ]
        for a in (judged, shown)
    ]  # fmt: skip
    columns = ["decay", "relative error", "max / exact", "score ratio of the top-32", "moved by the last step", ""]
    table(f"Add + Save, {tokens} tokens, {steps} steps, bfloat16 field, against float64", columns, rows)
    ok = (
        judged.error < ERROR
        and judged.largest < LARGEST
        and judged.ratio >= RATIO
        and judged.moved == judged.must_move > 0
        and judged.others_kept
    )
    expected = (
        f"expected relative error < {ERROR}, max < {LARGEST:g}, score ratio >= {RATIO}, every token that another last "
        "step changes by more than an ulp moved, and at least one such token"
    )
    others = "" if judged.others_kept else "; pages that are not scored were written"
    verdict("Add + Save", ok, expected + others)
    return ok


def main(
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.cpu,
    impl: Annotated[Impl, typer.Option(help="How it runs.")] = Impl.reference,
    steps: Annotated[int, typer.Option(help="Steps of Add and Save.", min=1)] = 800,
    tokens: Annotated[int, typer.Option(help="Scored tokens.", min=1)] = 128,
    decay: Annotated[float, typer.Option(help="Factor of the earlier sum, judged.")] = 0.984375,
    seed: Annotated[int, typer.Option(help="Seed of the probabilities.")] = 0,
) -> None:
    """Runs Fill, Add and Save alone and compares them with what they mean."""
    with refusals():
        prepare(device, impl)
        console.print(f"{impl.value} on {device.value}")
        filled = [fill(page_size, device.value, impl.value) for page_size in (1, 16)]
        sums = [accumulate(d, device.value, impl.value, tokens=tokens, steps=steps, seed=seed) for d in (decay, 1.0)]
    results = [check_fill(filled), check_accumulation(sums[0], sums[1], tokens, steps)]
    finish(all(results))


if __name__ == "__main__":
    typer.run(main)
