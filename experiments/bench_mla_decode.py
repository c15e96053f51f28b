"""Decode over latents: flows beside dense attention, measured as `bench_decode.py` measures flows over K and V."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import bench_decode
import torch
from bench_measure import Row
from bench_mla_peers import check_compiled, fa3_latent, latent_wrapper
from bench_mla_shapes import MlaWorkload
from bench_peers import FAILURES, Peer, Peers, short
from bench_pools import Arena, Problem
from rich.console import Console

import flowlib

_WORKSPACE_BYTES = 512 << 20
OWN = "flowlib"
"""Name of the dense attention by flowlib's own kernel."""


class OwnDense:
    """flowlib's decode kernel over whole rows.

    Args:
        problem: the batch.
        spec: its numbers.
    """

    def __init__(self, problem: Problem, spec: flowlib.Spec) -> None:
        from flowlib.kernels.attend_mla import num_splits

        rows, heads, device = len(problem.q), spec.num_heads, problem.q.device
        self.problem, self.spec = problem, spec
        self.splits = num_splits(problem.table.shape[1], spec.page_size, rows, heads, spec.kv_dtype.itemsize)
        self.out = torch.empty(rows, heads, spec.dv, dtype=problem.q.dtype, device=device)
        self.lse = torch.empty(rows, heads, device=device)
        self.partial_o = torch.empty(rows, heads, self.splits, spec.dv, device=device)
        self.partial_lse = torch.empty(rows, heads, self.splits, device=device)

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from flowlib.kernels.attend_mla import launch_attend_mla
        from flowlib.runtime.execute import has_pdl

        spec, p = self.spec, self.problem
        launch_attend_mla(
            p.q, k.flatten(0, 1), v.flatten(0, 1), p.table, p.batch.seq_lens, None, None, self.out, self.lse,
            self.partial_o, self.partial_lse, num_kv_heads=1, group_size=spec.num_heads, lanes=1,
            page_size=spec.page_size, scale=spec.softmax_scale, k_scale=1.0, v_scale=1.0, num_splits=self.splits,
            every=True, pdl=has_pdl(p.q.device),
        )  # fmt: skip
        return self.out


class LatentFlashInfer:
    """FlashInfer's ``BatchMLAPagedAttentionWrapper``; planned on the host, which is not timed."""

    def __init__(self, problem: Problem, spec: flowlib.Spec, workspace: torch.Tensor) -> None:
        work = problem.workload
        pages = [row[:n] for row, n in zip(problem.table, work.pages, strict=True)]
        self.q, self.rank = problem.q, spec.dv
        self.out = torch.empty_like(problem.q[..., : spec.dv])
        self.wrapper = latent_wrapper(
            workspace, list(range(len(problem.q) + 1)), pages, list(work.lengths), spec.num_heads,
            (spec.dv, spec.head_dim - spec.dv), spec.page_size, False, spec.softmax_scale,
        )  # fmt: skip

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, latent, rank = self.q, k[:, :, 0], self.rank
        self.wrapper.run(q[..., :rank], q[..., rank:], latent[..., :rank], latent[..., rank:], out=self.out)
        return self.out


class LatentFA3:
    """FlashAttention 3 of sglang-kernel."""

    def __init__(self, problem: Problem, spec: flowlib.Spec) -> None:
        self.library: Any = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
        self.problem, self.spec = problem, spec
        self.starts = torch.arange(len(problem.q) + 1, dtype=torch.int32, device=problem.q.device)

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = self.problem
        return fa3_latent(
            self.library, p.q, k, self.spec.dv, p.table, p.batch.seq_lens, self.starts, 1, self.spec.softmax_scale
        )


class LatentPeers(Peers):
    """Dense attention over latents: what is installed, and flowlib's own kernel.

    Args:
        compile_missing: let FlashInfer compile a kernel that is not there, which takes minutes.
        without: libraries whose kernels are left out.
    """

    def __init__(self, compile_missing: bool = False, without: Sequence[str] = ()) -> None:
        super().__init__(compile_missing)
        for name in set(without) & set(self.versions):
            del self.versions[name]
            self.absent[name] = "left out by --without"

    def prepare(self, problem: Problem, spec: flowlib.Spec) -> tuple[dict[str, Peer], dict[str, str]]:
        """As for :class:`bench_peers.Peers`."""
        makers: dict[str, Callable[[], Peer]] = {OWN: lambda: OwnDense(problem, spec)}
        if "FlashInfer" in self.versions:
            makers["FlashInfer"] = lambda: self._latent_flashinfer(problem, spec)
        if "FA3" in self.versions:
            makers["FA3"] = lambda: LatentFA3(problem, spec)
        ready: dict[str, Peer] = {}
        refused = dict(self.absent)
        for name, make in makers.items():
            try:
                ready[name] = make()
            except FAILURES as error:
                refused[name] = short(error)
        return ready, refused

    def _latent_flashinfer(self, problem: Problem, spec: flowlib.Spec) -> Peer:
        check_compiled(self.compile_missing, ragged=False)
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)
        return LatentFlashInfer(problem, spec, self._workspace)


@dataclass(frozen=True)
class LatentRow(Row):
    """A row whose floor knows operations, too: with many heads attention to latents is bound by them.

    Attributes:
        flops: operations of the attention to the lists.
        matmul_rate: operations a second, measured in the same run.
    """

    flops: float = 0.0
    matmul_rate: float = float("inf")

    @classmethod
    def of(cls, row: Row, work: MlaWorkload, matmul_rate: float) -> LatentRow:
        """A measured row with the operations of its workload."""
        n = work.numbers
        tokens = row.attended * sum(work.lengths)
        flops = 2.0 * tokens * n.group_size * (n.head_dim + n.kv_lora_rank)
        plain = {f.name: getattr(row, f.name) for f in dataclasses.fields(Row)}
        return cls(**plain, flops=flops, matmul_rate=matmul_rate)

    @property
    def floor_us(self) -> float:
        """The bytes of all stages but attention, and its bytes or operations, whichever take longer."""
        attend = max(self.moved.attend / self.read_bandwidth, self.flops / self.matmul_rate)
        return 1e6 * ((self.moved.total - self.moved.attend) / self.read_bandwidth + attend)


class LatentBench(bench_decode.Bench):
    """The decode part of a run: `bench_decode.py`'s, over latents; saving and printing are the whole run's.

    Args:
        settings: what to run.
        console: where its progress goes.
        keep: called whenever a workload has been measured.
        without: libraries whose kernels are left out.
    """

    def __init__(
        self, settings: bench_decode.Settings, console: Console, keep: Callable[[], None], without: Sequence[str]
    ) -> None:
        super().__init__(settings, console)
        self._keep, self._without = keep, without

    def arena(self, size: int) -> Arena:
        """Memory for the latents."""
        return Arena(size, self.settings.device, latent=True)

    def peers(self) -> Peers:
        """Dense attention over latents."""
        return LatentPeers(self.settings.compile_peers, self._without)

    def keep(self) -> None:
        """Saves what is known so far."""
        self._keep()

    def rows(self, works: Sequence[MlaWorkload], matmul_rate: float) -> list[LatentRow]:
        """What was measured, with operations."""
        by_label = {work.label: work for work in works}
        return [LatentRow.of(row, by_label[row.shape], matmul_rate) for row in self.result.rows]
