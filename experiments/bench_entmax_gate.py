"""The gate before any speed of entmax decoding: sampled heads at full size held against float64, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from bench_entmax_scene import TOPK, Scene
from bench_gate import Verdict

from flowlib.entmax import DecodeInfo, PagedKVCache
from flowlib.ops.gaussian_tau import threshold_floor
from flowlib.testing import gamma
from flowlib.testing.oracles.bisection import entmax_row, gaussian_threshold

TAU_SLACK = 1e-3
"""How far an estimated threshold may be off, in units of max(1, |tau|): the tolerance of EntmaxKV's own tests."""


@dataclass(frozen=True)
class Head:
    """One query head of one row, in float64 where it lies.

    Attributes:
        q: ``[D]``, scaled by 1/sqrt(D). k, v: ``[T, D]``.
        scores: ``[T]``. size: the largest Σ|q·k|.
        sparse, every: outputs ``[D]`` of a step over the selection, and over all pages.
        pages: selected, ascending. tau, mass, certified: what the step told.
    """

    row: int
    head: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    size: float
    sparse: torch.Tensor
    every: torch.Tensor
    pages: torch.Tensor
    tau: float
    mass: float
    certified: bool


def gate(scene: Scene) -> tuple[list[Verdict], float]:
    """The verdicts on a step over the first cache, and the tokens with mass of a head, on average."""
    cache = scene.caches[0]
    info: list[DecodeInfo] = []
    scene.out.fill_(math.nan)
    sparse = scene.sparse(cache, info).clone()
    scene.out.fill_(math.nan)
    every = scene.full(cache).clone()
    found, support = [], []
    last = (scene.work.batch - 1, scene.options.query_heads - 1)
    for row, head in dict.fromkeys([(0, 0), last]):
        one = _head(scene, cache, info[0], sparse, every, row, head)
        judged = [_statistics(scene, cache, one), _selection(scene, cache, one), *_attention(scene, one)]
        name = f"row {row}, head {head}"
        for stage, error, tolerance, note in judged:
            ok = error <= tolerance  # NaN is not
            label = scene.options.method
            found.append(Verdict(label, scene.work.label, stage, name, float(error), float(tolerance), ok, note))
        support.append(int((_weights(scene, one, _kept(scene, one)) > 0).sum()))
    return found, sum(support) / len(support)


def softmax_error(scene: Scene, out: torch.Tensor) -> float:
    """Largest relative error (2-norm) of softmax attention `out` ``[B, H_q, D]`` over the sampled heads."""
    cache, errors = scene.caches[0], []
    for row, head in dict.fromkeys([(0, 0), (scene.work.batch - 1, scene.options.query_heads - 1)]):
        q, k, v = _tokens(scene, cache, row, head)
        truth = (k @ q).softmax(0) @ v
        error = float((out[row, head].double() - truth).norm() / truth.norm())
        errors.append(math.inf if math.isnan(error) else error)
    return max(errors)


