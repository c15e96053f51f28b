"""The token-level H2O flows beside an independent float64 recurrence (arXiv:2306.14048).

Each step, over the scored window ``[bos, S - eos)`` of the row only: probs = softmax(scale · q·k),
hh = probs + decay · hh. The recurrence here is plain torch on the CPU and uses nothing of flowlib; the flow is driven
through planner, indexer and selection over a paged pool whose page table is shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import flowlib
from flowlib.errors import OptionError

MEAN_QUERY = "h2o_token_sparse_attention"
PER_HEAD = "gqa_h2o_token_sparse_attention"
RESERVED_AFFINITY = 4.0
"""Reserved tokens draw most of the attention, as sinks and recent tokens do: a softmax over them too would show."""
NOISE = 0.5
"""Spread of the queries about the direction; the smaller, the steadier the increments of a token."""
SPARE_COLUMNS = 3
STATE = "hh_score"


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        flow: registered name of the flow.
        mean_query: whether the recurrence takes the group's mean query; ``None`` decides by the flow's name.
        seeds: one request each, all in one batch.
        top_k, bos, eos: tokens chosen, and first and last tokens reserved.
        state_dtype: dtype of the field ``hh_score``.
    """

    flow: str = PER_HEAD
    mean_query: bool | None = None
    steps: int = 600
    seq_len: int = 128
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    top_k: int = 32
    bos: int = 4
    eos: int = 8
    decay: float = 0.984375
    state_dtype: torch.dtype = torch.bfloat16
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    impl: str = "reference"

    @property
    def scored(self) -> int:
        """Tokens of the scored window."""
        return self.seq_len - self.bos - self.eos

    @property
    def reported(self) -> tuple[int, ...]:
        """The steps that are reported and judged: the first, the quarters after it, the last."""
        return tuple(sorted({1, self.steps // 4 + 1, self.steps // 2 + 1, self.steps}))

    @property
    def expected_mass(self) -> Callable[[int], float]:
        """Total of hh after n steps that add 1 each."""
        return lambda n: float(n) if self.decay == 1.0 else (1 - self.decay**n) / (1 - self.decay)

    def check(self) -> None:
        """Raises OptionError for a run that would judge nothing."""
        if self.scored <= self.top_k:
            raise OptionError(
                f"seq_len {self.seq_len} without {self.bos} first and {self.eos} last tokens leaves {self.scored} "
                f"scored tokens, expected more than top_k {self.top_k}: else every token is chosen"
            )
        for name in ("steps", "top_k"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class Scene:
    """Data of B requests on the CPU: keys and values ``[B, S, H_kv, D]``, queries ``[steps, B, H_q, D]``, bfloat16."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor


def draw(options: Options, seeds: tuple[int, ...]) -> Scene:
    """Keys with a stable affinity per token along a direction that the queries lean to.

    With keys and queries drawn alike, every token would gather nearly the same mass, and the boundary of the top-k
    would lie below one ulp of the state, where no order can be resolved.
    """
    parts = [_draw_request(options, seed) for seed in seeds]
    keys, values, queries = (torch.stack(x) for x in zip(*parts, strict=True))
    return Scene(keys, values, queries.transpose(0, 1).contiguous())


def _draw_request(o: Options, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    direction = torch.randn(o.kv_heads, o.head_dim, generator=g)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    affinity = torch.randn(o.seq_len, o.kv_heads, 1, generator=g)
    affinity[: o.bos] += RESERVED_AFFINITY
    affinity[o.seq_len - o.eos :] += RESERVED_AFFINITY
    shape = (o.seq_len, o.kv_heads, o.head_dim)
    keys = torch.randn(shape, generator=g) + affinity * direction
    values = torch.randn(shape, generator=g)
    queries = NOISE * torch.randn(o.steps, o.kv_heads, o.group, o.head_dim, generator=g)
    queries += o.head_dim**0.5 * _leaning(o.group)[:, None] * direction[:, None, :]
    return keys.bfloat16(), values.bfloat16(), queries.flatten(1, 2).bfloat16()


def _leaning(group: int) -> torch.Tensor:
    """How far each head leans, 1 on average; heads differ, so that their mean query does not stand for them."""
    return torch.linspace(0.0, 2.0, group) if group > 1 else torch.ones(1)


class Recurrence:
    """hh in float64, and beside it the same with its state rounded to the field's dtype after every step.

    Attributes:
        exact: ``[B, H_kv, n]`` over the scored tokens.
        rounded: what rounding of the state alone makes of it.
    """

    def __init__(self, options: Options, keys: torch.Tensor) -> None:
        self.options = options
        window = keys[:, options.bos : options.seq_len - options.eos]
        self.keys = window.double().permute(0, 2, 3, 1)  # [B, H, D, n]
        self.exact = self.keys.new_zeros(len(keys), options.kv_heads, options.scored)
        self.rounded = self.exact.clone()

    def step(self, q: torch.Tensor) -> None:
        """Adds the attention of queries ``[B, H_q, D]``."""
        o = self.options
        q = q.double().view(len(q), o.kv_heads, o.group, o.head_dim)
        mean_query = o.flow == MEAN_QUERY if o.mean_query is None else o.mean_query
        if mean_query:
            q = q.sum(2, keepdim=True) / o.group
        logits = q @ self.keys / o.head_dim**0.5
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        probs = (weights / weights.sum(-1, keepdim=True)).mean(2)
        self.exact = probs + o.decay * self.exact
        self.rounded = (probs + o.decay * self.rounded).to(o.state_dtype).double()


@dataclass(frozen=True)
class Snapshot:
    """One request after some steps; the worst of its kv heads counts.

    Attributes:
        step: steps done.
        error: L2 distance of the state from the exact one, over the exact one's norm.
        mass, expected: total of the state, and of the exact one by formula.
        rounded_mass: total of the recurrence whose state is rounded after every step.
        largest, exact_largest: largest entry of the state, and of the exact one.
        overlap: share of the exact top-k that was chosen.
        boundary: gap between the k-th and the next exact score, in ulps of the state's dtype.
        ratio: exact scores of the picks over the best possible sum.
        well_formed: whether k scored tokens and every reserved one are listed, once each, ascending.
    """

    seed: int
    step: int
    error: float
    mass: float
    expected: float
    rounded_mass: float
    largest: float
    exact_largest: float
    overlap: float
    boundary: float
    ratio: float
    well_formed: bool


@dataclass(frozen=True)
class Reuse:
    """hh_score when request 1 takes over request 0's slots: entries that are not zero before and after."""

    before: int
    after: int


@dataclass(frozen=True)
class Result:
    """What a run found."""

    options: Options
    reuse: Reuse
    snapshots: list[Snapshot] = field(default_factory=list)


class Driver:
    """The flow over a paged pool: page_size 1, shuffled page table, NaN in every slot nobody wrote."""

    def __init__(self, options: Options) -> None:
        o = options
        flow = flowlib.build(o.flow, decay=o.decay, state_dtype=o.state_dtype)
        requests = len(o.seeds)
        spec = flowlib.Spec(
            page_size=1, head_dim=o.head_dim, group_size=o.group, num_kv_heads=o.kv_heads, top_k=o.top_k, bos=o.bos,
            eos=o.eos, max_pages=o.seq_len + SPARE_COLUMNS, max_batch=requests,
        )  # fmt: skip
        self.options = o
        self.plan = flowlib.profile(flow, spec)
        self.pool = flowlib.PagedPool(self.plan, 2 * requests * o.seq_len, o.device)
        self.pool.k.fill_(float("nan"))
        self.pool.v.fill_(float("nan"))
        order = torch.randperm(self.pool.num_pages, generator=torch.Generator().manual_seed(o.seeds[0]))
        self.table = order[: requests * o.seq_len].view(requests, o.seq_len)
        columns = torch.nn.functional.pad(self.table, (0, SPARE_COLUMNS), value=-1).to(o.device, torch.int32)
        lengths = torch.full((requests,), o.seq_len, dtype=torch.int32, device=o.device)
        self.batch = flowlib.Batch(columns, lengths)
        self.out: flowlib.StepOutput | None = None

    def write(self, scene: Scene) -> None:
        """Stores keys and values of all tokens, last token first; ``forward_cache`` runs for each."""
        device, loc = self.options.device, self.table.flatten().flip(0)
        k, v = (x.flatten(0, 1).flip(0).to(device) for x in (scene.keys, scene.values))
        self.pool.write(k, v, loc.to(device), impl=self.options.impl)

    def step(self, q: torch.Tensor) -> flowlib.StepOutput:
        """One decode step; for Triton in its allocation-free form."""
        q = q.to(self.options.device)
        if self.options.impl == "reference":
            return self.plan.step(q, self.pool, self.batch, impl="reference")
        if self.out is None:
            self.plan.check_step(q, self.pool, self.batch)
            self.out = self.plan.allocate(self.batch.size, self.batch.width, self.options.device)
        self.plan.launch(q, self.pool, self.batch, self.out)
        return self.out

    def state(self) -> torch.Tensor:
        """hh_score of the scored tokens, float64 ``[B, H_kv, n]``, on the CPU."""
        o = self.options
        pages = self.table[:, o.bos : o.seq_len - o.eos]
        return self.pool.fields[STATE].cpu()[pages][..., 0, 0].double().transpose(1, 2)

    def nonzero(self) -> int:
        """Entries of hh_score, anywhere in the pool, that are not 0."""
        return int((self.pool.fields[STATE] != 0).sum())


def run(options: Options, progress: Callable[[int], None] = lambda step: None) -> Result:
    """Drives the flow and the recurrence side by side, then hands the slots to other requests.

    Args:
        options: what is run.
        progress: called with the number of steps done.

    Raises:
        OptionError and flowlib's other errors: the flow or the run can't be set up.
    """
    options.check()
    with few_threads(options.device):
        scene = draw(options, options.seeds)
        driver, recurrence = Driver(options), Recurrence(options, scene.keys)
        driver.write(scene)
        snapshots: list[Snapshot] = []
        for done in range(1, options.steps + 1):
            q = scene.queries[done - 1]
            out = driver.step(q)
            recurrence.step(q)
            if done in options.reported:
                snapshots += _snapshots(driver, recurrence, out, done)
            progress(done)
        return Result(options, _reuse(driver), snapshots)


def _reuse(driver: Driver) -> Reuse:
    before = driver.nonzero()
    seeds = tuple(seed + len(driver.options.seeds) for seed in driver.options.seeds)
    driver.write(draw(driver.options, seeds))
    return Reuse(before, driver.nonzero())


def _snapshots(driver: Driver, recurrence: Recurrence, out: flowlib.StepOutput, done: int) -> Iterator[Snapshot]:
    o, state = driver.options, driver.state()
    pages, lengths = out.pages.cpu(), out.lengths.cpu()
    for request, seed in enumerate(o.seeds):
        got, exact = state[request], recurrence.exact[request]
        error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
        masses, expected = got.sum(-1), o.expected_mass(done)
        furthest = int((masses - expected).abs().nan_to_num(torch.inf).argmax())
        picks, well_formed = _picks(pages[request], lengths[request], o)
        best = exact.sort(dim=-1, descending=True).values
        top, rest = best[:, : o.top_k], best[:, o.top_k]
        chosen = torch.stack([exact[h][picks[h]].sum() for h in range(o.kv_heads)])
        hits = torch.stack([(exact[h][picks[h]] >= top[h, -1]).sum() for h in range(o.kv_heads)])
        yield Snapshot(
            seed, done, float(error.max()), float(masses[furthest]), expected,
            float(recurrence.rounded[request, furthest].sum()), float(got.max()), float(exact.max()),
            overlap=float(hits.min()) / o.top_k,
            boundary=float(((top[:, -1] - rest) / ulp(top[:, -1], o.state_dtype)).min()),
            ratio=float((chosen / top.sum(-1)).min()), well_formed=well_formed,
        )  # fmt: skip


def _picks(pages: torch.Tensor, lengths: torch.Tensor, o: Options) -> tuple[list[torch.Tensor], bool]:
    """Chosen tokens of each kv head, counted from the window's first, and whether its page list is well formed."""
    reserved = [*range(o.bos), *range(o.seq_len - o.eos, o.seq_len)]
    picks, good = [], True
    for listed, length in zip(pages, lengths.tolist(), strict=True):
        listed = listed[:length]
        inside = listed[(listed >= o.bos) & (listed < o.seq_len - o.eos)].unique()
        picks.append(inside.long() - o.bos)
        good &= listed.tolist() == sorted({*inside.tolist(), *reserved}) and len(inside) == o.top_k
    return picks, good


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance from the positive `x` to the next number of `dtype`."""
    return torch.exp2(torch.floor(torch.log2(x))) * torch.finfo(dtype).eps


@contextmanager
def few_threads(device: str) -> Iterator[None]:
    """One thread while the operations are many and small ones on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
