"""What `bench_entmax.py` decodes: batches over paged caches of iid normal keys, and one step of each kind over them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_shapes import BenchError

import flowlib
from flowlib.entmax import DecodeInfo, PagedKVCache, gaussian_decode, topk_decode
from flowlib.runtime.plan import Plan, StepOutput

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STATS_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
TOPK, GAUSSIAN = "topk", "gaussian"
Call = Callable[[PagedKVCache], object]
"""A step over one of the caches that take turns."""


@dataclass(frozen=True)
class Options:
    """Numbers of a run; those of the public benchmark by default.

    Attributes:
        method: ``"topk"`` or ``"gaussian"``.
        coverage: share of the pages that top-k attends to.
        tau_mode, niter, safety_margin_z, max_quantile, excess: of :func:`flowlib.entmax.gaussian_decode`.
        certify: whether Gaussian decoding keeps the bounds as well.
        stats_dtype: of means and deviations; float8 is that of the bounds as well.
    """

    method: str
    kv_heads: int = 8
    query_heads: int = 8
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    alpha: float = 1.5
    coverage: float = 0.25
    tau_mode: str = "corrected"
    niter: int = 3
    safety_margin_z: float = 0.0
    max_quantile: float = 0.995
    excess: float = 0.1
    certify: bool = False
    stats_dtype: torch.dtype = torch.float32

    @property
    def stats(self) -> tuple[str, ...]:
        """Sets of page statistics that the cache keeps."""
        return (TOPK,) if self.method == TOPK else (GAUSSIAN, TOPK) if self.certify else (GAUSSIAN,)

    @property
    def scaled(self) -> bool:
        """Whether the statistics are float8, the bounds too."""
        return self.stats_dtype is torch.float8_e4m3fn

    @property
    def standard(self) -> bool:
        """Whether the goals hold for these numbers."""
        return self == Options(self.method, certify=self.certify, stats_dtype=self.stats_dtype)

    def topk_pages(self, tokens: int) -> int:
        """Pages that top-k attends to, as the public benchmark counts them."""
        return max(2, round(self.coverage * -(-tokens // self.page_size)))


@dataclass(frozen=True)
class Work:
    """A batch of rows of one length, the query's own token among them."""

    batch: int
    tokens: int

    @property
    def label(self) -> str:
        """Batch x context."""
        return f"{self.batch} x {self.tokens:,}"


class Scene:
    """Queries, and caches over which steps take turns; all rows hold the same keys, in pages of their own.

    Args:
        options: numbers of the run.
        work: the batch.
        device: where it lies.
        seed: of the numbers.
    """

    def __init__(self, options: Options, work: Work, device: str, seed: int = 0) -> None:
        self.options, self.work = options, work
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=options.dtype, device=device).normal_(generator=generator)

        shape = (1, options.kv_heads, work.tokens, options.head_dim)
        self.k, self.v = (draw(*shape).expand(work.batch, -1, -1, -1) for _ in "kv")
        self.q = draw(work.batch, options.query_heads, 1, options.head_dim)
        self.out = torch.full_like(self.q, float("nan"))
        self.caches: list[PagedKVCache] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of one cache: K, V and statistics."""
        options, pages = self.options, self.work.batch * -(-self.work.tokens // self.options.page_size)
        size, narrow = options.dtype.itemsize, options.stats_dtype.itemsize
        bounds = narrow if options.scaled else size
        stats = 2 * sum(bounds if name == TOPK else narrow for name in options.stats)
        return pages * options.kv_heads * options.head_dim * (2 * options.page_size * size + stats)

    def add_cache(self) -> PagedKVCache:
        """One more cache of the same tokens, the last of them appended."""
        options = self.options
        cache = PagedKVCache(options.page_size, options.stats, self.work.tokens, options.stats_dtype)
        cache.initialize(self.k[:, :, :-1], self.v[:, :, :-1])
        cache.append(self.k[:, :, -1:], self.v[:, :, -1:])
        self.caches.append(cache)
        return cache

    def sparse(self, cache: PagedKVCache, info: list[DecodeInfo] | None = None) -> torch.Tensor:
        """One step of the method by kernels."""
        return self._decode(cache, 0, info)

    def full(self, cache: PagedKVCache, info: list[DecodeInfo] | None = None) -> torch.Tensor:
        """One step of the same kernel over every page."""
        return self._decode(cache, cache.max_pages * cache.page_size + 1, info)

    def softmax(self, cache: PagedKVCache) -> torch.Tensor:
        """One step of flowlib's softmax attention over every page, ``[B, H_q, 1, D]``."""
        _, store, _ = self.compiled(cache)
        batch = flowlib.Batch(cache.block_table, cache.seq_lens)
        return flowlib.dense(self.q[:, :, 0], store, batch, impl="triton").o[:, :, None]

    def compiled(self, cache: PagedKVCache) -> tuple[Plan, flowlib.KVStore, StepOutput]:
        """The plan, the pool and the outputs that :meth:`sparse` works with; after a step of it."""
        for (plan, *_), (store, out) in cache.scratch.items():  # type: ignore[misc]
            if plan.spec.dense_below == 0:
                return plan, store, out
        raise BenchError("no step was made over this cache yet")

    def _decode(self, cache: PagedKVCache, least: int, info: list[DecodeInfo] | None) -> torch.Tensor:
        o = self.options
        if o.method == TOPK:
            return topk_decode(
                self.q, cache, None, None, self.out, o.topk_pages(self.work.tokens), alpha=o.alpha,
                append_cache=False, min_context=least, impl="triton", info=info,
            )  # fmt: skip
        return gaussian_decode(
            self.q, cache, None, None, self.out, o.alpha, o.safety_margin_z, o.max_quantile, o.excess,
            niter=o.niter, append_cache=False, tau_mode=o.tau_mode, min_context=least, impl="triton", info=info,
        )  # fmt: skip


def parse_sizes(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers such as ``1,8``, or with k and m ``32k,1m``.

    Raises:
        BenchError: it is none.
    """
    found = [re.fullmatch(r"(\d+)([km]?)", part.strip().lower()) for part in text.split(",")]
    sizes = tuple(int(m[1]) << {"": 0, "k": 10, "m": 20}[m[2]] for m in found if m)
    if len(sizes) != len(found) or min(sizes) < 1:
        raise BenchError(f"{name} {text}: expected whole numbers of at least 1 such as 32k,64k,1m")
    return tuple(dict.fromkeys(sizes))


def works(batches: tuple[int, ...], lengths: tuple[int, ...], fixed: int) -> tuple[Work, ...]:
    """The row of the fixed cost, unless that is 0, then every batch with every length."""
    found = [Work(1, fixed)] if fixed else []
    found += [Work(batch, tokens) for batch in batches for tokens in lengths]
    return tuple(dict.fromkeys(found))


def check_options(options: Options) -> None:
    """Raises BenchError for numbers that no cache or query can have; flowlib refuses the others by itself."""
    if options.query_heads % options.kv_heads:
        raise BenchError(f"--heads {options.query_heads}: expected a multiple of the {options.kv_heads} kv heads")
    if not 0.0 < options.coverage <= 1.0:
        raise BenchError(f"--coverage {options.coverage}: expected above 0, at most 1")
    if not 1.0 < options.alpha <= 2.0:
        raise BenchError(f"--alpha {options.alpha}: expected above 1, at most 2")


def told(options: Options) -> dict[str, object]:
    """The options for JSON."""
    names = {name: str(getattr(options, name)).removeprefix("torch.") for name in ("dtype", "stats_dtype")}
    return {**dataclasses.asdict(options), **names}
