"""``flowlib verify``: where it runs, which flows, and its progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flowlib.cli import show
from flowlib.cli.options import parse_options
from flowlib.core import registry
from flowlib.core.errors import BackendError, OptionError
from flowlib.runtime import interpreter
from flowlib.runtime.api import build, list_flows
from flowlib.testing.verify import IMPLEMENTATIONS, VerifyReport, default_cases, verify_flow


def verify_flows(
    flows: Sequence[str],
    *,
    every: bool,
    device: str | None,
    impl: Sequence[str] | None,
    flow_file: str | None,
    option: list[str] | None,
    spec: dict[str, Any],
    seed: int,
) -> bool:
    """Verifies flows, prints a table for each, and says whether all are right.

    Raises:
        FlowlibError: a flow, an option or the device is unknown or does not fit.
    """
    names = _names(flows, every, flow_file, spec)
    impls = tuple(impl or IMPLEMENTATIONS)
    place = _prepare(device, impls)
    options = parse_options(option)
    total = sum(len(default_cases(build(name, **options), spec)) for name in names)
    reports: list[VerifyReport] = []
    with _progress() as bar:
        task = bar.add_task("", total=total)
        for name in names:
            bar.update(task, description=name)
            found = verify_flow(
                name, options=options, spec=spec, impl=impls, device=place, seed=seed,
                progress=lambda case: bar.advance(task),
            )  # fmt: skip
            reports.append(found)
            show.report(found)
    failed = [r.flow for r in reports if not r.ok]
    if len(reports) > 1:
        typer.echo(f"{len(reports) - len(failed)} of {len(reports)} flows are right")
    return not failed


def _names(flows: Sequence[str], every: bool, flow_file: str | None, spec: Mapping[str, Any]) -> list[str]:
    known = list_flows()
    if flow_file is not None:
        registry.load_file(flow_file)
    names = list(flows)
    if every:
        names = list_flows(mla=_kind(spec))
    elif not names and flow_file is not None:
        names = [name for name in registry.registered() if name not in known]
    if not names:
        raise OptionError("verify: no flow is named: give FLOW, --all, or a --flow-file that registers one")
    for name in names:
        registry.find(name)
    return names


def _kind(spec: Mapping[str, Any]) -> bool | None:
    """Which flows the sizes given fit: those over MLA latents (True), over K and V (False), or both."""
    if "kv_lora_rank" in spec:
        return True
    sizes = [f"--{n.replace('_', '-')}" for n in ("head_dim", "v_head_dim", "num_kv_heads") if n in spec]
    if not sizes:
        return None
    typer.echo(f"{', '.join(sizes)} without --kv-lora-rank: flows over K and V only", err=True)
    return False


def _prepare(device: str | None, impls: Sequence[str]) -> str:
    """The device; on the CPU, Triton's interpreter is asked for before Triton's import."""
    for one in impls:
        if one not in IMPLEMENTATIONS:
            raise OptionError(f"--impl is {one!r}, expected 'reference' or 'triton'")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.partition(":")[0] not in ("cpu", "cuda"):
        raise OptionError(f"--device is {place!r}, expected 'cpu' or 'cuda'")
    if place != "cpu" and not torch.cuda.is_available():
        raise BackendError(f"--device is {place!r}, but torch finds no CUDA device here; use --device cpu")
    if place == "cpu":
        torch.set_num_threads(1)  # oracles are many small operations
    if "triton" not in impls:
        return place
    if place != "cpu" and interpreter.requested():
        raise BackendError("TRITON_INTERPRET is set, so kernels would be interpreted; unset it for --device cuda")
    if place == "cpu":
        if not interpreter.requested() and "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
            typer.echo("On the CPU: TRITON_INTERPRET=1 is set, so that Triton interprets its kernels.", err=True)
        interpreter.install()
    return place


def _progress() -> Progress:
    terminal = show.console(stderr=True)
    return Progress(
        BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False),
        console=terminal, transient=True, disable=not terminal.is_terminal,
    )  # fmt: skip
