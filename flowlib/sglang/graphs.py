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


def flow_backend(runner: Any) -> Any:
    """The :class:`flowlib.sglang.backend.FlowBackend` of a runner of decode graphs; ``None`` where batches are not
    served by one, or short ones have no graphs of their own."""
    backend = getattr(runner.attn_backend, "decode_backend", runner.attn_backend)
    return backend if getattr(backend, "short_tokens", 0) else None


def is_short(runner: Any, forward_batch: Any) -> bool:
    """Whether a batch of SGLang's can be replayed by the graph of short ones; not where the host lacks its lengths."""
    backend, lengths = flow_backend(runner), forward_batch.seq_lens_cpu
    if backend is None or lengths is None:
        return False
    return not lengths.numel() or int(lengths.max()) <= backend.short_tokens


@contextmanager
def capturing_short(backend: Any) -> Iterator[None]:
    """What is captured inside is the backend's graph of short batches."""
    backend.captures_short = True
    try:
        yield
    finally:
        backend.captures_short = False
