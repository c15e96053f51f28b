"""SGLang's pool of MLA latents with the flow's fields beside them.

A latent is written whole (``set_kv_buffer``) or in two parts, content and rope (``set_mla_kv_buffer``); the fields are
updated after both, as :mod:`flowlib.sglang.pool` does it for K and V.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from flowlib.core.errors import BackendError
from flowlib.sglang.hooks import checked_pool, setup_for
from flowlib.sglang.leave import leaving_with_reason
from flowlib.sglang.pool import FlowFields
from flowlib.sglang.setup import FlowSetup

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool as _Pool

    class _Fields(FlowFields, _Pool): ...
else:
    _Fields = FlowFields


class LatentFields(_Fields):
    """Mixed in front of SGLang's ``MLATokenToKVPool`` (or a platform's subclass of it)."""

    def flow_check_layout(self) -> None:
        facts = self.flow_setup.facts
        if self.use_dsa:
            raise BackendError("SGLang's latent pool keeps a sparse indexer's keys, which a flow can't read")
        if self.size % self.page_size:
            raise BackendError(f"SGLang's KV pool has {self.size} tokens, expected a multiple of {self.page_size}")
        ours = (facts.page_size, facts.kv_lora_rank, facts.head_dim, facts.kv_dtype)
        theirs = (self.page_size, self.kv_lora_rank, self.kv_cache_dim, self.dtype)
        if ours != theirs:
            raise BackendError(
                f"SGLang's latent pool has (page size, kv_lora_rank, latent size, dtype) {theirs}, expected {ours}"
            )

    def flow_given(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.get_key_buffer(layer_id), None

    def flow_pages(self, layer_id: int) -> torch.Tensor:
        """The latents of a layer by pages, ``[num_pages, page_size, kv_lora_rank + rope]``; a view."""
        return self.get_key_buffer(layer_id).view(-1, self.page_size, self.flow_setup.facts.head_dim)

    def flow_write(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.set_kv_buffer(layer, loc_info, cache_k, cache_v)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Stores latents as SGLang does, then updates the fields of the finished pages."""
        from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

        super().set_kv_buffer(layer, loc_info, cache_k, cache_v)
        if not self._flow_later:
            self.flow_update(layer, unwrap_write_loc(loc_info)[0])

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Stores the two parts of latents as SGLang does, then updates the fields of the finished pages."""
        super().set_mla_kv_buffer(layer, loc, cache_k_nope, cache_k_rope)
        self.flow_update(layer, loc)


def latent_pool_class(base: type, setup: FlowSetup) -> type:
    """A subclass of `base` that keeps the fields of the flow in `setup`.

    Args:
        base: SGLang's ``MLATokenToKVPool`` or a subclass that keeps its layout.
    """
    return type(f"Flow{base.__name__}", (LatentFields, base), {"flow_setup": setup})


def build_mla_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``_build_mla_kv_pool``: the class it builds, a name in SGLang's module, gets the flow's fields."""
    from sglang.srt.mem_cache import kv_cache_configurator

    with leaving_with_reason(getattr(self.server_args, "flow", None) or ""):
        setup = setup_for(self)
        if setup is None:
            return original(self, *args, **kwargs)
        made = latent_pool_class(kv_cache_configurator.MLATokenToKVPool, setup)
        with _lent(kv_cache_configurator, "MLATokenToKVPool", made):
            return checked_pool(original(self, *args, **kwargs), setup)


def build_oot_mla_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``_build_oot_mla_kv_pool``: the out-of-tree platform's pool class gets the flow's fields."""
    from sglang.srt.platforms import current_platform

    with leaving_with_reason(getattr(self.server_args, "flow", None) or ""):
        setup = setup_for(self)
        if setup is None:
            return original(self, *args, **kwargs)
        made = latent_pool_class(current_platform.get_mla_kv_pool_cls(), setup)
        with _lent(current_platform, "get_mla_kv_pool_cls", lambda: made):
            return checked_pool(original(self, *args, **kwargs), setup)


@contextmanager
def _lent(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives `owner` another attribute for a while."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
