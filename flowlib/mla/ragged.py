"""Which queries meet which keys, for requests of different lengths laid end to end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flowlib.core.errors import BatchError
from flowlib.mla.checks import integers


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Queries and keys of each request as ranges of rows.

    Attributes:
        query_offsets, kv_offsets: first row of each request, and the end; ``n + 1`` ints from 0, on the host.
        query_start_loc, kv_start_loc: the same as int32 ``[n + 1]`` on the device.
        plans: what attention kernels prepared for this batch, kept for the layers that share it.
    """

    query_offsets: tuple[int, ...]
    kv_offsets: tuple[int, ...]
    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor
    plans: dict[object, object] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        query_start_loc: torch.Tensor | Sequence[int],
        kv_start_loc: torch.Tensor | Sequence[int],
        device: str | torch.device = "cpu",
    ) -> RaggedBatch:
        """A batch from ``n + 1`` offsets each.

        Raises:
            FormatError, BatchError: the offsets do not begin at 0, descend, or differ in number.
        """
        queries = check_offsets("RaggedBatch", "query_start_loc", query_start_loc)
        keys = check_offsets("RaggedBatch", "kv_start_loc", kv_start_loc)
        if len(queries) != len(keys):
            raise BatchError(
                f"RaggedBatch: kv_start_loc has {len(keys)} offsets, expected {len(queries)} as query_start_loc"
            )
        q, kv = (torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys))
        return cls(tuple(queries), tuple(keys), q, kv)

    @property
    def size(self) -> int:
        """Requests."""
        return len(self.query_offsets) - 1

    @property
    def num_queries(self) -> int:
        """Query rows of all requests."""
        return self.query_offsets[-1]

    @property
    def num_keys(self) -> int:
        """Key rows of all requests."""
        return self.kv_offsets[-1]

    @property
    def max_query_len(self) -> int:
        """Most query rows of a request."""
        return max((b - a for a, b in itertools.pairwise(self.query_offsets)), default=0)

    def unseeing(self, causal: bool) -> list[tuple[int, int]]:
        """Ranges of query rows that see no key: of requests without keys, and the first ones of a causal batch."""
        ranges = []
        for i in range(self.size):
            first, last = self.query_offsets[i : i + 2]
            keys = self.kv_offsets[i + 1] - self.kv_offsets[i]
            blind = max(0, last - first - keys) if causal else (last - first) * (keys == 0)
            if blind:
                ranges.append((first, first + blind))
        return ranges


def check_offsets(what: str, name: str, values: torch.Tensor | Sequence[int]) -> list[int]:
    """Ascending offsets from 0.

    Raises:
        FormatError, BatchError: they are not.
    """
    found = integers(what, name, values)
    if not found or found[0] != 0:
        raise BatchError(f"{what}: {name} begins with {found[:1]}, expected offsets that begin with 0")
    for i, (a, b) in enumerate(itertools.pairwise(found)):
        if b < a:
            raise BatchError(f"{what}: {name} falls from {a} to {b} after request {i}, expected ascending offsets")
    return found
