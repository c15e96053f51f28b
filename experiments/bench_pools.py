"""Pools in turn: K and V of all pools and shapes are slices of one random block; fields are made per plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bench_bytes import token_bytes
from bench_shapes import BenchError, Workload

import flowlib
from flowlib.runtime.pool import allocate_fields

L2_TIMES = 8
"""Between two uses of a pool at least this many times the L2 is read."""
MAX_POOLS = 2048
_PAGES_ROUNDED = 16  # slices of every field start at a multiple of 16 bytes, so that all pools take the same kernel
_CHUNK = 1 << 28
_PAGES_AT_ONCE = 1 << 20


class Arena:
    """Random normal bf16 numbers, iid, for K and for V, or for latents, which are both.

    Args:
        size: bytes, for K and V together.
        device: where it lies.
        seed: of the numbers.
        latent: whether they are latents: then k and v are one block.
    """

    def __init__(self, size: int, device: str | torch.device, seed: int = 0, latent: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.latent, count = latent, -(-size // (2 if latent else 4))
        self.k = torch.empty(count, dtype=torch.bfloat16, device=device)
        self.v = self.k if latent else torch.empty_like(self.k)
        for block in (self.k,) if latent else (self.k, self.v):
            for part in block.split(_CHUNK):
                part.normal_(generator=generator)

    @property
    def size(self) -> int:
        """Bytes of K and V together."""
        return (1 if self.latent else 2) * self.k.numel() * self.k.element_size()

    def slices(self, tokens: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first K and V as ``[tokens, heads, size]``. Raises BenchError if there are not as many."""
        count = tokens * heads * size
        if count > self.k.numel():
            needed = self.size / self.k.numel() * count / 1e9
            raise BenchError(f"the pools need {needed:.1f} GB of K and V, there are {self.size / 1e9:.1f} GB")
        return self.k[:count].view(tokens, heads, size), self.v[:count].view(tokens, heads, size)


@dataclass(frozen=True)
class Problem:
    """A workload on a device: what is alike for all flows and layers of a step.

    Attributes:
        workload: the request lengths and numbers.
        num_pages: pages of one pool.
        q: bf16 ``[bs, H_q, D]``.
        slots: int32 ``[bs, W * page_size]``, a serving engine's token table; rows: int64 ``[bs]``, its row of each
            request.
        batch: page table int32 ``[bs, W]``, filled by planning, and lengths.
        loc: int64 ``[bs]``, slot of each request's newest token.
        table: int32 ``[bs, W]``, what planning must find; 0 past a row's pages.
    """

    workload: Workload
    num_pages: int
    q: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    batch: flowlib.Batch
    loc: torch.Tensor
    table: torch.Tensor

    def plan_step(self) -> None:
        """What a step does once for all layers: the page table, on the device."""
        from flowlib.kernels.planning import launch_page_table

        launch_page_table(
            self.slots, self.rows, self.batch.seq_lens, self.batch.page_table, page_size=self.workload.numbers.page_size
        )


def problem(workload: Workload, device: str | torch.device, seed: int = 1) -> Problem:
    """A workload with pages drawn at random from its pool."""
    numbers, pages = workload.numbers, workload.pages
    generator = torch.Generator().manual_seed(seed)
    num_pages = pages_of(workload)
    drawn = torch.randperm(num_pages, generator=generator).to(torch.int32).split([*pages, num_pages - sum(pages)])
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, own in zip(table, drawn, strict=False):
        row[: len(own)] = own
    lengths = torch.tensor(workload.lengths, dtype=torch.int32)
    last = lengths.to(torch.int64) - 1
    page = table.to(torch.int64).gather(1, (last // numbers.page_size)[:, None])[:, 0]
    slots = table[:, :, None] * numbers.page_size + torch.arange(numbers.page_size, dtype=torch.int32)
    heads = numbers.group_size * numbers.num_kv_heads
    q = torch.randn(len(pages), heads, numbers.head_dim, generator=generator).to(torch.bfloat16)
    made = Problem(
        workload,
        num_pages,
        q.to(device),
        slots.flatten(1).contiguous().to(device),
        torch.arange(len(pages), device=device),
        flowlib.Batch(torch.full_like(table, -7).to(device), lengths.to(device)),
        (page * numbers.page_size + last % numbers.page_size).to(device),
        table.to(device),
    )
    made.plan_step()
    return made


def pages_of(workload: Workload) -> int:
    """Pages of one pool."""
    return -(-(sum(workload.pages) + 1) // _PAGES_ROUNDED) * _PAGES_ROUNDED


def pool_bytes(workload: Workload) -> int:
    """Bytes of K and V, or of the latents, of one pool."""
    n = workload.numbers
    return pages_of(workload) * n.page_size * n.num_kv_heads * token_bytes(workload.spec())


def make_pools(plan: flowlib.Plan, problem: Problem, arena: Arena, count: int) -> list[flowlib.KVStore]:
    """`count` pools for a plan, the fields of all their pages computed."""
    spec, pages = plan.spec, problem.num_pages
    k, v = arena.slices(count * pages * spec.page_size, spec.num_kv_heads, spec.head_dim)
    fields = allocate_fields(plan, count * pages, k.device)
    whole = flowlib.KVStore(plan, k, None if spec.is_mla else v, fields)
    if fields:
        for start in range(0, count * pages, _PAGES_AT_ONCE):
            page = torch.arange(start, min(start + _PAGES_AT_ONCE, count * pages), device=k.device)
            plan.update(whole, page * spec.page_size + spec.page_size - 1, impl="triton")
    tokens = pages * spec.page_size
    return [
        flowlib.KVStore(
            plan,
            k[i * tokens : (i + 1) * tokens],
            None if spec.is_mla else v[i * tokens : (i + 1) * tokens],
            {name: field[i * pages : (i + 1) * pages] for name, field in fields.items()},
        )
        for i in range(count)
    ]


@dataclass(frozen=True)
class Rotation:
    """How many pools there are, and how many the graphs of a whole step use in turn."""

    pools: int
    step: int


def needed(size: float, l2: int) -> int:
    """Pools such that `size` bytes read from each are L2_TIMES the L2 between two uses of one."""
    return 1 + -int(-L2_TIMES * l2 // size) if size else 1


def rotation(step: float, stages: Sequence[float], l2: int, fit: int, layers: int) -> Rotation:
    """Pools for a step that reads `step` bytes a layer and for its stages alone.

    A step's graphs have `layers` layers each: their pools must divide that number or be a multiple of it, else a
    pool's turn would come early where the replays start again.

    Args:
        step, stages: bytes read a layer.
        l2: bytes of the L2.
        fit: most pools that the memory holds.
        layers: layers in a graph.
    """
    most = max(1, min(fit, MAX_POOLS))
    wanted = needed(step, l2)
    divisors = [d for d in range(1, layers + 1) if layers % d == 0]
    allowed = [*divisors, *range(2 * layers, MAX_POOLS + 1, layers)]
    fitting = [n for n in allowed if n <= most]
    chosen = next((n for n in fitting if n >= wanted), fitting[-1])
    return Rotation(min(most, max([chosen, *(needed(s, l2) for s in stages)])), chosen)
