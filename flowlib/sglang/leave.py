"""Leaving the process with the reason, when a flow was asked for and can't run."""

from collections.abc import Iterator
from contextlib import contextmanager

from flowlib.core.errors import FlowlibError


@contextmanager
def leaving_with_reason(flow: str) -> Iterator[None]:
    """Turns an error of flowlib into ``SystemExit`` with its message.

    SGLang catches ``Exception`` in many places and goes on; a server that was asked for a flow must not go on without
    it.
    """
    try:
        yield
    except FlowlibError as error:
        raise SystemExit(f"flowlib: can't serve --flow {flow}: {error}") from error
