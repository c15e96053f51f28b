"""SGLang's KV pool with the flow's fields beside K and V.

The fields are updated wherever K and V are written: for each written slot that is the last of its page, once all K
and V of the call are stored. What would write K and V without that is refused. :mod:`flowlib.sglang.mla_pool` does the
same for MLA latents.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

import flowlib
from flowlib.core.errors import BackendError
from flowlib.sglang.setup import FlowSetup

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool as _Pool
else:
    _Pool = object


class FlowFields(_Pool):
    """What pools with a flow's fields have in common, whether they keep K and V or latents.

    Attributes:
        flow_setup: the flow, its configuration and plans.
        flow_fields: layer id -> field name -> ``[num_pages, H_kv, r, c]``; sparse layers only.
        flow_scales: layer id -> scales of its float8 summaries, fp32 ``[H_kv]``; empty without such fields.
    """

    flow_setup: FlowSetup
    flow_fields: dict[int, dict[str, torch.Tensor]]
    flow_scales: dict[int, torch.Tensor]

    @abstractmethod
    def flow_check_layout(self) -> None:
        """Raises a BackendError unless the pool is laid out as the flow's plan reads it."""

    @abstractmethod
    def flow_given(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of a layer as a :class:`flowlib.KVStore` takes them."""

    @abstractmethod
    def flow_write(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Writes a decode step's K and V with the layer's own scales."""

    def _create_buffers(self) -> None:
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        self.flow_check_layout()
        super()._create_buffers()
        pages = (self.size + self.page_size) // self.page_size
        plan, heads = self.flow_setup.plan, self.flow_setup.facts.num_kv_heads
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.flow_fields = {
                layer: {
                    name: torch.zeros((pages, heads, *f.shape), dtype=f.dtype, device=self.device)
                    for name, f in plan.fields.items()
                }
                for layer in self.flow_setup.sparse_layers
            }
        self.flow_scales = {}  # outside the region, whose memory comes back empty after a pause
        if plan.scaled_fields:
            scales = torch.full((heads,), plan.spec.summary_scale, dtype=torch.float32, device=self.device)
            self.flow_scales = {layer: scales.clone() for layer in self.flow_setup.sparse_layers}
        self._flow_stores: dict[int, Any] = {}
        self._flow_later = False

    def flow_store(self, layer: Any) -> "flowlib.KVStore":
        """K, V and the fields of one layer, as flowlib's runtime reads them; nothing is copied."""
        layer_id = layer.layer_id
        if layer_id not in self._flow_stores:
            k, v = self.flow_given(layer_id)
            plan = self.flow_setup.plan_for(layer)
            fields, scales = self.flow_fields.get(layer_id, {}), self.flow_scales.get(layer_id)
            self._flow_stores[layer_id] = flowlib.KVStore(plan, k, v, fields, scales)
        return self._flow_stores[layer_id]

    def flow_stores(self) -> list["flowlib.KVStore"]:
        """The stores of the layers that were written or read so far."""
        return list(self._flow_stores.values())

    def set_kv_buffer_alone(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Stores K and V; whoever calls it updates the fields of the finished pages."""
        self._flow_later = True
        try:
            self.flow_write(layer, loc_info, cache_k, cache_v)
        finally:
            self._flow_later = False

    def flow_update(self, layer: Any, loc: torch.Tensor) -> None:
        """Recomputes the fields of the pages whose last slot is in `loc` (int64 ``[T]``)."""
        if layer.layer_id in self.flow_fields:
            plan = self.flow_setup.plan_for(layer)
            plan.update(self.flow_store(layer), loc, impl=self.flow_setup.impl)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Refused: only speculative decoding moves slots."""
        raise BackendError("move_kv_cache: moved slots leave the flow's fields behind")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        """Refused: only disaggregation brings K and V back from the host."""
        raise BackendError("load_cpu_copy: K and V from the host leave the flow's fields behind")

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        self._flow_stores.clear()
        self.flow_fields, self.flow_scales = {}, {}


class KVFields(FlowFields):
    """Mixed in front of SGLang's ``MHATokenToKVPool`` (or a platform's subclass of it); made by :func:`pool_class`."""

    def flow_check_layout(self) -> None:
        facts = self.flow_setup.facts
        if self.kv_cache_layout != "nhd":
            raise BackendError(f"SGLang's KV pool has the layout {self.kv_cache_layout!r}, a flow reads 'nhd'")
        if self.is_quantized_kv_cache:
            raise BackendError("SGLang's KV pool is block-quantised (--kv-cache-dtype), which a flow can't read")
        if self.size % self.page_size:
            raise BackendError(f"SGLang's KV pool has {self.size} tokens, expected a multiple of {self.page_size}")
        ours = (facts.page_size, facts.num_kv_heads, facts.head_dim, facts.v_head_dim, facts.kv_dtype)
        theirs = (self.page_size, self.head_num, self.head_dim, self.v_head_dim, self.dtype)
        if ours != theirs:
            raise BackendError(
                f"SGLang's KV pool has (page size, kv heads, head_dim, v_head_dim, dtype) {theirs}, expected {ours}"
            )

    def flow_given(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._get_key_buffer(layer_id), self._get_value_buffer(layer_id)

    def flow_write(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.set_kv_buffer(layer, loc_info, cache_k, cache_v, layer.k_scale, layer.v_scale)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Stores K and V as SGLang does, then updates the fields of the finished pages."""
        from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

        if layer_id_override is not None or dcp_kv_mask is not None:
            raise BackendError(
                "a layer writes K and V under another layer's id or under a mask, which a flow can't follow"
            )
        if cache_k.dtype != self.dtype:
            _refuse_lost_scale(layer, k_scale, v_scale)
        super().set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale)
        if not self._flow_later:
            self.flow_update(layer, unwrap_write_loc(loc_info)[0])

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> None:
        """Refused: only speculative decoding writes this way."""
        raise BackendError("set_kv_buffer_prefix_valid: speculative writes leave the flow's fields behind")


def pool_class(base: type, setup: FlowSetup) -> type:
    """A subclass of `base` that keeps the fields of the flow in `setup`.

    Args:
        base: SGLang's ``MHATokenToKVPool`` or a subclass that keeps its layout.
    """
    return type(f"Flow{base.__name__}", (KVFields, base), {"flow_setup": setup})


def _refuse_lost_scale(layer: Any, k_scale: Any, v_scale: Any) -> None:
    for name, given, own in (("k", k_scale, layer.k_scale_float), ("v", v_scale, layer.v_scale_float)):
        if given is None and own not in (None, 1.0):
            raise BackendError(
                f"layer {layer.layer_id} has an fp8 {name}_scale of {own}, and the prefill attention backend stores "
                f"{name.upper()} without it: choose another --prefill-attention-backend"
            )
