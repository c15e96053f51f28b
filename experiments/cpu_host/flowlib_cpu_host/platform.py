"""The SGLang platform: a CPU that has torch and nothing else."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class CpuHostPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's own CPU device operations, with torch's native kernels in place of the vendor's.

    SGLang's in-tree CPU platform needs `sgl_kernel` built for the CPU. As an out-of-tree platform this one makes SGLang
    call each layer's `forward_native`, and hands back SGLang's ordinary pools and allocator.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """Attention in plain torch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Layers run their `forward_native`."""
        return "native"

    def get_kv_pool_cls(self, *, kind: str) -> None:
        """SGLang's own pools. Releases from 0.5.23 on ask this way, and no other."""

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool of K and V."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        """SGLang's own latent pool, which does not know the `index_head_dim` that out-of-tree pools are given."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        class LatentPool(MLATokenToKVPool):
            def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
                if index_head_dim is not None:
                    raise ValueError(f"this host has no pool with a sparse indexer (index_head_dim {index_head_dim})")
                super().__init__(*args, **kwargs)

        return LatentPool

    def get_paged_allocator_cls(self) -> type:
        """SGLang's own page allocator."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator
