"""Times of entmax decoding: the whole step, its stages, every page by the same kernel, and dense softmax beside it."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_bytes import count_bytes, dense_bytes
from bench_entmax_gate import softmax_error
from bench_entmax_scene import Call, Scene
from bench_gate import PEER_ERROR
from bench_peers import FAILURES, Peers, uses_tensor_cores
from bench_pools import needed
from bench_timing import capture

import flowlib
from flowlib.compiler.program import TileStage
from flowlib.entmax import PagedKVCache
from flowlib.runtime.plan import Plan

STAGES = ("statistics", "threshold", "bounds", "selection", "attention")
"""statistics: means and deviations of scores; threshold: from them; bounds: what is selected by, top-k's bounds or the
Gaussian rule; attention: scores, tau, and values."""
OWN_SOFTMAX, FLASHINFER = "own softmax", "FlashInfer"
_UNITS = 32
_LONG_READ = 256 << 20
_LEAST_UNITS = 8
_WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class Sample:
    """Microseconds of one step: over the replays of a graph, each divided by its steps."""

    median: float
    least: float
    p90: float
    count: int


@dataclass(frozen=True)
class Row:
    """One line of the result, microseconds a step.

    Attributes:
        method, batch, tokens: what was decoded.
        standard: whether the goals hold for its numbers.
        step, full: the method, and the same kernel over every page.
        stages, softmax: by name.
        selected: mean and most selected pages of a head, and the pages there are.
        certified: share of the heads whose output is certainly that of all pages.
        bytes: that the step must move; dense_bytes of dense attention.
        read_bandwidth: bytes a second, measured in the same run.
        pools: caches that take turns; reuse is what is read between two uses of one, over the L2.
    """

    method: str
    batch: int
    tokens: int
    standard: bool
    step: Sample
    full: Sample
    stages: Mapping[str, Sample]
    softmax: Mapping[str, Sample]
    selected: tuple[float, int, int]
    certified: float
    bytes: float
    dense_bytes: int
    read_bandwidth: float
    pools: int
    reuse: float

    @property
    def floor_us(self) -> float:
        """The bytes over the read bandwidth."""
        return 1e6 * self.bytes / self.read_bandwidth

    @property
    def floor_ratio(self) -> float:
        """The step's time over the floor."""
        return self.step.median / self.floor_us

    @property
    def over_full(self) -> float:
        """Speed-up over every page by the same kernel."""
        return self.full.median / self.step.median

    def over(self, name: str) -> float | None:
        """Speed-up over a softmax kernel, if it was measured."""
        return self.softmax[name].median / self.step.median if name in self.softmax else None


@dataclass(frozen=True)
class Timing:
    """How often: replays to warm up, and replays that count."""

    warmup: int
    iterations: int

    def of(self, calls: Sequence[Callable[[], object]], pool: object) -> Sample:
        """Replays a graph of some calls, queued without a wait."""
        graph = capture(calls, pool)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.iterations + 1)]
        for _ in range(self.warmup):
            graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return summary([1e3 * a.elapsed_time(b) / len(calls) for a, b in itertools.pairwise(events)])


