"""Asserting that a wrong use is refused, by its message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowlib.errors import FlowlibError


@contextmanager
def refused(kind: type[FlowlibError], *parts: str) -> Iterator[None]:
    """The block raises exactly `kind`, and every part is in its message, in this order."""
    with pytest.raises(kind) as caught:
        yield
    message, start = str(caught.value), 0
    assert type(caught.value) is kind
    for part in parts:
        found = message.find(part, start)
        assert found >= 0, f"{part!r} is missing (or earlier than it should be) in: {message}"
        start = found + len(part)
