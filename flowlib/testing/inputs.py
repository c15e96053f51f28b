"""Scenes: ragged batches over a paged pool that is hostile wherever nothing may be read.

Physical pages of different requests are interleaved and descend; every unowned page, unwritten slot and field of an
unfinished page is NaN; page table entries past a row's pages are no pages at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowlib.core.errors import BatchError
from flowlib.core.spec import Spec
from flowlib.runtime.batch import Batch
from flowlib.runtime.plan import Plan
from flowlib.runtime.pool import PagedPool

POISON = (-7, 2**31 - 1)
"""Page table entries past a row's pages."""


@dataclass(frozen=True)
class Scene:
    """A batch, its pool and what was put into it.

    Attributes:
        plan: what the pool was made for.
        pool: K and V written, fields computed by the reference.
        batch: page table and lengths.
        q: ``[rows, H_q, D]`` in the spec's field dtype.
        lengths: tokens of each request.
        pages: physical pages of each request, in logical order.
        k, v: per request ``[length, H_kv, D]`` and ``[length, H_kv, Dv]`` as stored: in kv_dtype, not yet scaled. With
            MLA, k is the latents and v their content.
        rows: for each row of the batch its request and the tokens it sees.
    """

    plan: Plan
    pool: PagedPool
    batch: Batch
    q: torch.Tensor
    lengths: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    rows: tuple[tuple[int, int], ...]

    @property
    def spec(self) -> Spec:
        """The plan's numbers."""
        return self.plan.spec

    def finished_slots(self) -> torch.Tensor:
        """Last slot of every finished page, int64, on the pool's device: what an update of all fields needs."""
        size = self.spec.page_size
        slots = [p * size + size - 1 for b, pages in enumerate(self.pages) for p in pages[: self.lengths[b] // size]]
        return torch.tensor(slots, dtype=torch.int64, device=self.pool.device)

    def pool_by(self, impl: str) -> PagedPool:
        """A copy of the pool whose fields were all NaN, then computed by `impl`.

        Raises:
            OptionError, BackendError: `impl` is unknown or can't run here.
        """
        twin = self.pool.clone()
        for value in twin.fields.values():
            fill_nan(value)
        self.plan.update(twin, self.finished_slots(), impl=impl)
        return twin


def fill_nan(x: torch.Tensor) -> None:
    """Overwrites a floating tensor with NaN, float8 included."""
    x.copy_(torch.full((1,), float("nan")).to(x.dtype).to(x.device).expand_as(x))


def ragged_lengths(spec: Spec) -> list[int]:
    """Lengths around every edge of a spec: 0, one token, page bounds, the budget's last dense page, far beyond it."""
    size, covered = spec.page_size, (spec.top_k + spec.bos + spec.eos) * spec.page_size
    longest = min(spec.max_pages * size, 2 * covered + 5 * size - size // 2)
    wanted = [0, 1, size, size + 1, covered - size // 2, covered, covered + 1, longest]
    return sorted({n for n in wanted if 0 <= n <= spec.max_pages * size})


def scene(
    plan: Plan,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    q_lens: Sequence[int] | None = None,
) -> Scene:
    """A scene with K, V and q drawn on the CPU in their own dtypes, then moved.

    Args:
        plan: the flow and spec.
        lengths: tokens of each request; ``None`` means :func:`ragged_lengths`.
        seed: of everything random.
        device: where pool, batch and q go.
        q_lens: query tokens of each request; ``None`` means one each.

    Raises:
        BatchError: there is no request, or a length is negative or has more pages than the spec allows.
    """
    spec = plan.spec
    lengths = tuple(ragged_lengths(spec) if lengths is None else lengths)
    if not lengths:
        raise BatchError("scene: lengths is empty, expected at least one request")
    counts = [-(-n // spec.page_size) for n in lengths]
    if any(n < 0 for n in lengths) or max(counts, default=0) > spec.max_pages:
        most = spec.max_pages * spec.page_size
        raise BatchError(f"scene: lengths are {list(lengths)}, expected from 0 to {most} tokens each")
    generator = torch.Generator().manual_seed(seed)
    k = tuple(_draw(generator, (n, spec.num_kv_heads, spec.head_dim), spec.kv_dtype) for n in lengths)
    v = tuple(
        x[..., : spec.dv] if spec.is_mla else _draw(generator, (len(x), spec.num_kv_heads, spec.dv), spec.kv_dtype)
        for x in k
    )
    pages, num_pages = reverse_interleaved(counts)
    batch = _batch(pages, lengths, q_lens, device)
    rows = _rows(lengths, q_lens)
    q = _draw(generator, (len(rows), spec.num_heads, spec.head_dim), spec.field_dtype).to(device)
    pool = PagedPool(plan, num_pages, device)
    for value in (pool.k, pool.v, *pool.fields.values()):
        fill_nan(value)
    _write(pool, spec, k, v, pages)
    return Scene(plan, pool, batch, q, lengths, pages, k, v, rows)


def reverse_interleaved(counts: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Physical pages for requests of some page counts: one each in turn, from the pool's end down, a fifth left out.

    Returns:
        pages of each request, and the size of a pool that holds them.
    """
    total = sum(counts)
    num_pages = total + total // 4 + 2
    free = iter([p for i, p in enumerate(range(num_pages - 1, -1, -1)) if i % 5 != 2])
    pages: list[list[int]] = [[] for _ in counts]
    for logical in range(max(counts, default=0)):
        for request, count in enumerate(counts):
            if logical < count:
                pages[request].append(next(free))
    return tuple(tuple(p) for p in pages), num_pages


def _draw(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _batch(
    pages: Sequence[Sequence[int]], lengths: Sequence[int], q_lens: Sequence[int] | None, device: str | torch.device
) -> Batch:
    width = max((len(p) for p in pages), default=0) + 2
    table = [[*own, *(POISON[(i + b) % 2] for i in range(width - len(own)))] for b, own in enumerate(pages)]
    as_int32 = {"dtype": torch.int32, "device": device}
    queries = None if q_lens is None else torch.tensor(list(q_lens), **as_int32)
    return Batch(torch.tensor(table, **as_int32).view(len(lengths), width), torch.tensor(lengths, **as_int32), queries)


def _rows(lengths: Sequence[int], q_lens: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    if q_lens is None:
        return tuple(enumerate(lengths))
    return tuple((b, n - m + j + 1) for b, (n, m) in enumerate(zip(lengths, q_lens, strict=True)) for j in range(m))


def _write(
    pool: PagedPool, spec: Spec, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], pages: Sequence[Sequence[int]]
) -> None:
    """Stores every request as serving does: all tokens but the last in one call, the last ones of all in another."""
    size = spec.page_size
    slots = [
        torch.tensor([own[t // size] * size + t % size for t in range(len(x))], dtype=torch.int64)
        for own, x in zip(pages, k, strict=True)
    ]
    for cut in (slice(None, -1), slice(-1, None)):
        loc = torch.cat([s[cut] for s in slots]).to(pool.device)
        keys = torch.cat([x[cut] for x in k]).float() * spec.k_scale
        values = torch.cat([x[cut] for x in v]).float() * spec.v_scale
        if len(loc):
            pool.write(keys.to(pool.device), None if spec.is_mla else values.to(pool.device), loc)
