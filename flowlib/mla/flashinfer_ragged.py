"""FlashInfer's ragged prefill, where it is installed. Its log-sum-exp is to base 2 and is measured, not assumed.

A wrapper is planned once for a batch and reused by all layers that share it. Planning fills pinned memory that is
copied to the device later, so a wrapper is planned anew only after that copy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from flowlib.mla.ragged import RaggedBatch

_WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = ((192, 128), (128, 128))
"""(D, Dv) that are served; FlashInfer compiles kernels of its own for each."""


def unavailable(dtype: torch.dtype, head_dims: tuple[int, int], device: torch.device) -> str:
    """Why FlashInfer cannot serve, or an empty text."""
    if not _installed():
        return "needs the package flashinfer, which is not installed"
    if device.type != "cuda":
        return f"needs tensors on cuda, these are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16 tensors, these are {dtype}"
    if head_dims not in HEAD_DIMS:
        return f"needs head dimensions among {list(HEAD_DIMS)}, these are {head_dims}"
    return ""


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


@dataclass(eq=False)
class _Planned:
    """A wrapper and, on a device, the event after its plan was copied there."""

    wrapper: Any
    copied: torch.cuda.Event | None = None


_free: dict[torch.device, list[_Planned]] = defaultdict(list)
_workspaces: dict[torch.device, torch.Tensor] = {}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, scale: float, causal: bool,
    out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Attention into `out` and `lse`, the latter as FlashInfer has it.

    Copies of q, k and v are made where they are not contiguous. FlashInfer writes into a contiguous `out` of q's dtype
    and a contiguous fp32 `lse` itself; into others its results are copied.
    """
    key = (q.device, q.dtype, q.shape[1], q.shape[2], v.shape[2], scale, causal)
    planned = batch.plans.get(key)
    if not isinstance(planned, _Planned):
        planned = batch.plans[key] = _plan(q, v, batch, scale, causal)
    written, written_lse = _writable(out, q.dtype), _writable(lse, torch.float32)
    o, base_2 = planned.wrapper.run(
        q.contiguous(), k.contiguous(), v.contiguous(), out=written, lse=written_lse, return_lse=True
    )
    if written is None:
        out.copy_(o)
    if written_lse is None:
        lse.copy_(base_2)


def _writable(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`result` if FlashInfer, which takes no strides of it and stores 16 bytes at once, can write there."""
    fits = result.dtype is dtype and result.is_contiguous() and result.data_ptr() % 16 == 0
    return result if fits else None


def _plan(q: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, scale: float, causal: bool) -> _Planned:
    device = q.device
    planned = _free[device].pop() if _free[device] else _Planned(_wrapper(device))
    if planned.copied is not None:
        planned.copied.synchronize()
    planned.wrapper.plan(
        torch.tensor(batch.query_offsets, dtype=torch.int32), torch.tensor(batch.kv_offsets, dtype=torch.int32),
        num_qo_heads=q.shape[1], num_kv_heads=q.shape[1], head_dim_qk=q.shape[2], head_dim_vo=v.shape[2],
        causal=causal, sm_scale=scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    if device.type == "cuda":
        planned.copied = torch.cuda.Event()
        planned.copied.record()
    weakref.finalize(batch, _free[device].append, planned).atexit = False
    return planned


def _wrapper(device: torch.device) -> Any:
    if device not in _workspaces:
        _workspaces[device] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    prefill = importlib.import_module("flashinfer")
    return prefill.BatchPrefillWithRaggedKVCacheWrapper(_workspaces[device], "NHD")