def summary(times: Sequence[float]) -> Sample:
    """Median, least and 90th percentile."""
    ordered = sorted(times)
    return Sample(ordered[len(ordered) // 2], ordered[0], ordered[int(0.9 * (len(ordered) - 1))], len(ordered))


def moved_bytes(scene: Scene, plan: Plan, counts: Sequence[Sequence[int]], support: float) -> float:
    """Bytes of a step: statistics of every scored page, K of the selected ones, V of `support` tokens a head, q and o.

    Scores and lists, which cross from one kernel to the next, are written once and read once.
    """
    spec, lengths = plan.spec, [scene.work.tokens] * scene.work.batch
    counted = count_bytes(plan, lengths, counts, score_all=True)
    size = spec.dv * spec.kv_dtype.itemsize
    values = sum(sum(row) for row in counts) * spec.page_size * size  # counted.attend has V of every attended token
    missing = -scene.work.tokens % spec.page_size * size * sum(len(row) for row in counts)
    heads = scene.work.batch * spec.num_heads
    return counted.score + counted.select + counted.attend - values + missing + heads * support * size


def pools_for(scene: Scene, size: float, l2: int, free: int) -> int:
    """Caches such that 8 times the L2 is read between two uses of one, where steps read `size` bytes; as many as fit.

    The first one is there already; `free` bytes are left for more.
    """
    return max(1, min(1 + free // scene.cache_bytes, needed(size, l2), _UNITS))


def measure(
    scene: Scene, peers: Peers, timing: Timing, support: float, read_bandwidth: float, l2: int, free: int,
    compile_peers: bool = False,
) -> tuple[Row, dict[str, str]]:  # fmt: skip
    """The row of a scene whose first cache is there, and why softmax kernels were not measured, by name.

    Args:
        scene: more caches are added to it.
        peers: what is installed.
        timing: how often.
        support: tokens with mass of a head.
        read_bandwidth: bytes a second.
        l2: bytes of the L2.
        free: bytes that more caches may take.
        compile_peers: let FlashInfer compile a kernel that is not there.
    """
    info: list[Any] = []
    scene.sparse(scene.caches[0], info)
    plan, _, _ = scene.compiled(scene.caches[0])
    counts = info[0].selection.counts
    moved = moved_bytes(scene, plan, counts.tolist(), support)
    while len(scene.caches) < pools_for(scene, moved, l2, free):
        scene.sparse(scene.add_cache())
    for cache in scene.caches:  # what a step works in is made before graphs are captured
        scene.full(cache)
    pool = torch.cuda.graph_pool_handle()
    turns = -(-(_UNITS if moved < _LONG_READ else _LEAST_UNITS) // len(scene.caches))

    def timed(call: Call) -> Sample:
        return timing.of([_bound(call, cache) for cache in scene.caches * turns], pool)

    step, full = timed(scene.sparse), timed(scene.full)
    stages = {name: timed(call) for name, call in stage_calls(scene).items()}
    softmax, refused = _softmax(scene, peers, timed, compile_peers)
    reuse = (len(scene.caches) - 1) * moved / l2
    numbers = (float(counts.float().mean()), int(counts.max()), -(-scene.work.tokens // plan.spec.page_size))
    return Row(
        scene.options.method, scene.work.batch, scene.work.tokens, scene.options.standard, step, full, stages, softmax,
        numbers, float(info[0].certified.float().mean()), moved,
        dense_bytes(plan.spec, [scene.work.tokens] * scene.work.batch), read_bandwidth, len(scene.caches), reuse,
    ), refused


def stage_calls(scene: Scene) -> dict[str, Call]:
    """Launches of the single stages over a cache, by name; those that the method has."""
    plan, _, _ = scene.compiled(scene.caches[0])
    stages = plan.program.step_stages
    tiles = [s.name for s in stages if isinstance(s, TileStage)]
    names = {
        "statistics": tiles[:-1], "bounds": tiles[-1:],
        "threshold": [s.name for s in stages if not isinstance(s, TileStage)], "selection": [],
    }  # fmt: skip
    kept = {name: names[name] for name in STAGES if name in names and (names[name] or name == "selection")}
    calls = {name: _only(scene, own, name == "selection") for name, own in kept.items()}

    def attention(cache: PagedKVCache) -> None:
        own, store, out = scene.compiled(cache)
        batch = flowlib.Batch(cache.block_table, cache.seq_lens)
        own._executor.attend_lists(scene.q[:, :, 0], store, batch, out, selected=True)

    return {**calls, "attention": attention}


class _Silent:
    """A tile kernel that does nothing."""

    def on_rows(self, *args: object) -> None:
        """Nothing."""


def _nothing(*args: object, **kwargs: object) -> None:
    """A launch that is left out."""


def _only(scene: Scene, names: Sequence[str], selects: bool) -> Call:
    """A step of which only some stages are launched."""
    plan, _, _ = scene.compiled(scene.caches[0])
    part: Any = copy.copy(plan._executor)
    part.tiles = {name: kernel if name in names else _Silent() for name, kernel in part.tiles.items()}
    part.segments = {name: launch if name in names else _nothing for name, launch in part.segments.items()}
    if not selects:
        part.select = _nothing

    def call(cache: PagedKVCache) -> None:
        _, store, out = scene.compiled(cache)
        part.choose(scene.q[:, :, 0], store, flowlib.Batch(cache.block_table, cache.seq_lens), out)

    return call


def _softmax(
    scene: Scene, peers: Peers, timed: Callable[[Call], Sample], compile_peers: bool
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Dense softmax by flowlib and by FlashInfer; what is wrong is not timed."""
    found: dict[str, Sample] = {}
    refused = {FLASHINFER: peers.absent[FLASHINFER]} if FLASHINFER in peers.absent else {}
    makers: dict[str, Callable[[], Call]] = {OWN_SOFTMAX: lambda: scene.softmax}
    if FLASHINFER in peers.versions:
        makers[FLASHINFER] = lambda: flashinfer(scene, compile_peers)
    for name, make in makers.items():
        try:
            call: Any = make()
            out = call(scene.caches[0])
            error = softmax_error(scene, out.view(scene.q[:, :, 0].shape))
            if not error <= PEER_ERROR:
                refused[name] = f"wrong: relative error {error:.2g}, expected at most {PEER_ERROR:g}"
                continue
            found[name] = timed(call)
        except FAILURES as failure:
            refused[name] = " ".join(str(failure).split())[:160]
    return found, refused


def flashinfer(scene: Scene, compile_missing: bool) -> Call:
    """FlashInfer's batch decode over the caches, in their dtype; planned on the host, which is not timed.

    Raises:
        RuntimeError: its kernel is not compiled. Others: what the library raises.
    """
    decode: Any = importlib.import_module("flashinfer")
    cache, options, work = scene.caches[0], scene.options, scene.work
    spec = scene.compiled(cache)[0].spec
    if not compile_missing and not _is_compiled(spec):
        raise RuntimeError("its kernel for these numbers is not compiled (--compile-peers takes minutes)")
    pages = -(-work.tokens // options.page_size)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=scene.q.device)
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=uses_tensor_cores(spec))
    wrapper.plan(
        torch.arange(work.batch + 1, dtype=torch.int32) * pages, cache.block_table[:, :pages].flatten(),
        torch.full((work.batch,), (work.tokens - 1) % options.page_size + 1, dtype=torch.int32), spec.num_heads,
        spec.num_kv_heads, spec.head_dim, options.page_size, q_data_type=options.dtype, kv_data_type=options.dtype,
        sm_scale=spec.softmax_scale,
    )  # fmt: skip
    if scene.q.is_cuda:
        torch.cuda.synchronize()  # plan copies without waiting
    q, out = scene.q[:, :, 0], torch.empty_like(scene.q[:, :, 0])

    def call(cache: PagedKVCache) -> torch.Tensor:
        wrapper.run(q, (cache.kv[0], cache.kv[1]), out=out)
        return out

    return call


def _is_compiled(spec: flowlib.Spec) -> bool:
    """Whether FlashInfer's library for a spec lies ready."""
    modules: Any = importlib.import_module("flashinfer.jit.attention")
    t, i, d = spec.kv_dtype, torch.int32, spec.head_dim
    if uses_tensor_cores(spec):
        return modules.gen_batch_prefill_module("fa2", t, t, t, i, d, d, 0, False, False, False).is_compiled
    return modules.gen_batch_decode_module(t, t, t, i, d, d, 0, False, False).is_compiled


def _bound(call: Call, cache: PagedKVCache) -> Callable[[], object]:
    return lambda: call(cache)
