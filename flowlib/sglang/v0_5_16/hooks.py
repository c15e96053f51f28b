"""The functions that the ledger hooks into SGLang 0.5.16 alone: pools of other platforms, and the keys of graphs."""

from collections.abc import Callable
from typing import Any

from flowlib.sglang import graphs
from flowlib.sglang.hooks import checked_pool, setup_for
from flowlib.sglang.leave import leaving_with_reason
from flowlib.sglang.pool import pool_class


def build_oot_mha_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``_build_oot_mha_kv_pool``: the out-of-tree platform's pool class gets the flow's fields."""
    from sglang.srt.platforms import current_platform

    with leaving_with_reason(getattr(self.server_args, "flow", None) or ""):
        setup = setup_for(self)
        if setup is None:
            return original(self, *args, **kwargs)
        made = pool_class(current_platform.get_mha_kv_pool_cls(), setup)
        current_platform.get_mha_kv_pool_cls = lambda: made
        try:
            return checked_pool(original(self, *args, **kwargs), setup)
        finally:
            del current_platform.get_mha_kv_pool_cls


def capture_one_shape(
    original: Callable[..., None], self: Any, size: int, forward: Any, stream_idx: Any = None, variant_label: Any = None
) -> None:
    """AROUND ``capture_one_shape``: a batch size gets a graph of short batches, too."""
    backend = graphs.flow_backend(self)
    if backend is not None:
        with graphs.capturing_short(backend):
            original(self, size, forward, stream_idx, _short(variant_label))
    original(self, size, forward, stream_idx, variant_label)


def variant_label(original: Callable[..., str | None], self: Any, forward_batch: Any) -> str | None:
    """AROUND ``_resolve_lora_variant``, the part of a graph's key that SGLang chooses for a batch."""
    label = original(self, forward_batch)
    return _short(label) if graphs.is_short(self, forward_batch) else label


def _short(label: str | None) -> str:
    return graphs.SHORT if label is None else f"{label} {graphs.SHORT}"
