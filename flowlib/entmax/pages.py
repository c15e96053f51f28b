"""Statistics of pages of keys, and what they say about the scores in a page without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flowlib.core.errors import OptionError, ShapeError
from flowlib.entmax import checks

STATS = ("topk", "gaussian")
"""Sets of statistics: minimum and maximum; mean and standard deviation."""


class PageStats(NamedTuple):
    """Statistics of each page and kv head, all ``[num_blocks, H_kv, D]``; ``None`` for a set that is not kept.

    Attributes:
        k_min, k_max: set ``topk``, in the dtype of the keys.
        k_mean, k_std: set ``gaussian``, float32 (float64 for float64 keys); the deviation of the population.
    """

    k_min: torch.Tensor | None = None
    k_max: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    k_std: torch.Tensor | None = None


def check_stats(what: str, stats: Sequence[str]) -> tuple[str, ...]:
    """The names of sets of statistics, each once. Raises OptionError for an unknown one."""
    if isinstance(stats, str):
        raise OptionError(f"{what}: stats is {stats!r}, expected a sequence of names: ({stats!r},)")
    unknown = [name for name in stats if name not in STATS]
    if unknown:
        raise OptionError(f"{what}: stats has {unknown[0]!r}, expected names out of {', '.join(map(repr, STATS))}")
    return tuple(dict.fromkeys(stats))


def page_stats(k: torch.Tensor, stats: Sequence[str] = STATS) -> PageStats:
    """Statistics over the slots of each page.

    Every slot counts: those of a page that is not full yet are meaningless, and nothing reads them.

    Args:
        k: ``[num_blocks, page_size, H_kv, D]``, the K of a paged cache.
        stats: the sets wanted, out of ``"topk"`` and ``"gaussian"``.

    Raises:
        OptionError: an unknown set. FormatError, ShapeError: `k` is no such tensor.

    Source: EntmaxKV (arXiv:2605.21649); minimum and maximum: Quest (arXiv:2406.10774).
    """
    checks.floating("page_stats", "k", k, "num_blocks, page_size, H_kv, D")
    checks.power_of_two("page_stats", "page_size (axis 1 of k)", k.shape[1])
    wanted = check_stats("page_stats", stats)
    low, high = (k.amin(1), k.amax(1)) if "topk" in wanted else (None, None)
    if "gaussian" not in wanted:
        return PageStats(low, high)
    wide = k.to(checks.computed_in(k))
    mean = wide.sum(1) / k.shape[1]
    away = wide - mean[:, None]  # in two passes: E[k²] − mean² cancels where |mean| is large
    return PageStats(low, high, mean, ((away * away).sum(1) / k.shape[1]).sqrt())


def tail_of(seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """The page of the last token, always attended and never scored: int64, -1 for an empty row."""
    return torch.div(seq_lens.to(torch.int64) - 1, page_size, rounding_mode="floor")


def scorable(seq_lens: torch.Tensor, page_size: int, width: int) -> torch.Tensor:
    """Pages before the tail, bool ``[B, width]``: full, so that their statistics mean something."""
    return torch.arange(width, device=seq_lens.device) < tail_of(seq_lens, page_size)[:, None]


class Rows(NamedTuple):
    """Queries over the pages of their rows.

    Attributes:
        q: ``[B, H_kv, G, D]``, widened and scaled by 1/sqrt(D).
        table: int64 ``[B, P]``, physical pages; 0 where a page is not scorable, whose entry may be stale.
        scored: bool ``[B, P]``.
        slopes: ``[H_q]``.
        query_position: ``[B]``.
    """

    q: torch.Tensor
    table: torch.Tensor
    scored: torch.Tensor
    slopes: torch.Tensor
    query_position: torch.Tensor

    def gather(self, stat: torch.Tensor) -> torch.Tensor:
        """A statistic of each row's pages: ``[B, P, H_kv, D]`` in the dtype computed in."""
        return stat[self.table].to(self.q.dtype)

    def dot(self, q: torch.Tensor, stat: torch.Tensor) -> torch.Tensor:
        """Σ_d q_d · stat_d: ``[B, H_q, P]``."""
        return torch.einsum("bkgd,bpkd->bkgp", q, stat).flatten(1, 2)

    def bias(self, position: torch.Tensor) -> torch.Tensor:
        """ALiBi ``[B, H_q, P]`` of positions ``[H_q or 1, P]``."""
        return self.slopes[:, None] * (position - self.query_position[:, None, None])


