"""Entmax by bisection, and entmax attention of one request by plain loops: what fast solvers are held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

BISECTIONS = 200


class EntmaxRow(NamedTuple):
    """Entmax of one row.

    Attributes:
        p: ``[L]``, probabilities.
        tau: the threshold in the scaled domain, (alpha − 1) · s; the log-sum-exp at alpha 1; -inf where all is hidden.
    """

    p: torch.Tensor
    tau: float


def entmax_row(scores: torch.Tensor, alpha: float) -> EntmaxRow:
    """alpha-entmax of float64 scores ``[L]``: Σ max(z − tau, 0)^(1/a) = 1 by bisection over [max z − 1, max z].

    Args:
        scores: -inf is hidden.
        alpha: at least 1.
    """
    s, a = scores.double(), alpha - 1.0
    if s.numel() == 0 or s.max() == -math.inf:
        return EntmaxRow(torch.zeros_like(s), -math.inf)
    if a == 0.0:
        lse = float(torch.logsumexp(s, 0))
        return EntmaxRow((s - lse).exp(), lse)
    top = float(s.max())
    z = a * (s - top)
    z = z[z > -1.0]  # nothing else can be above any tau
    tau = bisect(lambda t: float(((z - t).clamp(min=0.0) ** (1.0 / a)).sum()) - 1.0, -1.0, 0.0)
    p = (a * (s - top) - tau).clamp(min=0.0) ** (1.0 / a)
    return EntmaxRow(p, tau + a * top)


def bisect(f: Callable[[float], float], low: float, high: float, steps: int = BISECTIONS) -> float:
    """The root of a decreasing function between a point where it is at least 0 and one where it is at most 0."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        if f(middle) >= 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def attention_scores(
    q: torch.Tensor, k: torch.Tensor, slopes: Sequence[float] | None = None, positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Scores float64 ``[H_q, T]`` of the last token of a request: q·k / sqrt(D) + slope · (position − (T − 1)).

    Args:
        q: ``[H_q, D]``.
        k: ``[T, H_kv, D]``.
        slopes: one of each query head.
        positions: of the T tokens; ``None`` means 0 to T − 1.
    """
    heads, size = q.shape
    tokens = k.shape[0]
    place = torch.tensor(list(range(tokens) if positions is None else positions), dtype=torch.float64)
    s = torch.zeros(heads, tokens, dtype=torch.float64)
    for h in range(heads):
        keys = k[:, h // (heads // k.shape[1])].double()
        s[h] = torch.einsum("td,d->t", keys, q[h].double()) / math.sqrt(size)
        s[h] += (0.0 if slopes is None else float(slopes[h])) * (place - (tokens - 1))
    return s


def entmax_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: float | Sequence[float],
    slopes: Sequence[float] | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entmax attention of the last token of a request, in float64.

    Args:
        q, k, slopes: as for :func:`attention_scores`.
        v: ``[T, H_kv, D]``.
        alpha: for all heads, or one of each.
        keep: bool ``[H_q, T]``, tokens attended to; ``None`` means all.

    Returns:
        o ``[H_q, D]`` and p ``[H_q, T]``.
    """
    s = attention_scores(q, k, slopes)
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    heads = q.shape[0]
    p = torch.zeros_like(s)
    o = torch.zeros(heads, v.shape[2], dtype=torch.float64)
    for h in range(heads):
        p[h] = entmax_row(s[h], alpha if isinstance(alpha, float | int) else alpha[h]).p
        o[h] = torch.einsum("t,td->d", p[h], v[:, h // (heads // k.shape[1])].double())
    return o, p


def normal_mass(a: float, tau: float, mean: torch.Tensor, sigma: torch.Tensor, points: int = 4001) -> torch.Tensor:
    """E[max(a·S − tau, 0)^(1/a)] of normals S ``[n]``, in float64, by the trapezoid rule over ±14 deviations."""
    z = torch.linspace(-14.0, 14.0, points, dtype=torch.float64)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    y = (a * (mean.double()[:, None] + sigma.double()[:, None] * z) - tau).clamp(min=0.0) ** (1.0 / a)
    return torch.trapezoid(y * density, z)


def gaussian_threshold(alpha: float, mean: torch.Tensor, sigma: torch.Tensor, count: torch.Tensor) -> float:
    """tau of Σ_p count_p · E[max(a·S_p − tau, 0)^(1/a)] = 1 for normals S_p, by bisection over :func:`normal_mass`."""
    a = alpha - 1.0
    top = a * float(mean.max())
    high = top + a * float(sigma.max()) * (math.sqrt(2.0 * math.log(float(count.sum()) + 1.0)) + 8.0)
    return bisect(lambda t: float((count * normal_mass(a, t, mean, sigma)).sum()) - 1.0, top - 1.0, high, 60)
