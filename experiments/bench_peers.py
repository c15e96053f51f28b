"""Dense attention of others over the same pools: FlashInfer and FlashAttention 3, called as SGLang calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import torch
from bench_pools import Problem

import flowlib

_WORKSPACE_BYTES = 512 << 20
FAILURES = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, OSError)
"""What a library that does not fit the machine raises."""


class Peer(Protocol):
    """A dense kernel prepared for one batch."""

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """o ``[bs, H_q, D]`` over k, v ``[pages, page_size, H_kv, D]``; can be captured in a graph."""
        ...


class FlashInfer:
    """FlashInfer's batch decode; planned on the host, which is not timed.

    Args:
        problem: the batch.
        spec: its numbers.
        workspace: zeroed uint8.
    """

    def __init__(self, problem: Problem, spec: flowlib.Spec, workspace: torch.Tensor) -> None:
        decode: Any = importlib.import_module("flashinfer")
        pages = problem.workload.pages
        owned = [row[:n] for row, n in zip(problem.table, pages, strict=True)]
        indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
        last = [(n - 1) % spec.page_size + 1 for n in problem.workload.lengths]
        self.q, self.out = problem.q, torch.empty_like(problem.q)
        self.wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=uses_tensor_cores(spec)
        )
        self.wrapper.plan(
            indptr, torch.cat(owned), torch.tensor(last, dtype=torch.int32), spec.num_heads, spec.num_kv_heads,
            spec.head_dim, spec.page_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            sm_scale=spec.softmax_scale,
        )  # fmt: skip
        torch.cuda.synchronize()  # plan copies without waiting

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.wrapper.run(self.q, (k, v), out=self.out)
        return self.out


class FlashAttention3:
    """FlashAttention 3 of sglang-kernel.

    Args:
        problem: the batch.
        spec: its numbers.
        scheduled: compute the tile schedule once a step, ahead of the layers (not timed), not in every layer.
    """

    def __init__(self, problem: Problem, spec: flowlib.Spec, scheduled: bool) -> None:
        library: Any = importlib.import_module("sgl_kernel.flash_attn")
        self.attend, self.problem, self.scale = library.flash_attn_with_kvcache, problem, spec.softmax_scale
        size = len(problem.workload.lengths)
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=problem.q.device)
        self.out, self.schedule = torch.empty_like(problem.q), None
        if scheduled:
            self.schedule = library.get_scheduler_metadata(
                batch_size=size, max_seqlen_q=1, max_seqlen_k=max(problem.workload.lengths), num_heads=spec.num_heads,
                num_heads_k=spec.num_kv_heads, headdim=spec.head_dim, cache_seqlens=problem.batch.seq_lens,
                qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=spec.page_size, causal=True,
                has_softcap=False, num_splits=0,
            )  # fmt: skip

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attend(
            q=self.problem.q, k_cache=k, v_cache=v, page_table=self.problem.table,
            cache_seqlens=self.problem.batch.seq_lens, cu_seqlens_q=self.starts, max_seqlen_q=1,
            softmax_scale=self.scale, causal=True, window_size=(-1, -1), softcap=0.0, num_splits=0, out=self.out,
            scheduler_metadata=self.schedule,
        )  # fmt: skip


def uses_tensor_cores(spec: flowlib.Spec) -> bool:
    """SGLang's rule for FlashInfer's decode."""
    return spec.group_size >= 4


class Peers:
    """The dense kernels that are installed.

    Args:
        compile_missing: let FlashInfer compile a kernel that is not there, which takes minutes.

    Attributes:
        versions: of what is installed, by peer.
        absent: why a peer is not measured, by peer.
    """

    def __init__(self, compile_missing: bool = False) -> None:
        self.compile_missing = compile_missing
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self._workspace: torch.Tensor | None = None
        for name, module, package in (
            ("FlashInfer", "flashinfer", "flashinfer-python"),
            ("FA3", "sgl_kernel.flash_attn", "sglang-kernel"),
        ):
            try:
                importlib.import_module(module)
                self.versions[name] = _version(package)
            except FAILURES as error:
                self.absent[name] = f"not installed, or it can't be loaded ({short(error)})"

    def prepare(self, problem: Problem, spec: flowlib.Spec) -> tuple[dict[str, Peer], dict[str, str]]:
        """The peers for a batch, ready to be called, and why others are not, by name."""
        makers: dict[str, Callable[[], Peer]] = {}
        refused = dict(self.absent)
        if "FlashInfer" in self.versions:
            makers["FlashInfer"] = lambda: self._flashinfer(problem, spec)
        if "FA3" in self.versions:
            makers["FA3"] = lambda: FlashAttention3(problem, spec, True)
            makers["FA3 unscheduled"] = lambda: FlashAttention3(problem, spec, False)
        ready: dict[str, Peer] = {}
        for name, make in makers.items():
            try:
                ready[name] = make()
            except FAILURES as error:
                refused[name] = short(error)
        return ready, refused

    def _flashinfer(self, problem: Problem, spec: flowlib.Spec) -> Peer:
        if not self.compile_missing and not _is_compiled(spec):
            raise RuntimeError("its kernel for these numbers is not compiled (--compile-peers takes minutes)")
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)
        return FlashInfer(problem, spec, self._workspace)


def _is_compiled(spec: flowlib.Spec) -> bool:
    """Whether FlashInfer's library for a spec lies ready."""
    modules: Any = importlib.import_module("flashinfer.jit.attention")
    b, i, d = torch.bfloat16, torch.int32, spec.head_dim
    if uses_tensor_cores(spec):
        return modules.gen_batch_prefill_module("fa2", b, b, b, i, d, d, 0, False, False, False).is_compiled
    return modules.gen_batch_decode_module(b, b, b, i, d, d, 0, False, False).is_compiled


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown version"


def short(error: BaseException) -> str:
    """Its text in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
