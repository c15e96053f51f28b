"""One decode step over a :class:`flowlib.PagedKVCache`: select pages from their statistics, attend exactly to them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from flowlib.core.errors import FormatError, OptionError, ShapeError
from flowlib.entmax import checks
from flowlib.entmax.attention import Attended, check_tau_mode, entmax_attention, selected_scores
from flowlib.entmax.cache import PagedKVCache, check_kept
from flowlib.entmax.checks import Alpha
from flowlib.entmax.gaussian import (
    DEFAULT_EXCESS,
    DEFAULT_QUANTILE,
    check_margins,
    gaussian_select,
    gaussian_tau,
    page_quantile,
)
from flowlib.entmax.pages import page_bounds, page_moments, tail_of
from flowlib.entmax.selection import Selection, certified_exact, pack, topk_select

DEVICE = "flowlib.entmax.device"
"""What decodes by kernels; imported late, it imports this module's names."""
Options = TypeVar("Options")
Implementation = Callable[["Step", Options, list[bool], int, torch.Tensor, "list[DecodeInfo] | None"], torch.Tensor]
"""Decodes the rows of a step with some options into a tensor: which rows exactly, and below how many tokens."""


class DecodeInfo(NamedTuple):
    """What a step attended to and what it can say about it.

    Attributes:
        selection: the pages of each query head; all of them where a row is decoded exactly.
        tau: ``[B, H_q]``, the threshold in the scaled domain; at alpha 1 the log-sum-exp.
        mass: ``[B, H_q]``, the sum of the probabilities as the threshold gives them.
        certified: bool ``[B, H_q]``: no page left out can hold support, the output is that of the whole cache.
            False also where nothing is known, for want of the ``"topk"`` statistics.
        exact_rows: bool per row: decoded over all its pages, without a selection.
    """

    selection: Selection
    tau: torch.Tensor
    mass: torch.Tensor
    certified: torch.Tensor
    exact_rows: tuple[bool, ...]