def _tokens(scene: Scene, cache: PagedKVCache, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = scene.options.query_heads // scene.options.kv_heads
    table = cache.block_table[row].to(torch.int64)
    k, v = (cache.kv[side, table, :, head // group].flatten(0, 1)[: scene.work.tokens].double() for side in (0, 1))
    return scene.q[row, head, 0].double() / math.sqrt(scene.options.head_dim), k, v


def _head(
    scene: Scene, cache: PagedKVCache, info: DecodeInfo, sparse: torch.Tensor, every: torch.Tensor, row: int, head: int
) -> Head:
    q, k, v = _tokens(scene, cache, row, head)
    selection = info.selection
    return Head(
        row, head, q, k, v, k @ q, float((k.abs() @ q.abs()).max()), sparse[row, head, 0].double(),
        every[row, head, 0].double(), selection.pages[row, head, : int(selection.counts[row, head])].to(torch.int64),
        float(info.tau[row, head]), float(info.mass[row, head]), bool(info.certified[row, head]),
    )  # fmt: skip


Judged = tuple[str, float, float, str]
"""Stage, error, tolerance, note."""


def _full_pages(scene: Scene, one: Head) -> torch.Tensor:
    """K of the pages before the tail, ``[P, page_size, D]``."""
    size = scene.options.page_size
    return one.k[: (len(one.k) - 1) // size * size].unflatten(0, (-1, size))


def _statistics(scene: Scene, cache: PagedKVCache, one: Head) -> Judged:
    """Every statistic of every scored page; the largest error in units of its tolerance."""
    pages = _full_pages(scene, one)
    stats, scale = _kept_statistics(scene, cache, one, pages), _scale(scene, cache, one)
    truths = {"k_min": pages.amin(1), "k_max": pages.amax(1), "k_mean": pages.mean(1)}
    truths["k_std"] = (pages - pages.mean(1, keepdim=True)).square().mean(1).sqrt()
    computed = gamma(scene.options.page_size + 8) * pages.abs().sum(1)
    worst = 0.0
    for name, truth in truths.items():
        kept = stats.get(name)
        if kept is not None and len(pages):
            estimate = name in ("k_mean", "k_std")
            if scale is not None:
                rounded = _float8_step(truth, scale) * (0.5 if estimate else 1.0)
            else:
                rounded = torch.finfo(scene.options.stats_dtype).eps * truth.abs() * estimate
            allowed = rounded + (computed if estimate else torch.finfo(torch.float64).tiny)
            away = (kept - truth).abs() / allowed
            worst = max(worst, float(torch.where(away.isnan(), math.inf, away).max()))
            inside = {"k_min": kept > truth, "k_max": kept < truth}.get(name)
            worst = math.inf if inside is not None and bool(inside.any()) else worst
    return "statistics", worst, 1.0, "in units of the tolerance"


def _float8_step(value: torch.Tensor, scale: float) -> torch.Tensor:
    """Distance of the e4m3 codes around a value, at most: 2^-3 of it, or 2^-9 near 0."""
    return (value.abs() / 8.0).clamp(min=scale / 512.0)


def _selection(scene: Scene, cache: PagedKVCache, one: Head) -> Judged:
    """Pages on the wrong side of the rule by more than rounding, a missing tail, a list that does not ascend."""
    options, pages = scene.options, _full_pages(scene, one)
    chosen = torch.zeros(len(pages) + 1, dtype=torch.bool, device=one.k.device)
    chosen[one.pages] = True
    wrong = int(not bool(chosen[-1])) + int((one.pages.diff() <= 0).sum())
    chosen = chosen[:-1]
    if options.method == TOPK:
        bounds = _bounds(scene, cache, one, pages)
        count = min(options.topk_pages(scene.work.tokens) - 1, len(pages))
        slack = 2.0 * gamma(2 * options.head_dim + 16) * (1.0 + one.size)
        least = float(bounds.topk(count).values[-1]) if count else -math.inf
        wrong += abs(int(chosen.sum()) - count)
        wrong += int((chosen & (bounds < least - slack)).sum() + (~chosen & (bounds > least + slack)).sum())
    else:
        above, slack = _gaussian_margin(scene, cache, one, pages)
        wrong += int((chosen & (above < -slack)).sum() + (~chosen & (above > slack)).sum())
    share = float(chosen.double().mean()) if len(pages) else 1.0
    return "selection", wrong, 0.0, f"{100 * share:.1f} % of the pages before the tail"


def _kept_statistics(scene: Scene, cache: PagedKVCache, one: Head, pages: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the stored statistics stand for, ``[P, D]``, by name; those that are not kept are left out."""
    table = cache.block_table[one.row, : len(pages)].to(torch.int64)
    kv_head, scale = one.head * scene.options.kv_heads // scene.options.query_heads, _scale(scene, cache, one) or 1.0
    stored = cache.stored_stats._asdict().items()
    return {name: scale * x[table, kv_head].double() for name, x in stored if x is not None}


def _scale(scene: Scene, cache: PagedKVCache, one: Head) -> float | None:
    """Of float8 statistics; ``None`` for others."""
    kv_head = one.head * scene.options.kv_heads // scene.options.query_heads
    return None if cache.stats_scales is None else float(cache.stats_scales[kv_head])


def _bounds(scene: Scene, cache: PagedKVCache, one: Head, pages: torch.Tensor) -> torch.Tensor:
    stats = _kept_statistics(scene, cache, one, pages)
    return torch.maximum(one.q * stats["k_min"], one.q * stats["k_max"]).sum(-1)


def _gaussian_margin(scene: Scene, cache: PagedKVCache, one: Head, pages: torch.Tensor) -> tuple[torch.Tensor, float]:
    """How far each page lies above what selects it ``[P]``, by formula from the statistics as they are kept, and how
    far that may be off."""
    options, a = scene.options, scene.options.alpha - 1.0
    stats = _kept_statistics(scene, cache, one, pages)
    mu, sigma = stats["k_mean"] @ one.q, (stats["k_std"].square() @ one.q.square()).sqrt()
    if not len(pages):
        return mu, 0.0
    spread = (sigma.square().mean() + mu.var(correction=0)).sqrt()
    count = torch.tensor([float(pages.shape[0] * pages.shape[1])], dtype=torch.float64)
    tau = gaussian_threshold(options.alpha, mu.mean()[None].cpu(), spread[None].cpu(), count)
    known = float(one.scores[len(pages) * options.page_size :].max())
    shape = (1, -1, 1, 1)
    floor = threshold_floor(
        torch.full((1, 1, 1, 1), tau, dtype=torch.float64, device=mu.device), mu.view(shape), sigma.view(shape),
        torch.ones(1, len(pages), dtype=torch.bool, device=mu.device), a, options.safety_margin_z, options.excess,
    )  # fmt: skip
    floor = max(float(floor), a * known - 1.0)
    z = NormalDist().inv_cdf(options.max_quantile ** (1.0 / options.page_size))
    above = a * (mu + z * sigma) - floor
    if options.certify:
        above = torch.minimum(above, a * _bounds(scene, cache, one, pages) - (a * known - 1.0))
    return above, TAU_SLACK * max(1.0, abs(tau))


def _kept(scene: Scene, one: Head) -> torch.Tensor:
    """Tokens of the selection, bool ``[T]``."""
    page = torch.zeros(-(-len(one.k) // scene.options.page_size), dtype=torch.bool, device=one.k.device)
    page[one.pages] = True
    return page.repeat_interleave(scene.options.page_size)[: len(one.k)]


def _weights(scene: Scene, one: Head, kept: torch.Tensor) -> torch.Tensor:
    """The probabilities that the step should have used: solved for, or, in the modes with an estimate, of its tau."""
    a, hidden = scene.options.alpha - 1.0, one.scores.masked_fill(~kept, -math.inf)
    if scene.options.method == TOPK or scene.options.tau_mode == "exact":
        return entmax_row(hidden, scene.options.alpha).p
    return (a * hidden - one.tau).clamp(min=0.0) ** (1.0 / a)


def _tolerance(scene: Scene, one: Head, p: torch.Tensor) -> torch.Tensor:
    """What rounding of scores and of the threshold in fp32, and of p and o to the cache's dtype, moves o: ``[D]``.

    The Jacobian of p is diag(u) − u·uᵀ / Σu with u = p^(2 − alpha), so a score off by ds moves o by 2 · ds · u @ |v|.
    """
    a = scene.options.alpha - 1.0
    u = torch.where(p > 0, p ** (1.0 - a), 0.0)
    ds = gamma(scene.options.head_dim + 16) * (1.0 + one.size) + gamma(16) * (1.0 + abs(one.tau)) / a
    eps = torch.finfo(scene.options.dtype).eps
    weighed = p @ one.v.abs()
    return 2.0 * ds * (u @ one.v.abs()) + (gamma(256) + 2.0 * eps) * weighed


def _attention(scene: Scene, one: Head) -> list[Judged]:
    """The output over the selection, the one over every page, and the certificate."""
    kept, alpha = _kept(scene, one), scene.options.alpha
    p = _weights(scene, one, kept)
    divided = scene.options.method == TOPK or scene.options.tau_mode != "fixed"
    p = p / p.sum() if divided and p.sum() > 0 else p
    full = entmax_row(one.scores, alpha)
    judged = [_worst("attention", one.sparse, p @ one.v, _tolerance(scene, one, p), f"mass {one.mass:.6f}")]
    judged.append(_worst("full entmax", one.every, full.p @ one.v, _tolerance(scene, one, full.p), ""))
    a = alpha - 1.0
    outside = (a * one.scores - full.tau).masked_fill(kept, -math.inf).max()
    slack = a * gamma(2 * scene.options.head_dim + 16) * (1.0 + one.size)
    dropped = float(full.p[~kept].sum())
    distance = float((one.sparse - full.p @ one.v).norm() / (full.p @ one.v).norm())
    note = f"mass dropped {dropped:.2e}, output off by {distance:.1e}"
    if one.certified:
        judged.append(("certificate", max(float(outside), 0.0), slack, note))
    else:
        judged.append(("certificate", 0.0, 0.0, f"none; {note}"))
    return judged


def _worst(stage: str, got: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor, note: str) -> Judged:
    away = (got - truth).abs()
    away = torch.where(away.isnan(), math.inf, away)
    i = int((away / allowed).argmax())
    return stage, float(away[i]), float(allowed[i]), note
