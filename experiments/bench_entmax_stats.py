"""What the dtype of the page statistics does to selections: weight kept, error of the output, pages read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bench_entmax_scene import STATS_DTYPES, TOPK, Options, Work
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flowlib.entmax import DecodeInfo, PagedKVCache, gaussian_decode, topk_decode
from flowlib.testing.oracles.bisection import entmax_row


@dataclass(frozen=True)
class Quality:
    """A step of all heads, over statistics of one dtype.

    Attributes:
        work: the batch.
        stats: name of the dtype.
        offset: deviation of what all keys of a channel have in common.
        kept, least_kept: share of full entmax's weight that lies in the selected pages: mean over the heads, and least.
        error, most_error: of the output beside full entmax's in float64, relative (2-norm): mean, and most.
        pages, total: selected pages of a head, on average; pages of a row.
        certified: share of the heads.
        saturated: heads with a statistic that was cut.
    """

    work: Work
    stats: str
    offset: float
    kept: float
    least_kept: float
    error: float
    most_error: float
    pages: float
    total: int
    certified: float
    saturated: int


def qualities(options: Options, work: Work, offset: float, device: str, seed: int = 0) -> list[Quality]:
    """The same tokens with statistics of each dtype, decoded by the reference; iid normal keys plus `offset`."""
    g = torch.Generator(device).manual_seed(seed)
    shape = (work.batch, options.kv_heads, work.tokens, options.head_dim)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device).normal_(generator=g)

    k = (normal(*shape) + offset * normal(1, options.kv_heads, 1, options.head_dim)).to(options.dtype)
    v, q = (normal(*size).to(options.dtype) for size in (shape, (*shape[:1], options.query_heads, 1, shape[3])))
    truth = [_full(options, k, v, q, row, head) for row in range(work.batch) for head in range(options.query_heads)]
    return [_quality(options, work, offset, dtype, (k, v, q), truth) for dtype in _dtypes(options)]


def _dtypes(options: Options) -> list[torch.dtype]:
    """Bounds are kept in the cache's dtype or float8; float16 can't hold the means of other dtypes."""
    if options.method == TOPK:
        return [options.dtype, torch.float8_e4m3fn]
    return [t for t in STATS_DTYPES.values() if t is not torch.float16 or options.dtype is torch.float16]


Truth = tuple[torch.Tensor, torch.Tensor]
"""Full entmax of a head in float64: weights ``[T]``, output ``[D]``."""


def _full(options: Options, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, row: int, head: int) -> Truth:
    kv = head * options.kv_heads // options.query_heads
    scores = k[row, kv].double() @ q[row, head, 0].double() * options.head_dim**-0.5
    p = entmax_row(scores, options.alpha).p
    return p, p @ v[row, kv].double()


def _quality(
    options: Options, work: Work, offset: float, dtype: torch.dtype, given: Sequence[torch.Tensor],
    truth: Sequence[Truth],
) -> Quality:  # fmt: skip
    o, (k, v, q) = options, given
    cache = PagedKVCache(o.page_size, o.stats, work.tokens, dtype)
    cache.initialize(k, v)
    out, info = torch.empty_like(q), list[DecodeInfo]()
    if o.method == TOPK:
        count = o.topk_pages(work.tokens)
        topk_decode(q, cache, None, None, out, count, alpha=o.alpha, append_cache=False, info=info)
    else:
        gaussian_decode(q, cache, None, None, out, o.alpha, niter=o.niter, tau_mode=o.tau_mode, info=info)
    selection = info[0].selection
    lists = zip(selection.pages.flatten(0, 1), selection.counts.flatten().tolist(), strict=True)
    kept = [float(p[_tokens(chosen[:n], o.page_size, work.tokens)].sum())
            for (p, _), (chosen, n) in zip(truth, lists, strict=True)]  # fmt: skip
    errors = [float((got.double() - full).norm() / full.norm())
              for (_, full), got in zip(truth, out.flatten(0, 2), strict=True)]  # fmt: skip
    cut = 0 if cache.saturated is None else int(cache.saturated.sum())
    pages, total = float(selection.counts.float().mean()), -(-work.tokens // o.page_size)
    return Quality(
        work, str(dtype).removeprefix("torch."), offset, _mean(kept), min(kept), _mean(errors), max(errors), pages,
        total, float(info[0].certified.float().mean()), cut,
    )  # fmt: skip


def _tokens(pages: torch.Tensor, page_size: int, tokens: int) -> torch.Tensor:
    places = pages.to(torch.int64)[:, None] * page_size + torch.arange(page_size, device=pages.device)
    return places[places < tokens]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quality_table(method: str, rows: Sequence[Quality]) -> Table:
    """One line a work and dtype."""
    table = Table(title=f"Selection by {method} statistics of several dtypes", title_justify="left", box=SIMPLE_HEAD)
    for name in ("batch x context", "offset", "statistics", "weight kept", "least", "error of o", "most",
                 "pages", "of", "certified", "heads cut"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            r.work.label, f"{r.offset:g}", r.stats, f"{r.kept:.5f}", f"{r.least_kept:.5f}", f"{r.error:.2e}",
            f"{r.most_error:.2e}", f"{r.pages:.0f}", str(r.total), f"{100 * r.certified:.0f} %", str(r.saturated),
        )  # fmt: skip
    return table