def topk_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    out: torch.Tensor,
    topk_pages: int,
    alibi_slopes: torch.Tensor | None = None,
    alpha: Alpha = 1.5,
    niter: int | None = None,
    append_cache: bool = True,
    min_context: int = 0,
    *,
    impl: str = "reference",
    info: list[DecodeInfo] | None = None,
) -> torch.Tensor:
    """Entmax attention over the tail and the `topk_pages` - 1 pages with the highest bounds of each query head.

    A row shorter than `min_context`, or of at most `topk_pages` pages, is decoded exactly; the others are not touched
    by that.

    Args:
        q: ``[B, H_q, 1, D]``, last axis contiguous.
        cache: with ``"topk"`` statistics.
        k_new, v_new: ``[B, H_kv, 1, D]``, appended first; not looked at unless `append_cache`.
        out: as q; overwritten.
        topk_pages: pages attended, the tail among them; at least 2.
        alibi_slopes: ``[H_q]``; ``None`` means zeros.
        alpha: from 1 to 2; a number or a tensor ``[H_q]``. Every step checks it on the CPU, so that a tensor on a GPU
            makes it wait for the GPU: a number or a tensor on the CPU does not.
        niter: steps towards the threshold, at least 1; of no effect: every implementation solves for it.
        append_cache: store k_new and v_new first.
        min_context: tokens below which a row is decoded exactly.
        impl: ``"reference"``, or ``"triton"``: kernels for caches of 16 or 32 bits, on a GPU (on the CPU interpreted,
            with ``TRITON_INTERPRET=1`` from before Triton's import), which take alpha 1 for all heads or for none.
        info: a list to which the step's :class:`DecodeInfo` is added.

    Returns:
        out.

    Raises:
        OptionError: an option is out of range, or the cache lacks the statistics. ShapeError, FormatError: a tensor
        does not fit. BackendError: the cache is empty. Nothing is stored then.

    Source: EntmaxKV (arXiv:2605.21649); rows are routed one by one here, there the whole batch is.
    """
    topk_pages = checks.count("topk_decode", "topk_pages", topk_pages, 2)
    if niter is not None:
        checks.count("topk_decode", "niter", niter, 1)
    least = checks.count("topk_decode", "min_context", min_context, 0)
    run = _implementation("topk_decode", impl, _TOPK)
    check_kept("topk_decode", cache, "topk")
    step = _step("topk_decode", q, cache, out, alpha, alibi_slopes, above_one=False)
    if impl == "triton":
        importlib.import_module(DEVICE).check_step("topk_decode", step, one_alpha=False)
    if append_cache:
        _append("topk_decode", cache, k_new, v_new)
    exact = [n < least or -(-n // cache.page_size) <= topk_pages for n in cache.seq_lens_host]
    return run(step, topk_pages, exact, least, out, info)


def gaussian_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    out: torch.Tensor,
    alpha: Alpha = 1.5,
    safety_margin_z: float = 0.0,
    max_quantile: float = DEFAULT_QUANTILE,
    excess: float = DEFAULT_EXCESS,
    alibi_slopes: torch.Tensor | None = None,
    niter: int = 3,
    append_cache: bool = False,
    tau_mode: str = "corrected",
    min_context: int = 0,
    *,
    impl: str = "reference",
    info: list[DecodeInfo] | None = None,
) -> torch.Tensor:
    """Entmax attention over the pages whose likely largest score exceeds the estimated threshold of each query head.

    A row shorter than `min_context`, or of one page, is decoded exactly. Heads with a slope take a normal per page,
    heads without one a normal per row. The scores of the tail, which is always attended, raise the estimated floor
    where they can; with ``"topk"`` statistics kept as well, pages that cannot hold support are left out.

    Args:
        q, k_new, v_new, out, alibi_slopes, min_context, impl, info: as for :func:`topk_decode`; ``"triton"`` takes one
            alpha for all heads.
        cache: with ``"gaussian"`` statistics.
        alpha: above 1, at most 2; a number or a tensor ``[H_q]``, see :func:`topk_decode`.
        safety_margin_z, max_quantile, excess: as for :func:`flowlib.entmax.gaussian_select`.
        niter: steps from the estimated threshold, in mode ``"corrected"``; at least 0.
        append_cache: store k_new and v_new first.
        tau_mode: as for :func:`flowlib.entmax.entmax_attention`.

    Returns:
        out.

    Raises:
        as :func:`topk_decode`.

    Source: EntmaxKV (arXiv:2605.21649); routing by row, the tail's floor and the certificate are flowlib's.
    """
    least = checks.count("gaussian_decode", "min_context", min_context, 0)
    options = GaussianOptions(
        *check_margins("gaussian_decode", safety_margin_z, excess),
        max_quantile,
        checks.count("gaussian_decode", "niter", niter, 0),
        check_tau_mode("gaussian_decode", tau_mode),
    )
    run = _implementation("gaussian_decode", impl, _GAUSSIAN)
    check_kept("gaussian_decode", cache, "gaussian")
    page_quantile("gaussian_decode", max_quantile, cache.page_size)
    step = _step("gaussian_decode", q, cache, out, alpha, alibi_slopes, above_one=True)
    if impl == "triton":
        importlib.import_module(DEVICE).check_step("gaussian_decode", step, one_alpha=True)
    if append_cache:
        _append("gaussian_decode", cache, k_new, v_new)
    exact = [n < least or n <= cache.page_size for n in cache.seq_lens_host]
    return run(step, options, exact, least, out, info)


@dataclass(frozen=True)
class GaussianOptions:
    """Options of :func:`gaussian_decode`, checked."""

    safety_margin_z: float
    excess: float
    max_quantile: float
    niter: int
    tau_mode: str


@dataclass(frozen=True)
class Step:
    """Rows of a decode step.

    Attributes:
        q: ``[B, H_q, D]``.
        cache: whose pool is read.
        alphas, given_slopes: checked. The first, float64 ``[H_q]``, are on the CPU: looking at them waits for nothing.
        rows: int64 ``[B]``, the rows of the cache that q stands for; ``None`` means all.
        same_alpha: alpha, where all heads have the same.
    """

    q: torch.Tensor
    cache: PagedKVCache
    alphas: torch.Tensor
    given_slopes: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    same_alpha: float | None = None

    @property
    def alpha(self) -> torch.Tensor:
        """float64 ``[H_q]``, where q is."""
        return self.alphas.to(self.q.device, non_blocking=True)

    @property
    def slopes(self) -> torch.Tensor:
        """``[H_q]``."""
        zeros = {"size": self.q.shape[1:2], "dtype": checks.computed_in(self.q, self.cache.kv)}
        return self.q.new_zeros(**zeros) if self.given_slopes is None else self.given_slopes

    def only(self, rows: list[int]) -> Step:
        """Some of the rows."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.q.device)
        return replace(self, q=self.q[index], rows=index)

    @property
    def table(self) -> torch.Tensor:
        """int32 ``[B, live pages]``."""
        live = self.cache.block_table[:, : self.cache.live_pages]
        return live if self.rows is None else live[self.rows]

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 ``[B]``."""
        return self.cache.seq_lens if self.rows is None else self.cache.seq_lens[self.rows]


class Outcome(NamedTuple):
    """What an implementation gives for its rows."""

    attended: Attended
    selection: Selection
    certified: torch.Tensor


def _topk_reference(step: Step, topk_pages: int) -> Outcome:
    bounds = _bounds(step)
    selection = topk_select(bounds, step.seq_lens, topk_pages, step.cache.page_size)
    attended = _attend(step, selection)
    return Outcome(attended, selection, _certified(step, bounds, selection, attended))


def _gaussian_reference(step: Step, options: GaussianOptions) -> Outcome:
    size, seq_lens, stats = step.cache.page_size, step.seq_lens, step.cache.page_stats
    arguments = (seq_lens, size, step.table, step.slopes)
    mu, sigma = page_moments(step.q, stats.k_mean, stats.k_std, *arguments)  # type: ignore[arg-type]
    tau = gaussian_tau(mu, sigma, seq_lens, size, step.alpha, step.slopes != 0)
    bounds = _bounds(step) if "topk" in step.cache.stats else None
    margins = (options.safety_margin_z, options.max_quantile, options.excess)
    known = _tail_maximum(step).to(mu.dtype)
    selection = gaussian_select(mu, sigma, tau, seq_lens, size, step.alpha, *margins, known, bounds)
    attended = _attend(step, selection, tau, options)
    if bounds is None:
        return Outcome(attended, selection, torch.zeros_like(tau, dtype=torch.bool))
    return Outcome(attended, selection, _certified(step, bounds, selection, attended))


def _in_torch(sparse: Callable[[Step, Options], Outcome]) -> Implementation[Options]:
    def run(
        step: Step, options: Options, exact: list[bool], least: int, out: torch.Tensor, info: list[DecodeInfo] | None
    ) -> torch.Tensor:
        return _finish(step, exact, lambda rows: sparse(rows, options), out, info)

    return run


def _on_the_device(function: str) -> Implementation[Options]:
    def run(
        step: Step, options: Options, exact: list[bool], least: int, out: torch.Tensor, info: list[DecodeInfo] | None
    ) -> torch.Tensor:
        device = importlib.import_module(DEVICE)
        done = getattr(device, function)(step, options, least, out)
        if info is not None:
            selection, attended, certified = device.told(done, step.cache)
            info.append(DecodeInfo(selection, attended.tau, attended.mass, certified, tuple(exact)))
        return out

    return run


_TOPK: dict[str, Implementation[int]] = {"reference": _in_torch(_topk_reference), "triton": _on_the_device("topk")}
_GAUSSIAN: dict[str, Implementation[GaussianOptions]] = {
    "reference": _in_torch(_gaussian_reference),
    "triton": _on_the_device("gaussian"),
}
"""Implementations by name."""


def _implementation(what: str, impl: object, known: dict[str, Implementation[Options]]) -> Implementation[Options]:
    if not isinstance(impl, str) or impl not in known:
        raise OptionError(f"{what}: impl is {impl!r}, expected one of {', '.join(map(repr, known))}")
    return known[impl]


def _bounds(step: Step) -> torch.Tensor:
    stats = step.cache.page_stats
    arguments = (step.seq_lens, step.cache.page_size, step.table, step.slopes)
    return page_bounds(step.q, stats.k_min, stats.k_max, *arguments)  # type: ignore[arg-type]


def _attend(
    step: Step, selection: Selection | None, tau_hat: torch.Tensor | None = None, options: GaussianOptions | None = None
) -> Attended:
    chosen = (None, None) if selection is None else (selection.pages, selection.sel_lens)
    mode = {} if options is None else {"tau_mode": options.tau_mode, "tau_hat": tau_hat, "niter": options.niter}
    return entmax_attention(step.q, step.cache.kv, step.table, step.seq_lens, step.alpha, *chosen, step.slopes, **mode)


def _tail_maximum(step: Step) -> torch.Tensor:
    """The largest exact score in each row's tail page, ``[B, H_q]``."""
    tail = tail_of(step.seq_lens, step.cache.page_size)[:, None, None].expand(-1, step.q.shape[1], -1)
    dtype = checks.computed_in(step.q, step.cache.kv)
    k, slopes = step.cache.kv[0], step.slopes.to(dtype)
    return selected_scores(step.q.to(dtype), k, step.table, step.seq_lens, tail, None, slopes).scores.amax(-1)


def _certified(step: Step, bounds: torch.Tensor, selection: Selection, attended: Attended) -> torch.Tensor:
    """A threshold with less mass than 1 lies above that of the selection, and certifies nothing."""
    enough = attended.mass >= 1.0 - 64.0 * torch.finfo(attended.mass.dtype).eps
    exact = certified_exact(bounds, selection, attended.tau, step.alpha, step.seq_lens, step.cache.page_size)
    return step.cache.vouched(enough & exact, selection.counts, step.seq_lens)


def _finish(
    step: Step, exact: list[bool], sparse: Callable[[Step], Outcome], out: torch.Tensor, info: list[DecodeInfo] | None
) -> torch.Tensor:
    """Decodes some rows exactly and the others by `sparse`, and puts them together."""
    parts: list[tuple[list[int], Outcome]] = []
    for wanted, run in ((True, _dense), (False, sparse)):
        rows = [b for b, is_exact in enumerate(exact) if is_exact is wanted]
        if rows:
            outcome = run(step if len(rows) == len(exact) else step.only(rows))
            out[rows] = outcome.attended.o[:, :, None].to(out.dtype)
            parts.append((rows, outcome))
    if info is not None:
        info.append(_together(parts, exact))
    return out


def _dense(step: Step) -> Outcome:
    everything = torch.ones(*step.q.shape[:2], step.table.shape[1], dtype=torch.bool, device=step.q.device)
    selection = pack(everything, step.seq_lens, step.cache.page_size, step.table.shape[1])
    return Outcome(_attend(step, None), selection, everything.all(-1))


def _together(parts: list[tuple[list[int], Outcome]], exact: list[bool]) -> DecodeInfo:
    order = torch.tensor([b for rows, _ in parts for b in rows]).argsort()
    width = max(outcome.selection.pages.shape[2] for _, outcome in parts)

    def joined(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(values)[order.to(values[0].device)]

    outcomes = [outcome for _, outcome in parts]
    pages = [
        torch.nn.functional.pad(x.selection.pages, (0, width - x.selection.pages.shape[2]), value=-1) for x in outcomes
    ]
    selection = Selection(
        joined(pages), joined([x.selection.counts for x in outcomes]), joined([x.selection.sel_lens for x in outcomes])
    )
    tau, mass = joined([x.attended.tau for x in outcomes]), joined([x.attended.mass for x in outcomes])
    return DecodeInfo(selection, tau, mass, joined([x.certified for x in outcomes]), tuple(exact))


def _step(
    what: str, q: object, cache: PagedKVCache, out: object, alpha: Alpha, slopes: object, *, above_one: bool
) -> Step:
    queries = checks.floating(what, "q", q, "B, H_q, 1, D")
    kv = cache.kv
    if queries.shape[0] != cache.batch or queries.shape[2] != 1 or queries.shape[3] != kv.shape[4]:
        raise ShapeError(
            f"{what}: q is {list(queries.shape)}, expected [{cache.batch}, H_q, 1, {kv.shape[4]}] as the cache has it"
        )
    checks.group_of(what, queries.shape[1], kv.shape[3])
    target = checks.floating(what, "out", out)
    checks.same_shape(what, "out", target, queries.shape, "as q")
    if target.dtype is not queries.dtype:
        raise FormatError(f"{what}: out is {target.dtype}, expected {queries.dtype} as q")
    for name, value in (("q", queries), ("out", target)):
        if value.stride(-1) != 1 and value.shape[-1] != 1:
            raise ShapeError(f"{what}: the last axis of {name} has stride {value.stride(-1)}, expected 1")
    heads = queries.shape[1]
    alphas = checks.alphas(what, alpha, [heads], torch.device("cpu"), above_one=above_one)
    same = float(alphas[0]) if len(set(alphas.tolist())) == 1 else None
    given = None
    if slopes is not None:
        given = checks.slopes_of(what, slopes, heads, queries.new_empty(0, dtype=checks.computed_in(queries, kv)))
    return Step(queries[:, :, 0].detach(), cache, alphas, given, same_alpha=same)


def _append(what: str, cache: PagedKVCache, k_new: torch.Tensor | None, v_new: torch.Tensor | None) -> None:
    if k_new is None or v_new is None:
        raise FormatError(f"{what}: k_new or v_new is None, expected [B, H_kv, 1, D] where append_cache is True")
    cache.append(k_new, v_new)
