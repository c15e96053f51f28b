"""Times of one flow's decode step over one workload, stage by stage and whole, and of dense attention beside it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_bytes import Moved, count_bytes, dense_bytes
from bench_gate import PEER_ERROR, DenseTruth
from bench_peers import FAILURES, Peer, Peers
from bench_pools import Problem, Rotation
from bench_timing import Timed, capture, replay

import flowlib
from flowlib.runtime.plan import StepOutput

LAYERS = 32
_LAUNCHES = 32
_LARGE_READ = 256 << 20
STAGES = ("update", "plan", "score", "select", "attend")


@dataclass(frozen=True)
class Row:
    """One line of the result: a flow on a workload, microseconds a layer.

    Attributes:
        flow, shape: their labels.
        asked: the shape as it was asked for.
        standard: whether the goals hold for its numbers.
        stages: by name; a stage the flow does not have is left out.
        step: the whole step, its share of planning included.
        dense: the dense kernels, by name.
        moved: bytes of one layer.
        dense_bytes: bytes of dense attention.
        read_bandwidth: bytes a second, measured in the same run.
        pools: distinct pools of the step's graphs; stage_pools of those of single stages.
        reuse: bytes read between two uses of a pool over the L2, by stage, and of the step.
        attended: mean share of a list's pages that was attended to.
    """

    flow: str
    shape: str
    asked: str
    standard: bool
    stages: Mapping[str, Timed]
    step: Timed
    dense: Mapping[str, Timed]
    moved: Moved
    dense_bytes: int
    read_bandwidth: float
    pools: int
    stage_pools: int
    reuse: Mapping[str, float] = field(default_factory=dict)
    attended: float = 1.0

    @property
    def fastest_dense(self) -> tuple[str, Timed] | None:
        """The faster dense kernel."""
        return min(self.dense.items(), key=lambda item: item[1].us) if self.dense else None

    @property
    def speedup(self) -> float | None:
        """Over the faster dense kernel."""
        dense = self.fastest_dense
        return None if dense is None else dense[1].us / self.step.us

    @property
    def floor_us(self) -> float:
        """The bytes over the read bandwidth."""
        return self.moved.floor_us(self.read_bandwidth)

    @property
    def floor_ratio(self) -> float:
        """The step's time over the floor."""
        return self.step.us / self.floor_us


class _Silent:
    """A tile kernel that does nothing."""

    def on_rows(self, *args: object) -> None:
        """Nothing."""

    def on_written(self, *args: object) -> None:
        """Nothing."""


def _nothing(*args: object, **kwargs: object) -> None:
    """A launch that is left out."""


def stage_calls(
    plan: flowlib.Plan, problem: Problem, out: StepOutput
) -> dict[str, Callable[[flowlib.KVStore], object]]:
    """Launches of the single stages over a pool, by name; those that a flow has, planning aside."""
    executor, q, batch = plan._executor, problem.q, problem.batch
    score_only: Any = copy.copy(executor)
    select_only: Any = copy.copy(executor)
    score_only.select = _nothing
    select_only.tiles = {name: _Silent() for name in executor.tiles}
    select_only.segments = {name: _nothing for name in executor.segments}
    calls: dict[str, Callable[[flowlib.KVStore], object]] = {}
    if plan.program.update is not None:
        calls["update"] = lambda store: executor.update(store, problem.loc)
    if plan.program.step_stages:
        calls["score"] = lambda store: score_only.choose(q, store, batch, out)
    calls["select"] = lambda store: select_only.choose(q, store, batch, out)
    calls["attend"] = lambda store: executor.attend_lists(q, store, batch, out)
    return calls


