"""Formats of a vTensor and the three modes of running."""

from __future__ import annotations

import enum

from flowlib.core.errors import FormatError


class _Refusing(enum.EnumMeta):
    """Names the formats of the public flow language that flowlib does not have."""

    def __getattr__(cls, name: str) -> enum.Enum:
        if name == "SLOTTED":
            raise FormatError(
                "FORMAT.SLOTTED: request-slotted fields are not supported; keep per-request state in a field of "
                "create_cache, written by Save and reset by Fill"
            )
        if name == "PARAMETER":
            raise FormatError("FORMAT.PARAMETER: learned parameters are not supported; fields are functions of K and V")
        raise AttributeError(name)


class FORMAT(enum.Enum, metaclass=_Refusing):
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
