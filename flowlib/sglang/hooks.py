"""The functions that the ledger hooks into SGLang. Each does nothing unless the server was asked for a flow."""

from collections.abc import Callable
from typing import Any

from flowlib.core.errors import BackendError
from flowlib.sglang import PLUGIN_NAME, counters, refusals
from flowlib.sglang.facts import facts_from_configurator
from flowlib.sglang.leave import leaving_with_reason
from flowlib.sglang.options import FlowConfig
from flowlib.sglang.pool import FlowFields, pool_class
from flowlib.sglang.setup import FlowSetup
from flowlib.sglang.versions import adapter


def setup_for(configurator: Any) -> FlowSetup | None:
    """The flow of a ``KVCacheConfigurator``'s server, ready for its model; ``None`` without ``--flow``."""
    args = configurator.server_args
    if getattr(args, "flow", None) is None:
        return None
    if configurator.is_draft_worker:
        raise BackendError(f"a draft model can't be served with the attention backend {PLUGIN_NAME!r}")
    setup = FlowSetup(args.flow, FlowConfig.parse(args.flow_config), facts_from_configurator(configurator))
    refusals.refuse_state(args.flow, setup.plan.state_fields, adapter().in_effect(args).disable_radix_cache)
    return setup


def cell_size(result: int, self: Any, kvc: Any, num_layers: int) -> int:
    """AFTER ``_compute_cell_size``: the bytes of one token, those of the flow's fields included."""
    with leaving_with_reason(getattr(kvc.server_args, "flow", None) or ""):
        setup = setup_for(kvc)
        return result if setup is None else result + setup.field_bytes_per_token


def build_mha_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``_build_mha_kv_pool``: the pool class gets the flow's fields."""
    with leaving_with_reason(getattr(self.server_args, "flow", None) or ""):
        setup = setup_for(self)
        if setup is not None:
            kwargs["mha_pool_class"] = pool_class(kwargs["mha_pool_class"], setup)
        return checked_pool(original(self, *args, **kwargs), setup)


def enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """AROUND ``enable_fused_set_kv_buffer``: no model writes K and V inside its RoPE kernel while a flow is served."""
    return False if _serves_flow() else original(*args, **kwargs)


def create_fused_set_kv_buffer_arg(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``create_fused_set_kv_buffer_arg``: refused while a flow is served, whoever asks."""
    if _serves_flow():
        raise BackendError("this model writes K and V inside its RoPE kernel, which leaves the flow's fields behind")
    return original(*args, **kwargs)


def log_stats(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``SchedulerMetricsCollector.log_stats``: flowlib's counts are published when SGLang's own are."""
    counters.publish(self)


def _serves_flow() -> bool:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return isinstance(get_token_to_kv_pool(), FlowFields)


def checked_pool(pool: Any, setup: FlowSetup | None) -> Any:
    """The pool that SGLang built. Raises a BackendError if a flow is served and it has no fields."""
    if setup is not None and not isinstance(pool, FlowFields):
        raise BackendError(f"SGLang built the KV pool {type(pool).__name__}, expected one with the flow's fields")
    return pool
