"""Bytes and operations that latent prefill must move and do, stage by stage.

Each stage reads its inputs once and writes its outputs once; products count two operations a pair of numbers. The
keys and values of the chunked form are counted as written and read, since they are made by a product of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench_mla_shapes import PrefillShape

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Work:
    """Bytes through device memory and floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def floor_us(self, read: float, matmul: float) -> float:
        """The time it takes at least, in microseconds, at a read bandwidth and a rate of matrix products."""
        return 1e6 * max(self.bytes / read, self.flops / matmul)

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def total(work: Mapping[str, Work]) -> Work:
    """The sum of all stages."""
    return sum(work.values(), Work())


def floor_us(work: Mapping[str, Work], read: float, matmul: float) -> float:
    """The sum of the stages' floors: they run one after the other."""
    return sum(w.floor_us(read, matmul) for w in work.values())


def chunked_work(shape: PrefillShape) -> dict[str, Work]:
    """Of attention to keys and values of all heads, made from latents; the context is merged once."""
    new, context, sizes, heads = sum(shape.new), sum(shape.context), shape.sizes, shape.heads
    outer, inner = shape.pairs
    row, pair = sizes.latent * _BF16, heads * (sizes.key + sizes.dv)
    columns = heads * (sizes.nope + sizes.dv)
    queries, outputs = new * heads * sizes.key * _BF16, new * heads * (sizes.dv + 1) * _FP32

    def project(tokens: int) -> Work:
        moved = tokens * row + sizes.rank * columns * _BF16 + tokens * pair * _BF16
        return Work(moved, 2.0 * tokens * sizes.rank * columns)

    return {
        "project new": project(new),
        "attend new": Work(queries + new * pair * _BF16 + outputs, 2.0 * inner * pair),
        "gather": Work(2.0 * context * row),
        "project": project(context),
        "attend": Work(queries + context * pair * _BF16 + outputs, 2.0 * outer * pair),
        "merge": Work(3.0 * outputs),
    }


def one_shot_work(shape: PrefillShape) -> dict[str, Work]:
    """Of one attention to the keys and values of context and new tokens together."""
    parts = chunked_work(shape)
    sizes, tokens = shape.sizes, sum(shape.context) + sum(shape.new)
    outputs = sum(shape.new) * shape.heads * sizes.dv * _BF16
    queries = sum(shape.new) * shape.heads * sizes.key * _BF16
    keys = tokens * shape.heads * (sizes.key + sizes.dv) * _BF16
    return {
        "gather": Work(2.0 * tokens * sizes.latent * _BF16),
        "project": parts["project new"] + parts["project"],
        "attend": Work(queries + keys + outputs, parts["attend new"].flops + parts["attend"].flops),
    }


def absorbed_work(shape: PrefillShape) -> dict[str, Work]:
    """Of attention to the latents, which are read once for all heads and queries."""
    new, sizes, heads = sum(shape.new), shape.sizes, shape.heads
    wide, weights = new * heads * sizes.rank * _BF16, heads * sizes.rank * _BF16
    tokens = sum(shape.context) + new
    rope = new * heads * sizes.rope * _BF16
    return {
        "absorb": Work(
            new * heads * sizes.nope * _BF16 + 2 * rope + wide + weights * sizes.nope,
            2.0 * new * heads * sizes.nope * sizes.rank,
        ),
        "attend": Work(
            tokens * sizes.latent * _BF16 + 2 * wide + rope,
            2.0 * sum(shape.pairs) * heads * (sizes.latent + sizes.rank),
        ),
        "restore": Work(
            wide + new * heads * sizes.dv * _BF16 + weights * sizes.dv, 2.0 * new * heads * sizes.rank * sizes.dv
        ),
    }
