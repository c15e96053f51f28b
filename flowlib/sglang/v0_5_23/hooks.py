"""The functions that the ledger hooks into SGLang 0.5.23 alone: the keys of graphs."""

from collections.abc import Callable
from typing import Any

from flowlib.sglang import graphs


def capture_one_shape(
    original: Callable[..., None], self: Any, size: int, forward: Any, stream_idx: Any = None,
    variant_label: Any = None, attention_variant: Any = None,
) -> None:  # fmt: skip
    """AROUND ``capture_one_shape``: a batch size gets a graph of short batches, too."""
    backend = graphs.flow_backend(self)
    if backend is not None and attention_variant is None:
        with graphs.capturing_short(backend):
            original(self, size, forward, stream_idx, variant_label, graphs.SHORT)
    original(self, size, forward, stream_idx, variant_label, attention_variant)


def attention_variant(
    original: Callable[..., str | None], self: Any, forward_batch: Any, capture_batch_size: int
) -> str | None:
    """AROUND ``_resolve_attention_variant``, the part of a graph's key that SGLang chooses for a batch's attention."""
    variant = original(self, forward_batch, capture_batch_size)
    return graphs.SHORT if variant is None and graphs.is_short(self, forward_batch) else variant
