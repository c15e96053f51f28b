"""What the command lines of the H2O experiments share: where they run, tables, verdicts and exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import typer
from rich.console import Console
from rich.table import Table

from flowlib.errors import BackendError, FlowlibError

FAILED, REFUSED = 1, 2
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


class Device(str, Enum):
    """Where tensors lie."""

    cpu = "cpu"
    cuda = "cuda"


class Impl(str, Enum):
    """How flows run."""

    reference = "reference"
    triton = "triton"


def prepare(device: Device, impl: Impl) -> None:
    """Asks for Triton's interpreter where kernels run on the CPU, before Triton is imported.

    Raises:
        BackendError: there is no GPU, or the environment asks for interpreted kernels on one.
    """
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise BackendError("--device is cuda, but torch finds no GPU here; use --device cpu")
    if impl is Impl.reference:
        return
    if device is Device.cpu and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        console.print("On the CPU: TRITON_INTERPRET=1 is set, so that Triton interprets its kernels.")
    elif device is Device.cuda and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise BackendError("TRITON_INTERPRET is set, so kernels would be interpreted; unset it for --device cuda")


@contextmanager
def refusals() -> Iterator[None]:
    """Shows flowlib's errors as one line and ends with status 2."""
    try:
        yield
    except FlowlibError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(REFUSED) from None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is left-aligned."""
    shown = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="right" if position else "left")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def verdict(name: str, ok: bool, text: str) -> None:
    """Prints one PASS/FAIL line, unwrapped."""
    console.print(f"[{'green' if ok else 'red'}]{'PASS' if ok else 'FAIL'}[/]", end=" ")
    console.print(f"{name}: {text}", markup=False, soft_wrap=True)


def finish(ok: bool) -> None:
    """Ends with status 0 or 1."""
    raise typer.Exit(0 if ok else FAILED)
