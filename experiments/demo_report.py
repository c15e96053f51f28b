"""What the demo reports: closeness to dense attention, pages attended, a table and a picture."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Run:
    """One finished engine run.

    Args:
        name: `dense` or the flow.
        tokens: what it emitted.
        logits: raw fp32 logits `[steps, vocabulary]`; row 0 is the prefill's.
        steps, seconds: decode steps and the time they took, tracing included.
        trace: lines of the plugin's trace, one per decode step; empty for dense.
    """

    name: str
    tokens: list[int]
    logits: np.ndarray
    steps: int
    seconds: float
    trace: list[dict[str, Any]]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; the time spent on writing the trace is not counted."""
        return self.steps / (self.seconds - sum(line["trace_seconds"] for line in self.trace))


@dataclass(frozen=True)
class Closeness:
    """A run beside the dense one, over the decode steps; the first token is the dense prefill's and left out."""

    agreement: float
    kl: float
    attended: int
    cached: int
    mass: float


def load_logits(path: Path, vocabulary: int) -> np.ndarray:
    """The rows that the logit processor wrote."""
    return np.fromfile(path, dtype=np.float32).reshape(-1, vocabulary)


def load_trace(path: Path, steps: int) -> list[dict[str, Any]]:
    """The first `steps` lines of a trace."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(lines) < steps:
        raise RuntimeError(f"the trace {path.name} has {len(lines)} steps, expected at least {steps}")
    return lines[:steps]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities in float64, along the last axis."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compare(dense: Run, sparse: Run) -> Closeness:
    """Next-token agreement, KL(dense || sparse) in nats, pages and attention mass, over the decode steps."""
    if sparse.tokens != dense.tokens:
        raise RuntimeError(f"{sparse.name} did not take the dense run's tokens, so its steps can't be compared")
    rows = slice(1, len(dense.tokens))
    p, q = log_softmax(dense.logits[rows]), log_softmax(sparse.logits[rows])
    layers = [(line, layer) for line in sparse.trace for layer in line["layers"].values()]
    heads = [len(layer["attended"][0]) for _, layer in layers]
    return Closeness(
        agreement=float((p.argmax(-1) == q.argmax(-1)).mean()),
        kl=float((np.exp(p) * (p - q)).sum(-1).mean()),
        attended=sum(sum(layer["attended"][0]) for _, layer in layers),
        cached=sum(line["cached"][0] * n for (line, _), n in zip(layers, heads, strict=True)),
        mass=float(np.mean([layer["mass"][0] for _, layer in layers])),
    )


def table(dense: Run, runs: list[Run]) -> Table:
    """The comparison as a table, one column per run."""
    shown = Table(
        title="Decoding the dense run's tokens step by step (teacher-forced)",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    shown.add_column("", no_wrap=True)
    for run in (dense, *runs):
        shown.add_column(run.name, justify="right", no_wrap=True)
    found = [compare(dense, run) for run in runs]
    shown.add_row("pages attended", "all", *(f"{c.attended:,}" for c in found))
    shown.add_row("pages cached", "all", *(f"{c.cached:,}" for c in found))
    shown.add_row("share", percent(1.0), *(percent(c.attended / c.cached) for c in found))
    shown.add_row("same token", percent(1.0), *(percent(c.agreement) for c in found))
    shown.add_row("KL to dense", f"{0:.4f}", *(f"{c.kl:.4f}" for c in found))
    shown.add_row("attention mass", percent(1.0), *(percent(c.mass) for c in found))
    shown.add_row("tokens/s", *(f"{run.tokens_per_second:.1f}" for run in (dense, *runs)))
    return shown


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.1f} %"


def page_shares(run: Run) -> np.ndarray:
    """Share of all (layer, kv head) lists that attended to a page: `[steps, pages]`, NaN where there is no page."""
    width = max(line["cached"][0] for line in run.trace)
    shares = np.full((len(run.trace), width), np.nan)
    for i, line in enumerate(run.trace):
        counts = np.zeros(line["cached"][0])
        lists = [pages for layer in line["layers"].values() for pages in layer["pages"][0]]
        for pages in lists:
            counts[pages] += 1
        shares[i, : len(counts)] = counts / len(lists)
    return shares


def draw(runs: list[Run], path: Path) -> None:
    """A picture of which pages each decode step attended to, one panel per flow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(11, 3.2 * len(runs)), squeeze=False, constrained_layout=True)
    image = None
    for axis, run in zip(axes[:, 0], runs, strict=True):
        image = axis.imshow(page_shares(run), aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axis.set_title(run.name)
        axis.set_xlabel("page of the context (the last ones hold the newest tokens)")
        axis.set_ylabel("decode step")
    if image is not None:
        figure.colorbar(image, ax=axes[:, 0], label="share of layers and kv heads that attended to the page")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
