"""Small worlds with keys and values that a test chooses, in interleaved, descending pages of a NaN-filled pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import flowlib
from flowlib.runtime.plan import StepOutput
from flowlib.testing import Scene, fill_nan, gamma, reverse_interleaved
from flowlib.testing.stages import Run, judge_attention


@dataclass(frozen=True)
class World:
    """Requests in a pool.

    Attributes:
        plan: what the pool was made for.
        pool: K and V written, fields computed.
        batch: one query token a request.
        pages: physical pages of each request.
        k, v: per request ``[length, H_kv, D]`` and ``[length, H_kv, Dv]`` in the pool's dtype.
    """

    plan: flowlib.Plan
    pool: flowlib.PagedPool
    batch: flowlib.Batch
    pages: tuple[tuple[int, ...], ...]
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    def queries(self, seed: int = 1) -> torch.Tensor:
        """Random queries ``[rows, H_q, D]``."""
        spec = self.plan.spec
        shape = (self.batch.size, spec.num_heads, spec.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(spec.field_dtype)

    def step(
        self, q: torch.Tensor | None = None, impl: str = "reference", batch: flowlib.Batch | None = None
    ) -> StepOutput:
        """A step; the reference computes in float64."""
        dtype = torch.float64 if impl == "reference" else None
        q = self.queries() if q is None else q
        return self.plan.step(q, self.pool, batch or self.batch, impl=impl, dtype=dtype)

    def judged(self, out: StepOutput, q: torch.Tensor, impl: str) -> None:
        """Asserts that o and lse are attention over the output's own page lists, within the derived tolerance."""
        lengths = tuple(len(x) for x in self.k)
        rows = tuple(enumerate(lengths))
        made = Scene(self.plan, self.pool, self.batch, q, lengths, self.pages, self.k, self.v, rows)
        for label, (verdict, where) in judge_attention(Run(impl, made, q, {}, self.pool, out)).items():
            assert verdict.ok, f"{label}, {where}: {verdict}"

    def slots(self, request: int) -> torch.Tensor:
        """Token slots of a request, int64."""
        size, length = self.plan.spec.page_size, len(self.k[request])
        return slots_of(self.pages[request], length, size)


def slots_of(pages: Sequence[int], length: int, size: int) -> torch.Tensor:
    """Token slots of the first `length` tokens in `pages`, int64."""
    return torch.tensor([pages[t // size] * size + t % size for t in range(length)], dtype=torch.int64)


def table_of(pages: Sequence[Sequence[int]], width: int | None = None) -> torch.Tensor:
    """Page table int32 whose entries past a row's pages are no pages."""
    width = max(len(p) for p in pages) + 1 if width is None else width
    table = torch.full((len(pages), width), -7, dtype=torch.int32)
    for row, own in enumerate(pages):
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return table


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tokens(
    spec: flowlib.Spec, lengths: Sequence[int], seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of requests of some lengths, in the pool's dtype."""
    generator = torch.Generator().manual_seed(seed)
    k = [torch.randn(n, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.kv_dtype) for n in lengths]
    v = [torch.randn(n, spec.num_kv_heads, spec.dv, generator=generator).to(spec.kv_dtype) for n in lengths]
    return k, v


def world(
    name: str,
    spec: flowlib.Spec,
    lengths: Sequence[int],
    *,
    k: Sequence[torch.Tensor] | None = None,
    v: Sequence[torch.Tensor] | None = None,
    impl: str = "reference",
    **options: object,
) -> World:
    """A world of requests of some lengths; K and V are random where not given."""
    plan = flowlib.profile(flowlib.build(name, **options), spec)
    random_k, random_v = random_tokens(spec, lengths)
    k = [x.to(spec.kv_dtype) for x in (random_k if k is None else k)]
    v = [x.to(spec.kv_dtype) for x in (random_v if v is None else v)]
    pages, num_pages = reverse_interleaved([-(-n // spec.page_size) for n in lengths])
    pool = flowlib.PagedPool(plan, num_pages)
    for value in (pool.k, pool.v, *pool.fields.values()):
        fill_nan(value)
    for own, keys, values in zip(pages, k, v, strict=True):
        pool.write(
            keys.float() * spec.k_scale,
            values.float() * spec.v_scale,
            slots_of(own, len(keys), spec.page_size),
            impl=impl,
        )
    return World(plan, pool, flowlib.Batch(table_of(pages), int32(list(lengths))), pages, tuple(k), tuple(v))


def repeated(values: Sequence[float], spec: flowlib.Spec, size: int) -> torch.Tensor:
    """One number a token, in every kv head and channel: ``[len(values), H_kv, size]``."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, spec.num_kv_heads, size).contiguous()


def near(one: torch.Tensor, other: torch.Tensor, terms: int = 64) -> bool:
    """Equal but for rounding: one step of the coarser dtype and γ of `terms` fp32 roundings, at the largest value.

    For values that are known beforehand; what attention gives for random inputs is judged by :meth:`World.judged`.
    """
    dtype = max((one.dtype, other.dtype), key=lambda t: torch.finfo(t).eps)
    a, b = one.double(), other.double()
    size = torch.where(b.isfinite(), b.abs(), 0.0).max()
    tolerance = size * (torch.finfo(dtype).eps + (0.0 if dtype is torch.float64 else gamma(terms)))
    return bool(((a == b) | ((a - b).abs() <= tolerance.clamp(min=1e-12))).all())
