"""One op on real data: a small ragged batch whose every entry that nobody may read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flowlib
from flowlib import FORMAT
from flowlib.core.formats import Side
from flowlib.testing import fill_nan, reverse_interleaved

PAGE, HEADS, BOS, EOS = 8, 2, 1, 2
COUNTS = (9, 3, 6)
"""Pages of the requests: several scored ones, none, and an odd number."""
WIDTH = max(COUNTS) + 2
ROWS = len(COUNTS) * HEADS


@dataclass(frozen=True)
class Bench:
    """Where ops are called alone.

    Attributes:
        plan: gives the spec.
        store: a pool; ops take their data as vTensors, not from it.
        batch: lengths of COUNTS pages, tables interleaved and in descending order.
        pages: physical pages of each request.
    """

    plan: flowlib.Plan
    store: flowlib.PagedPool
    batch: flowlib.Batch
    pages: tuple[tuple[int, ...], ...]

    def context(self, impl: str, dtype: torch.dtype = torch.float32, side: Side = Side.INDEXER) -> flowlib.RunContext:
        """A reference or execute context."""
        batch = self.batch if side is Side.INDEXER else None
        return flowlib.RunContext(self.plan, self.store, batch, impl=impl, dtype=dtype, side=side)

    @property
    def entries(self) -> dict[FORMAT, int]:
        """Entries of a vTensor of each format."""
        return {FORMAT.BATCHED: ROWS, FORMAT.RAGGED: ROWS * WIDTH, FORMAT.PAGED: self.store.num_pages * HEADS}

    def scored(self) -> torch.Tensor:
        """RAGGED entries of scored pages, int64."""
        return torch.tensor([r * WIDTH + p for r in range(ROWS) for p in range(BOS, COUNTS[r // HEADS] - EOS)])

    def source(self, format: FORMAT) -> torch.Tensor:
        """The entry of a vTensor of `format` that each scored page of each row reads, int64."""
        wanted = []
        for entry in self.scored().tolist():
            row, page = divmod(entry, WIDTH)
            physical = self.pages[row // HEADS][page] * HEADS + row % HEADS
            wanted.append({FORMAT.BATCHED: row, FORMAT.RAGGED: entry, FORMAT.PAGED: physical}[format])
        return torch.tensor(wanted)

    def draw(
        self, shape: tuple[int, int], format: FORMAT, dtype: torch.dtype, seed: int, domain: str = "real"
    ) -> torch.Tensor:
        """Random entries ``[L, r, c]`` on the CPU; NaN wherever no scored page reads."""
        values = draw((self.entries[format], *shape), dtype, seed, domain)
        poisoned = torch.empty_like(values)
        fill_nan(poisoned)
        kept = torch.arange(ROWS) if format is FORMAT.BATCHED else self.source(format)
        poisoned[kept] = values[kept]
        return poisoned


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, domain: str = "real") -> torch.Tensor:
    """Random values in `dtype`; see :class:`tests.suites.op_cases.Case` for the domains."""
    generator = torch.Generator().manual_seed(seed)
    if domain == "integers":
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator)
    return (values.abs() + 0.125 if domain == "positive" else values).to(dtype)


def bench(device: str, head_dim: int = 16, **changes: object) -> Bench:
    """A bench on a device; `changes` are of the spec."""
    sizes = {"page_size": PAGE, "head_dim": head_dim, "num_kv_heads": HEADS, "bos": BOS, "eos": EOS, "max_pages": WIDTH}
    spec = flowlib.Spec(**{**sizes, "kv_dtype": torch.float32, **changes})
    plan = flowlib.profile(flowlib.build("streaming_attention"), spec)
    pages, num_pages = reverse_interleaved(COUNTS)
    table = torch.full((len(COUNTS), WIDTH), 2**31 - 1, dtype=torch.int32)
    for request, own in enumerate(pages):
        table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
    lengths = torch.tensor([n * PAGE - 3 for n in COUNTS], dtype=torch.int32)
    batch = flowlib.Batch(table.to(device), lengths.to(device))
    return Bench(plan, flowlib.PagedPool(plan, num_pages, device), batch, pages)
