"""Oracles of the entmax flows (EntmaxKV, arXiv:2605.21649), and of their attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles.base import Oracle, Pages, oracle
from flowlib.testing.oracles.bisection import bisect

SCALED_STEPS = 100


class _Entmax(Oracle):
    @staticmethod
    def scale(spec: Spec) -> float:
        """The factor of q·k."""
        return spec.head_dim**-0.5 if spec.scale is None else spec.scale

    @staticmethod
    def bounds(k: torch.Tensor) -> dict[str, torch.Tensor]:
        """Largest and smallest key per channel."""
        high, low = k[:, 0], k[:, 0]
        for token in range(1, k.shape[1]):
            high, low = torch.maximum(high, k[:, token]), torch.minimum(low, k[:, token])
        return {"k_max": high[:, None], "k_min": low[:, None]}


    def bound(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        """Σ_d max(scale · q_d · max_d, scale · q_d · min_d) + the largest slope · (position − query), ``[G, n]``."""
        first = pages["position"][:, 0, 0] * spec.page_size - pages["query_position"]
        last = first + (spec.page_size - 1)
        rows = []
        for head, slope in zip(q, pages["alibi_slopes"], strict=True):
            terms = torch.maximum(head * pages["k_max"][:, 0], head * pages["k_min"][:, 0])
            rows.append(self.scale(spec) * terms.sum(1) + torch.maximum(slope * first, slope * last))
        return torch.stack(rows)


@oracle("entmax_topk_attention")
class EntmaxTopK(_Entmax):
    """Per query head: the bound."""

    def __init__(self, alpha: float = 1.5, topk_pages: int | None = None, min_context: int = 0) -> None:
        self.topk_pages = topk_pages

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        return self.bounds(k)

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        return self.bound(q, pages, spec)

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        if self.topk_pages is None:
            return super().counts(scores, num_pages, spec)
        eligible = sum(1 for s in scores.tolist() if s > -math.inf)
        count = min(self.topk_pages - spec.bos - spec.eos, eligible)
        return count, count


@oracle("entmax_gaussian_attention")
class EntmaxGaussian(_Entmax):
    """Per query head: a · (mu + z · sigma) less the threshold, or a · bound less what the last page tells for certain,
    if that is lower; what is not above 0 is left out."""

    def __init__(
        self,
        alpha: float = 1.5,
        tau_mode: str = "exact",
        niter: int = 3,
        safety_margin_z: float = 0.0,
        max_quantile: float = 0.995,
        excess: float = 0.1,
        min_context: int = 0,
        max_pages: int | None = None,
        certify: bool = False,
        stats_dtype: object = None,
    ) -> None:
        self.a, self.margins, self.quantile = alpha - 1.0, (safety_margin_z, excess), max_quantile
        self.max_pages, self.certify = max_pages, certify

    def fields(self, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> dict[str, torch.Tensor]:
        mean = torch.einsum("ntd->nd", k) / k.shape[1]
        away = k - mean[:, None]
        variance = torch.einsum("ntd,ntd->nd", away, away) / k.shape[1]
        moments = {"k_mean": mean[:, None], "k_std": variance.sqrt()[:, None]}
        return moments | (self.bounds(k) if self.certify else {})

    def scores(self, q: torch.Tensor, pages: Pages, spec: Spec) -> torch.Tensor:
        z = NormalDist().inv_cdf(self.quantile ** (1.0 / spec.page_size))
        middle = pages["position"][:, 0, 0] * spec.page_size + (spec.page_size - 1) / 2 - pages["query_position"]
        rows = []
        for h, head in enumerate(q):
            slope = pages["alibi_slopes"][h]
            mu = self.scale(spec) * torch.einsum("d,nd->n", head, pages["k_mean"][:, 0]) + slope * middle
            spread = torch.einsum("d,nd->nd", head, pages["k_std"][:, 0])
            sigma = self.scale(spec) * torch.einsum("nd,nd->n", spread, spread).sqrt()
            floor = self.floor(mu, sigma, bool(slope != 0), spec.page_size)
            certain = self.a * pages["tail_maximum"][h] - 1.0
            rows.append(self.a * (mu + z * sigma) - torch.maximum(floor, certain))
        if not self.certify:
            return torch.stack(rows)
        bounds = self.a * self.bound(q, pages, spec) - (self.a * pages["tail_maximum"] - 1.0)[:, None]
        return torch.minimum(torch.stack(rows), bounds)

    def floor(self, mu: torch.Tensor, sigma: torch.Tensor, by_page: bool, page_size: int) -> torch.Tensor:
        """The threshold over normal scores, one normal a page or one for all, lowered by the margin."""
        row = (sigma.square().mean() + (mu - mu.mean()).square().mean()).sqrt().clamp(min=1e-6)
        count = torch.full_like(mu, float(page_size))
        if by_page:
            tau = normal_threshold(self.a, mu, sigma, count)
        else:
            tau = normal_threshold(self.a, mu.mean()[None], row[None], count.sum()[None])
        above = (tau / self.a - (mu + 1.5 * sigma).mean()).clamp(min=0.0)
        return tau - self.a * torch.maximum(self.margins[0] * row, self.margins[1] * above)

    def kept(self, scores: torch.Tensor, spec: Spec, slack: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        return scores > slack, scores > -slack

    def counts(self, scores: torch.Tensor, num_pages: int, spec: Spec) -> tuple[int, int]:
        eligible = sum(1 for s in scores.tolist() if s > -math.inf)
        count = eligible if self.max_pages is None else min(eligible, self.max_pages)
        return count, count


def normal_threshold(a: float, mu: torch.Tensor, sigma: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """tau of Σ count · E[max(a · S − tau, 0)^(1/a)] = 1, S normal, by bisection, in the dtype of `mu`.

    A Newton step from the root, which changes nothing, gives it its derivative.
    """

    def mass(tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        powers = [truncated_power(a * mu - tau, a * sigma, 1.0 / a - less) for less in (0.0, 1.0)]
        return (count * powers[0]).sum(), (count * powers[1]).sum()

    with torch.no_grad():
        low = a * float(mu.max()) - 1.0
        reach = math.sqrt(2.0 * math.log(float(count.sum()) + 1.0)) + 8.0
        high = low + 1.0 + a * float(sigma.max()) * reach
        root = bisect(lambda t: float(mass(torch.tensor(t, dtype=mu.dtype))[0]) - 1.0, low, high, SCALED_STEPS)
    start = torch.tensor(root, dtype=mu.dtype)
    total, less = mass(start)
    return start + (total - 1.0) * a / less.detach()


def truncated_power(mean: torch.Tensor, sigma: torch.Tensor, power: float) -> torch.Tensor:
    """E[max(Y, 0)^power] of normals Y: by recursion over whole powers, else on a grid."""
    sigma = sigma.clamp(min=1e-10)
    t = mean / sigma
    density = (-0.5 * t * t).exp() / math.sqrt(2.0 * math.pi)
    below, order = 0.5 * torch.special.erfc(-t / math.sqrt(2.0)), round(power)
    if abs(power - order) > 1e-9:
        return _on_a_grid(t, power) * sigma**power
    moments = [below, t * below + density]
    for n in range(2, order + 1):
        moments.append(t * moments[n - 1] + (n - 1) * moments[n - 2])
    point = mean.clamp(min=0.0) ** order * (1.0 + 0.5 * order * (order - 1) / t.clamp(min=1.0).square())
    return torch.where(t > 40.0, point, sigma**order * moments[order].clamp(min=0.0))


def _on_a_grid(t: torch.Tensor, power: float) -> torch.Tensor:
    x = torch.linspace(0.0, 12.0, 24001, dtype=t.dtype).square()  # the power is smooth in the root of x
    weight = 2.0 * torch.linspace(0.0, 12.0, 24001, dtype=t.dtype)
    values = x**power * (-0.5 * (x - t[..., None]).square()).exp() * weight / math.sqrt(2.0 * math.pi)
    return torch.trapezoid(values, dx=12.0 / 24000, dim=-1)


# -- attention


@dataclass(frozen=True)
class EntmaxAttention:
    """Entmax attention of H heads over T tokens.

    Attributes:
        o: ``[H, Dv]``.
        tau: ``[H]``, in the scaled domain; -inf without a token.
        mass: ``[H]``, the sum of the weights before any division.
        size: ``[H, Dv]``, Σ_j p_j · |v_j| (for tolerances).
        spread: ``[H, Dv]``, Σ_j p_j^(2 − alpha) · |v_j|: weights move by at most twice that times what scores move.
        weight: ``[H]``, Σ_j p_j^(2 − alpha).
        logit: ``[H]``, the largest Σ_d |scale · q_d · k_jd| + |bias_j|.
        scores: ``[H, T]``.
    """

    o: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor
    size: torch.Tensor
    spread: torch.Tensor
    weight: torch.Tensor
    logit: torch.Tensor
    scores: torch.Tensor


def entmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: Sequence[int],
    query_position: int,
    spec: Spec,
    alpha: float,
    slopes: Sequence[float] | None = None,
    weights_dtype: torch.dtype | None = None,
    given: Callable[[int], tuple[float, bool] | None] = lambda h: None,
) -> EntmaxAttention:
    """alpha-entmax attention of q ``[H, D]`` over k ``[T, D]`` and v ``[T, Dv]``, one head after the other.

    Args:
        q, k, v, positions, query_position, spec, slopes, weights_dtype: as for
            :func:`flowlib.testing.oracles.attention`.
        alpha: above 1.
        given: for head h a threshold to take in place of the root, and whether weights are divided by their sum.
    """
    scale, a = _Entmax.scale(spec), alpha - 1.0
    (heads, _), width = q.shape, v.shape[1]
    o, size, spread = (q.new_zeros(heads, width) for _ in range(3))
    tau, mass, weight, logit = q.new_full((heads,), -math.inf), *(q.new_zeros(heads) for _ in range(3))
    scores = q.new_zeros(heads, len(positions))
    distance = torch.tensor([p - query_position for p in positions], dtype=q.dtype)
    for h in range(heads if positions else 0):
        bias = distance * (0.0 if slopes is None else slopes[h])
        scores[h] = scale * torch.einsum("td,d->t", k, q[h]) + bias
        logit[h] = (scale * torch.einsum("td,d->t", k.abs(), q[h].abs()) + bias.abs()).max()
        known, top = given(h), scores[h].max()
        z = a * (scores[h] - top)
        if known is None:
            own = bisect(lambda t, z=z: float(((z - t).clamp(min=0.0) ** (1.0 / a)).sum()) - 1.0, -1.0, 0.0)
        else:
            own = float(known[0]) - a * float(top)
        p = (z - own).clamp(min=0.0) ** (1.0 / a)
        tau[h], mass[h] = own + a * top, p.sum()
        if known is None or known[1]:
            p = p / p.sum()
        u = torch.where(p > 0, p ** (2.0 - alpha), 0.0)
        weight[h] = u.sum()
        spread[h], size[h] = torch.einsum("t,te->e", u, v.abs()), torch.einsum("t,te->e", p, v.abs())
        if weights_dtype is not None:
            p = p.to(weights_dtype).to(q.dtype)
        o[h] = torch.einsum("t,te->e", p, v)
    return EntmaxAttention(o, tau, mass, size, spread, weight, logit, scores)
