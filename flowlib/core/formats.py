"""Formats of a vTensor and the three modes of running."""

from __future__ import annotations

import enum


class FORMAT(enum.Enum):
    """What axis 0 of a vTensor ``[L, r, c]`` means."""

    BATCHED = "B"
    """One entry per row (query token, kv head): q is ``[B, G, D]``."""
    RAGGED = "S"
    """One entry per page of each row, stored padded: entry ``row * width + logical page``."""
    PAGED = "P"
    """One entry per physical page and kv head: entry ``page * num_kv_heads + head``."""


class Mode(enum.Enum):
    """How an op call is carried out."""

    PROFILE = "profile"
    """No data: check, size buffers, build the graph."""
    REFERENCE = "reference"
    """torch, op by op, in any dtype up to float64."""
    EXECUTE = "execute"
    """Fused Triton kernels."""


class Side(enum.Enum):
    """Which of a flow's two methods an op call belongs to."""

    CACHE = "forward_cache"
    INDEXER = "forward_indexer"