def measure_flow(
    label: str,
    plan: flowlib.Plan,
    problem: Problem,
    stores: Sequence[flowlib.KVStore],
    turn: Rotation,
    seconds: float,
    read_bandwidth: float,
    l2: int,
    dense: Mapping[str, Timed],
) -> Row:
    """A flow's row; `stores` are the pools, of which the whole step uses the first `turn.step` in turn.

    Args:
        label: the flow's.
        seconds: of replays for each number.
        read_bandwidth: bytes a second.
        l2: bytes of the L2.
        dense: dense kernels over the same pools, by name.
    """
    out = plan.allocate(problem.batch.size, problem.batch.width, problem.q.device)
    problem.plan_step()
    plan.launch(problem.q, stores[0], problem.batch, out)
    pool = torch.cuda.graph_pool_handle()
    stages: dict[str, Timed] = {"plan": _repeated(problem.plan_step, pool, seconds).shared(LAYERS)}
    for name, call in stage_calls(plan, problem, out).items():
        times = -(-_LAUNCHES // len(stores))
        calls = [_bound(call, store) for _ in range(times) for store in stores]
        stages[name] = replay([capture(calls, pool)], len(calls), seconds)
    step = measure_step(plan, problem, stores[: turn.step], seconds, out, pool)
    attended = out.lengths.tolist()
    lengths = problem.workload.lengths
    moved = count_bytes(plan, lengths, attended, layers=LAYERS)
    read = count_bytes(plan, lengths, attended, layers=LAYERS, score_all=True)
    reuse = {name: (len(stores) - 1) * getattr(read, name) / l2 for name in ("update", "score", "attend")}
    reuse["update"] *= plan.spec.page_size  # timed with a page of every row
    shares = [sum(row) / len(row) / n for row, n in zip(attended, problem.workload.pages, strict=True)]
    return Row(
        label, problem.workload.label, problem.workload.shape, problem.workload.standard,
        {name: stages[name] for name in STAGES if name in stages}, step, dense, moved, dense_bytes(plan.spec, lengths),
        read_bandwidth, turn.step, len(stores), {**reuse, "step": (turn.step - 1) * read.total / l2},
        sum(shares) / len(shares),
    )  # fmt: skip


def measure_step(
    plan: flowlib.Plan,
    problem: Problem,
    stores: Sequence[flowlib.KVStore],
    seconds: float,
    out: StepOutput | None = None,
    pool: object = None,
) -> Timed:
    """A layer's share of steps of LAYERS layers: planning once, then update with scoring, select and attend per layer.

    Over the layers a row finishes a page once in page_size, as it does over the steps of a decode.

    `stores` take turns; `out` and the graphs' memory `pool` are made where not given.
    """
    out = out or plan.allocate(problem.batch.size, problem.batch.width, problem.q.device)
    pool = pool or torch.cuda.graph_pool_handle()

    def layer(store: flowlib.KVStore, loc: torch.Tensor) -> None:
        plan.launch(problem.q, store, problem.batch, out, loc)

    graphs, locs = [], step_locs(problem, LAYERS)
    for start in range(0, max(len(stores), LAYERS), LAYERS):
        own = [functools.partial(layer, stores[(start + i) % len(stores)], locs[i]) for i in range(LAYERS)]
        graphs.append(capture(own, pool, first=problem.plan_step))
    return replay(graphs, LAYERS, seconds)


def step_locs(problem: Problem, layers: int) -> torch.Tensor:
    """Slots of newest tokens, int64 ``[layers, bs]``: one in page_size is the last of its page, the rest are firsts."""
    size, bs = problem.workload.numbers.page_size, problem.batch.size
    first = problem.loc - problem.loc % size
    turn = torch.arange(layers * bs, device=first.device).view(layers, bs)
    return torch.where(turn % size == 0, first + size - 1, first)


def measure_dense(
    peers: Peers, problem: Problem, stores: Sequence[flowlib.KVStore], seconds: float
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Dense kernels over pools in turn, by name, and why others were not measured. A wrong answer is not timed."""
    spec = stores[0].plan.spec
    ready, refused = peers.prepare(problem, spec)
    truth = DenseTruth.of(problem, stores[0]) if ready else DenseTruth(())
    found: dict[str, Timed] = {}
    for name, peer in ready.items():
        try:
            error = truth.error(peer(*_paged(stores[0])))
            if not error <= PEER_ERROR:
                refused[name] = f"wrong: relative error {error:.2g}, expected at most {PEER_ERROR:g}"
                continue
            found[name] = _time_peer(peer, problem, stores, seconds)
        except FAILURES as failure:
            refused[name] = " ".join(str(failure).split())[:160]
    return found, refused


def _time_peer(peer: Peer, problem: Problem, stores: Sequence[flowlib.KVStore], seconds: float) -> Timed:
    layers = LAYERS
    if dense_bytes(stores[0].plan.spec, problem.workload.lengths) > _LARGE_READ:
        layers = len(stores) * -(-8 // len(stores))
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for start in range(0, max(len(stores), layers), layers):
        own = [_paged(stores[(start + i) % len(stores)]) for i in range(layers)]
        graphs.append(capture([_bound_pair(peer, *kv) for kv in own], pool))
    return replay(graphs, layers, seconds)


def _paged(store: flowlib.KVStore) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as ``[pages, page_size, H_kv, D]``."""
    size = store.plan.spec.page_size
    return store.k.unflatten(0, (-1, size)), store.v.unflatten(0, (-1, size))


def _repeated(call: Callable[[], object], pool: object, seconds: float) -> Timed:
    return replay([capture([call] * _LAUNCHES, pool)], _LAUNCHES, seconds)


def _bound(call: Callable[[flowlib.KVStore], object], store: flowlib.KVStore) -> Callable[[], object]:
    return lambda: call(store)


def _bound_pair(peer: Peer, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    return lambda: peer(k, v)
