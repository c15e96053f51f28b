"""The function that the ledger hooks into SGLang 0.5.16 alone; later releases build every pool in one place."""

from collections.abc import Callable
from typing import Any

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
