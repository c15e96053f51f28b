"""The picture of `bench_mla.py`: stages of prefill, and decode beside dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from bench_mla_decode import LatentRow
from bench_mla_prefill import PrefillRow

_SHOWN = ("project new", "attend new", "gather", "project", "absorb", "attend", "restore", "merge")


def draw(prefill: Sequence[PrefillRow], decode: Sequence[LatentRow], path: Path) -> None:
    """Stages side by side with the whole and the floor, and speed-ups over the fastest dense kernel."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = max(4.0, 0.28 * max(len(prefill), len(decode)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(20, height), constrained_layout=True)
    places = range(len(prefill))
    start = [0.0] * len(prefill)
    for name in _SHOWN:
        widths = [row.stages[name].us / 1e3 if name in row.stages else 0.0 for row in prefill]
        if any(widths):
            left.barh(places, widths, left=start, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.plot([row.whole.us / 1e3 for row in prefill], places, "k|", markersize=9, label="whole")
    left.plot([row.floor_us / 1e3 for row in prefill], places, "r|", markersize=9, label="floor")
    left.set_yticks(places, [f"{r.name}: {r.shape.label}, {r.shape.heads} heads" for r in prefill], fontsize=7)
    left.set_xlabel("milliseconds a layer")
    left.invert_yaxis()
    if prefill:
        left.legend(fontsize=7)
    places = range(len(decode))
    right.barh(places, [row.speedup or 0.0 for row in decode], color="tab:green")
    for i, row in enumerate(decode):
        dense = row.fastest_dense
        told = f"{row.step.us:.0f} us" + ("" if dense is None else f", {dense[0]} {dense[1].us:.0f} us")
        right.text(row.speedup or 0.0, i, f" {told}", va="center", fontsize=7)
    right.axvline(1.0, color="grey", linewidth=0.8)
    right.set_yticks(places, [f"{row.flow}: {row.shape}" for row in decode], fontsize=7)
    right.set_xlabel("decode step: speed-up over the fastest dense kernel")
    right.invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
