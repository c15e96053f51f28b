"""The exceptions users see.

Each message says what was checked, which argument and axis, what it got and what would be right. Messages about a flow
end with the line of the user's file: ``(flows/my_flow.py:31: score = self.gemm(q, cache["centroid"], ctx=ctx))``.
"""

from __future__ import annotations

import difflib
import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass


class FlowlibError(Exception):
    """Base of every exception flowlib raises on purpose."""


class ShapeError(FlowlibError, ValueError):
    """An axis has the wrong size."""


class FormatError(FlowlibError, TypeError):
    """A value has the wrong format, kind or dtype."""


class OptionError(FlowlibError, ValueError):
    """An option of a flow, a spec or a server is unknown or out of range."""


class FlowDefinitionError(FlowlibError, ValueError):
    """A flow is not well formed: no selection, a field nobody reads, K written, ..."""


class UnknownFlowError(FlowlibError, ValueError):
    """No flow is registered under this name."""


class FlowLoadError(FlowlibError, RuntimeError):
    """A flow file could not be read or imported."""


class BatchError(FlowlibError, ValueError):
    """A page table, lengths, queries or slots do not fit the plan or the pool."""


class BackendError(FlowlibError, RuntimeError):
    """The asked-for way of running is not possible here."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program, for messages."""

    path: str
    line: int

    def __str__(self) -> str:
        shown = os.path.relpath(self.path)
        if shown.startswith(".." + os.sep + ".."):
            shown = os.path.join(*self.path.split(os.sep)[-2:])
        text = linecache.getline(self.path, self.line).strip()
        return f"{shown}:{self.line}: {text}" if text else f"{shown}:{self.line}"


_INTERNAL = ("flowlib.core", "flowlib.ops", "flowlib.compiler", "flowlib.runtime")


def user_line() -> SourceLine | None:
    """The innermost frame of the current stack that is not flowlib's own machinery."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module == "flowlib" or module.startswith(_INTERNAL)):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def located(error: FlowlibError, where: SourceLine | None) -> FlowlibError:
    """The same error with the user's line at its end; an error that already names a line is returned as it is."""
    if where is None or getattr(error, "where", None) is not None:
        return error
    dressed = type(error)(f"{error} ({where})")
    dressed.where = where  # type: ignore[attr-defined]
    return dressed


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` when a known name is near, else an empty text."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
