"""A KV cache in pages that owns its pool: append, grow, and statistics of pages kept up to date."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from flowlib.core.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from flowlib.entmax import checks, scaled_stats
from flowlib.entmax.pages import PageStats, check_stats, page_stats, tail_of

SLACK_PAGES = 64
"""Room of a row beyond its first append where no longest row is foreseen."""


class PagedKVCache:
    """K and V of a batch of rows in pages, for decoding by :func:`flowlib.entmax.topk_decode` and its siblings.

    Row b has the physical pages ``b * max_pages`` to ``(b + 1) * max_pages - 1``; only the block table says so.

    Args:
        page_size: tokens of a page, a power of two.
        stats: sets of page statistics kept: ``"topk"`` (minimum and maximum), ``"gaussian"`` (mean and deviation).
        max_seq_len: longest row foreseen; saves the copy when a row outgrows its pages. Rows may become longer.
        stats_dtype: of means and deviations, which are estimates and may be rounded: float32, or 16 bits for half of
            what Gaussian selection reads (float16 for a cache of float16 only, whose means it can hold). ``None`` means
            what they are computed in, float32 (float64 for a cache of that). float8_e4m3fn is the dtype of minima and
            maxima as well, rounded down and up, so that they stay bounds, with one scale for each kv head. Means
            then have 4 bits: where keys of a channel have more in common than they differ by, selection suffers.
        stats_scale: of float8 statistics, a power of two: what is beyond 448 times it is cut, see :attr:`saturated`.
            ``None`` leaves room for 16 times the largest key that :meth:`initialize` is given, head by head.

    Attributes:
        kv: ``[2, num_blocks, page_size, H_kv, D]``, K and V; zero in slots never written.
        block_table: int32 ``[B, max_pages]``, logical to physical page.
        seq_lens: int32 ``[B]``.
        page_stats: :class:`flowlib.entmax.PageStats` ``[num_blocks, H_kv, D]``; meaningful for full pages. Of float8
            statistics, a copy of their values in float32 (float64 for a cache of that).
        stored_stats: the same as they are stored: float8 codes are to be multiplied by `stats_scales`.
        stats_scales: fp32 ``[H_kv]``, powers of two; ``None`` where the statistics are not float8.
        saturated: bool ``[H_kv]``: a statistic of the head was cut since :meth:`initialize`. Its bounds may be none:
            no output of its queries is certified by them any more, and selections may leave out what they would prove.
            ``None`` as `stats_scales`.
        scratch: what kernels work in, kept from step to step until the pool is made anew.

    Raises:
        OptionError: an argument is out of range, or a set of statistics unknown.
    """

    def __init__(
        self,
        page_size: int = 16,
        stats: Sequence[str] = (),
        max_seq_len: int | None = None,
        stats_dtype: torch.dtype | None = None,
        stats_scale: float | None = None,
    ) -> None:
        self.page_size = checks.power_of_two("PagedKVCache", "page_size", page_size)
        self.stats = check_stats("PagedKVCache", stats)
        if max_seq_len is not None:
            max_seq_len = checks.count("PagedKVCache", "max_seq_len", max_seq_len, 1)
        if stats_dtype not in (None, torch.float32, torch.bfloat16, torch.float16, scaled_stats.DTYPE):
            raise OptionError(
                f"PagedKVCache: stats_dtype is {stats_dtype!r}, expected torch.float32, torch.bfloat16, torch.float16, "
                "torch.float8_e4m3fn or None"
            )
        self.max_seq_len, self.stats_dtype = max_seq_len, stats_dtype
        self.stats_scale = scaled_stats.check_scale("PagedKVCache", stats_scale, stats_dtype)
        self._scales: torch.Tensor | None = None
        self._saturated: torch.Tensor | None = None
        self._lengths: list[int] = []
        self._kv: torch.Tensor | None = None
        self._block_table = self._seq_lens = torch.zeros(0, dtype=torch.int32)
        self._page_stats = PageStats()
        self.scratch: dict[Hashable, Any] = {}

    @property
    def kv(self) -> torch.Tensor:
        """``[2, num_blocks, page_size, H_kv, D]``. Raises BackendError before initialize."""
        if self._kv is None:
            raise BackendError("PagedKVCache: the cache is empty; call initialize(k, v) first")
        return self._kv

    @property
    def block_table(self) -> torch.Tensor:
        """int32 ``[B, max_pages]``."""
        return self._block_table

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 ``[B]``, on the device."""
        return self._seq_lens

    @property
    def seq_lens_host(self) -> tuple[int, ...]:
        """Lengths of the rows, known without waiting for a device."""
        return tuple(self._lengths)

    @property
    def page_stats(self) -> PageStats:
        """Statistics of every physical page; a set that is not kept is ``None``."""
        if self._scales is None:
            return self._page_stats
        return scaled_stats.decode(self._page_stats, self._scales, checks.computed_in(self.kv))

    @property
    def stored_stats(self) -> PageStats:
        """The statistics as they are stored, float8 ones as codes."""
        return self._page_stats

    @property
    def stats_scales(self) -> torch.Tensor | None:
        """fp32 ``[H_kv]``, what float8 codes are multiplied by."""
        return self._scales

    @property
    def saturated(self) -> torch.Tensor | None:
        """bool ``[H_kv]``, heads with a statistic that was cut, on the device."""
        return self._saturated

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self._lengths)

    @property
    def max_pages(self) -> int:
        """Pages a row has room for."""
        return self._block_table.shape[1] if self._lengths else 0

    @property
    def live_pages(self) -> int:
        """Pages of the longest row."""
        return -(-max(self._lengths, default=0) // self.page_size)

    @torch.no_grad()
    def initialize(
        self, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int] | torch.Tensor | None = None
    ) -> None:
        """Stores the prompts; what was there before is gone.

        Args:
            k, v: ``[B, H_kv, S, D]``, of one dtype.
            seq_lens: B lengths from 1 to S; ``None`` means S each. Tokens past a row's length are not stored.

        Raises:
            ShapeError, FormatError: k and v are no such tensors. BatchError: bad lengths. Nothing is stored then.
        """
        _check_pair("initialize", k, v, "B, H_kv, S, D")
        rows, heads, size, dim = k.shape
        if self.stats_dtype is torch.float16 and k.dtype is not torch.float16:
            raise FormatError(
                f"initialize: k is {k.dtype}, expected torch.float16 where stats_dtype is torch.float16, which can't "
                "hold the means of others; use torch.bfloat16"
            )
        lengths = _lengths_of(seq_lens, rows, size)
        pages = self._capacity(max(lengths), size)
        self._kv = torch.zeros(2, rows * pages, self.page_size, heads, dim, dtype=k.dtype, device=k.device)
        self._place(lengths, pages, k.device)
        store = self._kv.view(2, rows, pages * self.page_size, heads, dim)
        for row, n in enumerate(lengths):
            for side, values in enumerate((k, v)):
                store[side, row, :n] = values[row, :, :n].transpose(0, 1)
        if self.stats_dtype is scaled_stats.DTYPE:
            self._scales = self._first_scales(self._kv[0])
            self._saturated = torch.zeros_like(self._scales, dtype=torch.bool)
        shares = self._kv[0].split(pages)  # one by one: what is needed besides the pool is a row's share
        columns = zip(*(self._stats_of(share) for share in shares), strict=True)
        self._page_stats = PageStats(*(None if part[0] is None else _joined(part) for part in columns))

    @torch.no_grad()
    def append(self, k_new: torch.Tensor, v_new: torch.Tensor) -> None:
        """Stores one more token of every row; grows the pool, by one copy, where a row has no slot left.

        Args:
            k_new, v_new: ``[B, H_kv, 1, D]`` in the dtype of the cache.

        Raises:
            BackendError: before initialize. ShapeError, FormatError: no such tensors.
        """
        kv = self.kv
        _check_pair("append", k_new, v_new, "B, H_kv, 1, D")
        shape = (self.batch, kv.shape[3], 1, kv.shape[4])
        checks.same_shape("append", "k_new", k_new, shape, "[B, H_kv, 1, D]")
        self._check_stored("append", k_new)
        needed = max(self._lengths) // self.page_size + 1
        if needed > self.max_pages:
            self._grow(max(needed, self.max_pages + self.max_pages // 2))
        row = torch.arange(self.batch, device=kv.device)
        position = self._seq_lens.to(torch.int64)
        block = self._block_table[row, torch.div(position, self.page_size, rounding_mode="floor")].to(torch.int64)
        self._lengths = [n + 1 for n in self._lengths]
        finishes = any(n % self.page_size == 0 for n in self._lengths)  # else no page has statistics that are read
        touched = block if finishes else None
        self._store(k_new[:, :, 0], v_new[:, :, 0], block, position % self.page_size, touched)
        self._seq_lens += 1

    @torch.no_grad()
    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores tokens in slots, in any order, and recomputes the statistics of every page touched; lengths stay.

        Args:
            k, v: ``[T, H_kv, D]`` in the dtype of the cache.
            slots: int32 or int64 ``[T]``, ``physical page * page_size + offset``, each at most once; -1 is skipped.

        Raises:
            BackendError: before initialize. ShapeError, FormatError: no such tensors. BatchError: a slot is out of
            range (looked at on the CPU only).
        """
        kv = self.kv
        _check_pair("write", k, v, "T, H_kv, D")
        checks.same_shape("write", "k", k, (k.shape[0], kv.shape[3], kv.shape[4]), "[T, H_kv, D]")
        self._check_stored("write", k)
        _check_slots(slots, k.shape[0], kv.shape[1] * self.page_size)
        real = (slots >= 0).nonzero().squeeze(-1)
        slot = slots[real].to(torch.int64)
        block, offset = torch.div(slot, self.page_size, rounding_mode="floor"), slot % self.page_size
        self._store(k[real], v[real], block, offset, torch.unique_consecutive(block))

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, touched: torch.Tensor | None
    ) -> None:
        """Stores tokens ``[T, H_kv, D]`` and recomputes the statistics of the pages `touched`, if any; never waits."""
        kv = self.kv
        kv[0, block, offset], kv[1, block, offset] = k, v
        if touched is None:
            return
        for kept, fresh in zip(self._page_stats, self._stats_of(kv[0, touched]), strict=True):
            if kept is not None and fresh is not None:
                _bytes(kept)[touched] = _bytes(fresh)

    def _stats_of(self, k: torch.Tensor) -> PageStats:
        """Statistics of some pages in the dtypes they are kept in; notes what is cut."""
        stats = page_stats(k, self.stats)
        if self._scales is not None and self._saturated is not None:
            codes, cut = scaled_stats.encode(stats, self._scales)
            self._saturated |= cut
            return codes
        low, high, mean, std = stats
        if mean is None or std is None or self.stats_dtype is None:
            return stats
        return PageStats(low, high, mean.to(self.stats_dtype), std.to(self.stats_dtype))

    def _first_scales(self, k: torch.Tensor) -> torch.Tensor:
        if self.stats_scale is None:
            return scaled_stats.scales_for(k)
        return torch.full((k.shape[2],), self.stats_scale, dtype=torch.float32, device=k.device)

    def vouched(self, certified: torch.Tensor, counts: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Certificates ``[B, H_q]`` less those of heads with a bound that was cut, which needs no bound where all pages
        are selected.

        Args:
            certified: bool, by the bounds as they are stored.
            counts: ``[B, H_q]``, pages selected.
            seq_lens: ``[B]``.
        """
        if self._saturated is None:
            return certified
        cut = self._saturated.repeat_interleave(certified.shape[1] // len(self._saturated))
        return certified & (~cut | (counts > tail_of(seq_lens, self.page_size)[:, None]))

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as copies ``[B, H_kv, longest length, D]``; zero past a row's length.

        Raises:
            BackendError: before initialize.
        """
        pages = self.kv[:, self._block_table[:, : self.live_pages].to(torch.int64)]  # [2, B, pages, page_size, H_kv, D]
        longest = max(self._lengths)
        rows = pages.flatten(2, 3)[:, :, :longest]
        owned = torch.arange(longest, device=rows.device) < self._seq_lens[:, None]
        k, v = rows.masked_fill(~owned[..., None, None], 0.0).transpose(2, 3)
        return k, v

    def _capacity(self, longest: int, size: int) -> int:
        """Pages of a row at first: one more token at least, what is foreseen, and the prompt."""
        pages = -(-(longest + 1) // self.page_size)
        foreseen = pages + SLACK_PAGES if self.max_seq_len is None else -(-self.max_seq_len // self.page_size)
        return max(pages, foreseen, -(-size // self.page_size))

    def _place(self, lengths: list[int], pages: int, device: torch.device) -> None:
        rows = len(lengths)
        self.scratch.clear()
        self._lengths = lengths
        self._seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self._block_table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)

    def _grow(self, pages: int) -> None:
        """Re-homes every row into `pages` pages, with its statistics."""
        old, before = self.kv, self.max_pages
        rows = self.batch
        self._kv = _widened(old.unflatten(1, (rows, before)), 2, pages).flatten(1, 2)
        stats = (s if s is None else _widened(s.unflatten(0, (rows, before)), 1, pages).flatten(0, 1)
                 for s in self._page_stats)  # fmt: skip
        self._page_stats = PageStats(*stats)
        self._place(self._lengths, pages, old.device)

    def _check_stored(self, what: str, value: torch.Tensor) -> None:
        if value.dtype is not self.kv.dtype:
            raise FormatError(f"{what}: k and v are {value.dtype}, expected {self.kv.dtype}, the dtype of the cache")


def _check_pair(what: str, k: torch.Tensor, v: torch.Tensor, axes: str) -> None:
    names = ("k_new", "v_new") if what == "append" else ("k", "v")
    for name, value in zip(names, (k, v), strict=True):
        checks.floating(what, name, value, axes)
    checks.same_shape(what, names[1], v, k.shape, f"as {names[0]}")
    if k.dtype is not v.dtype or 0 in k.shape[1:]:
        if k.dtype is v.dtype:
            raise ShapeError(f"{what}: {names[0]} is {list(k.shape)}, expected no empty axis [{axes}]")
        raise FormatError(f"{what}: {names[1]} is {v.dtype}, expected {k.dtype} as {names[0]}")


def _lengths_of(seq_lens: Sequence[int] | torch.Tensor | None, rows: int, size: int) -> list[int]:
    if rows == 0:
        raise ShapeError("initialize: k has 0 rows, expected at least one")
    if seq_lens is None:
        return [size] * rows
    values = seq_lens.tolist() if isinstance(seq_lens, torch.Tensor) else list(seq_lens)
    if not isinstance(values, list) or len(values) != rows or not all(isinstance(n, int) for n in values):
        raise BatchError(f"initialize: seq_lens is {values}, expected {rows} integers, one for each row")
    if not all(1 <= n <= size for n in values):
        raise BatchError(f"initialize: seq_lens is {values}, expected from 1 to {size}, the tokens of k")
    return values


def _check_slots(slots: object, count: int, limit: int) -> None:
    if not isinstance(slots, torch.Tensor) or slots.dtype not in (torch.int32, torch.int64):
        got = slots.dtype if isinstance(slots, torch.Tensor) else type(slots).__name__
        raise FormatError(f"write: slots is {got}, expected an int32 or int64 tensor [T]")
    checks.same_shape("write", "slots", slots, (count,), "[T]")
    if slots.device.type == "cpu" and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= limit:
            raise BatchError(f"write: slots has {low if low < -1 else high}, expected from -1 to {limit - 1}")


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_bytes(part) for part in parts]).view(parts[0].dtype)


def _bytes(stat: torch.Tensor) -> torch.Tensor:
    """float8 as bytes, which every device can copy anywhere; other dtypes as they are."""
    return stat.view(torch.uint8) if stat.dtype is scaled_stats.DTYPE else stat


def _widened(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """A copy with `axis` grown to `size`, zero where new."""
    shape = list(value.shape)
    shape[axis] = size
    wide = value.new_zeros(shape)
    _bytes(wide).narrow(axis, 0, value.shape[axis]).copy_(_bytes(value))
    return wide


def check_kept(what: str, cache: object, wanted: str) -> None:
    """Raises FormatError unless `cache` is one, OptionError unless it keeps a set of statistics."""
    if not isinstance(cache, PagedKVCache):
        raise FormatError(f"{what}: cache is {type(cache).__name__}, expected a PagedKVCache")
    if wanted not in cache.stats:
        raise OptionError(
            f"{what}: the cache keeps the statistics {cache.stats}, expected {wanted!r} among them: "
            f"PagedKVCache(stats=({wanted!r},))"
        )