def rows_of(
    what: str,
    q: torch.Tensor,
    stats: dict[str, torch.Tensor],
    seq_lens: torch.Tensor,
    page_size: int,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> Rows:
    """Checks the arguments that all scores of pages share; see :func:`page_bounds`."""
    checks.floating(what, "q", q, "B, H_q, D")
    page_size = checks.power_of_two(what, "page_size", page_size)
    first = next(iter(stats.values()))
    for name, stat in stats.items():
        checks.floating(what, name, stat, "num_blocks, H_kv, D")
        checks.same_shape(what, name, stat, first.shape, f"as {next(iter(stats))}")
    if first.shape[2] != q.shape[2]:
        raise ShapeError(f"{what}: axis D of {next(iter(stats))} is {first.shape[2]}, expected {q.shape[2]} as in q")
    group = checks.group_of(what, q.shape[1], first.shape[1])
    table = check_table(what, block_table, q.shape[0], first.shape[0], q.device)
    checks.lengths(what, seq_lens, q.shape[0], table.shape[1] * page_size)
    dtype = checks.computed_in(q, *stats.values())
    scored = scorable(seq_lens, page_size, table.shape[1])
    wide = q.to(dtype).unflatten(1, (-1, group)) * q.shape[2] ** -0.5
    slopes = checks.slopes_of(what, alibi_slopes, q.shape[1], wide)
    return Rows(wide, torch.where(scored, table, 0).to(torch.int64), scored, slopes, (seq_lens - 1).to(dtype))


def check_table(
    what: str, block_table: torch.Tensor | None, rows: int, num_blocks: int, device: torch.device
) -> torch.Tensor:
    """`block_table`, or the identity table of a cache whose rows have equally many pages in turn."""
    if block_table is not None:
        return checks.int32(what, "block_table", block_table, [rows, None])
    if rows == 0 or num_blocks % rows:
        raise ShapeError(
            f"{what}: there are {num_blocks} blocks for {rows} rows, expected a multiple where block_table is None"
        )
    return torch.arange(num_blocks, dtype=torch.int32, device=device).view(rows, -1)


def page_bounds(
    q: torch.Tensor,
    k_min: torch.Tensor,
    k_max: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """An upper bound of every score in a page: Σ_d max(q_d · min_d, q_d · max_d) / sqrt(D), plus the largest ALiBi.

    Scores are s = q·k / sqrt(D) + slope · (position − query position), at logical positions, the query at
    ``seq_len − 1``. The bound is not multiplied by alpha − 1.

    Args:
        q: ``[B, H_q, D]``; query head h reads kv head ``h // (H_q / H_kv)``.
        k_min, k_max: ``[num_blocks, H_kv, D]``, see :func:`page_stats`.
        seq_lens: int32 ``[B]``.
        page_size: tokens of a page, a power of two.
        block_table: int32 ``[B, P]``, logical to physical page; entries from a row's tail on are not read. ``None``
            means that row b has the pages ``b · P`` to ``(b + 1) · P − 1``, ``P = num_blocks / B``.
        alibi_slopes: ``[H_q]``; ``None`` means zeros.

    Returns:
        ``[B, H_q, P]``, float32 (float64 if an input is): -inf from the row's tail on.

    Raises:
        OptionError: page_size is no power of two. FormatError, ShapeError: an argument has the wrong dtype or shape.
        BatchError: a length is negative or beyond the table.

    Source: Tang et al., Quest: Query-Aware Sparsity (arXiv:2406.10774), with the bias of EntmaxKV (arXiv:2605.21649).
    """
    stats = {"k_min": k_min, "k_max": k_max}
    rows = rows_of("page_bounds", q, stats, seq_lens, page_size, block_table, alibi_slopes)
    bound = rows.dot(rows.q.clamp(min=0.0), rows.gather(k_max)) + rows.dot(rows.q.clamp(max=0.0), rows.gather(k_min))
    first = torch.arange(rows.table.shape[1], device=q.device) * page_size
    best = torch.where(rows.slopes[:, None] >= 0, first + page_size - 1, first).to(bound.dtype)
    return (bound + rows.bias(best)).masked_fill(~rows.scored[:, None], float("-inf"))


def page_moments(
    q: torch.Tensor,
    k_mean: torch.Tensor,
    k_std: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the scores in a page, were its keys' dimensions independent.

    mu = q·mean / sqrt(D) + slope · (mean position − query position), sigma = sqrt(Σ_d q_d² · std_d² / D).

    Args:
        q, seq_lens, page_size, block_table, alibi_slopes: as for :func:`page_bounds`.
        k_mean, k_std: ``[num_blocks, H_kv, D]``, see :func:`page_stats`.

    Returns:
        mu and sigma, both ``[B, H_q, P]``, float32 (float64 if an input is): -inf and 0 from the row's tail on.

    Raises:
        as :func:`page_bounds`.

    Source: EntmaxKV (arXiv:2605.21649), Gaussian-aware selection.
    """
    stats = {"k_mean": k_mean, "k_std": k_std}
    rows = rows_of("page_moments", q, stats, seq_lens, page_size, block_table, alibi_slopes)
    first = torch.arange(rows.table.shape[1], device=q.device).to(rows.q.dtype) * page_size
    mu = rows.dot(rows.q, rows.gather(k_mean)) + rows.bias(first[None] + (page_size - 1) / 2)
    sigma = rows.dot(rows.q.square(), rows.gather(k_std).square()).sqrt()
    hidden = ~rows.scored[:, None]
    return mu.masked_fill(hidden, float("-inf")), sigma.masked_fill(hidden, 0.0)
