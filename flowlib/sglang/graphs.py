"""A second CUDA graph for every batch size: of batches whose requests are all attended in full.

A graph launches what was captured, so one for every length has scoring and selection in it. They end at once where
there is nothing to score, and still cost some 3 us a layer (H200). The graph of short batches has a page table as wide
as such rows need; over it a step is the update and attention alone.

Which of the two is replayed is decided on the host, by SGLang's own copy of the lengths, without a look at the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHORT = "flowlib_short"
"""Name of the second graph in SGLang's keys."""


class Served:
    """What this process serves with: set by its backend, and while a graph is captured."""

    tokens = 0
    capturing = False


def serve(tokens: int) -> None:
    """Asks for graphs of batches of at most so many tokens a request, the step's own included; 0 for none."""
    Served.tokens = tokens


def asked() -> bool:
    """Whether short batches have graphs of their own here."""
    return Served.tokens > 0


def is_short(forward_batch: Any) -> bool:
    """Whether a batch of SGLang's can be replayed by the graph of short ones; not where the host lacks its lengths."""
    lengths = forward_batch.seq_lens_cpu
    return asked() and lengths is not None and (not lengths.numel() or int(lengths.max()) <= Served.tokens)


@contextmanager
def capturing_short() -> Iterator[None]:
    """What is captured inside is the graph of short batches."""
    Served.capturing = True
    try:
        yield
    finally:
        Served.capturing = False


def is_capturing_short() -> bool:
    """Whether the graph of short batches is being captured."""
    return Served.capturing
