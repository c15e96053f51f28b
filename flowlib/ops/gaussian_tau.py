"""The distributional threshold of entmax: what the normaliser would be if scores were normal."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from flowlib.core.errors import FormatError, OptionError, ShapeError
from flowlib.core.formats import FORMAT, Side
from flowlib.core.op import Inner, SegmentOp
from flowlib.core.rows import Rows
from flowlib.core.spec import Spec

BISECTIONS = 80
MIN_SIGMA = 1e-6
NODES = 96
REACH = 9.0
FAR = 64.0
"""Deviations beyond which a normal density is nothing in fp32."""


class GaussianTau(SegmentOp):
    """The estimated threshold of alpha-entmax from per-page means and deviations of the scores.

    mu and sigma are RAGGED ``[S, r, c]``, mean and standard deviation of the scores of each page's tokens; the result
    is BATCHED. With a = alpha − 1 it solves Σ E[max(a·S − tau, 0)^(1/a)] = 1 over the tokens of the row's scored pages,
    S normal with the row's mean and deviation, or page by page (`mixture`), and lowers tau by a margin:
    a · max(safety_margin_z · sigma_row, excess · max(tau / a − mean(mu + 1.5 · sigma), 0)). It lives in the scaled
    domain: a page is kept where a · (mu + z · sigma) exceeds it. A row without a scored page gives 0.

    Args:
        alpha: in (1, 2].
        safety_margin_z: row deviations subtracted.
        excess: share of the height above the typical page maximum that is subtracted.
        mixture: a normal per page (for scores with a slope) instead of one per row; ``None``: for the query heads whose
            ALiBi slope is not 0, which needs values ``[S, G, 1]``.

    Source: EntmaxKV (arXiv:2605.21649), section on Gaussian-aware selection.
    """

    names: ClassVar[tuple[str, ...]] = ("mu", "sigma")
    reads_rows: ClassVar[bool] = True
    kernel: ClassVar[str] = "flowlib.kernels.gaussian:launch_gaussian_tau"
    scratch: ClassVar[str] = "flowlib.kernels.gaussian:scratch_of"

    def __init__(
        self, alpha: float, safety_margin_z: float = 0.0, excess: float = 0.1, mixture: bool | None = False
    ) -> None:
        if not 1.0 < alpha <= 2.0:
            raise OptionError(f"{self.label}: alpha is {alpha}, expected a number above 1 and at most 2")
        for name, value in (("safety_margin_z", safety_margin_z), ("excess", excess)):
            if not value >= 0.0:
                raise OptionError(f"{self.label}: {name} is {value}, expected at least 0")
        self.alpha = float(alpha)
        self.safety_margin_z = float(safety_margin_z)
        self.excess = float(excess)
        self.mixture = mixture
        self.page_size = 0
        self.group_size = 0

    def bound(self, spec: Spec) -> GaussianTau:
        resolved = copy.copy(self)
        resolved.page_size, resolved.group_size = spec.page_size, spec.group_size
        return resolved

    def infer(self, mu: Inner, sigma: Inner) -> Inner:
        if mu != sigma:
            axis = 1 if mu[0] != sigma[0] else 2
            raise ShapeError(
                f"{self.label}: axis {axis} of 'sigma' is {sigma[axis - 1]}, expected {mu[axis - 1]} to match 'mu'"
            )
        if self.per_head and self.group_size and mu != (self.group_size, 1):
            raise ShapeError(
                f"{self.label}: 'mu' is [., {mu[0]}, {mu[1]}], expected [., {self.group_size}, 1], one per query head"
            )
        return mu

    @property
    def per_head(self) -> bool:
        """Whether its planes must be the query heads."""
        return self.mixture is None

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        return FORMAT.BATCHED

    def meaning(
        self, mu: torch.Tensor, sigma: torch.Tensor, *, scored: torch.Tensor, rows: Rows | None = None
    ) -> torch.Tensor:
        mask = scored[:, :, None, None]
        mu, sigma = mu.masked_fill(~mask, 0.0), sigma.masked_fill(~mask, 0.0)
        count, mean, row = _row_moments(mu, sigma, mask)
        tokens = mask.sum(1, keepdim=True) * self.page_size
        mixed = None if rows is None else (rows.slopes != 0.0)[:, None, :, None]
        single = by_page = torch.zeros_like(mean)
        if self.mixture is not True:
            single = self._solve(mean, row, count * self.page_size, tokens)
        if self.mixture or (self.mixture is None and mixed is not None and bool(mixed.any())):
            weight = (mask * self.page_size).to(mu.dtype).expand_as(mu)
            by_page = self._solve(torch.where(mask, mu, mean), sigma, weight, tokens)
        tau = by_page if self.mixture else single
        if self.mixture is None and mixed is not None:
            tau = torch.where(mixed, by_page, single)
        return threshold_floor(tau, mu, sigma, scored, self.alpha - 1.0, self.safety_margin_z, self.excess)

    def _solve(
        self, centre: torch.Tensor, width: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Bisection: the left end is at or below the root, since the mass of one normal there is at least 1."""
        a = self.alpha - 1.0
        top = a * centre.amax(1, keepdim=True)
        reach = (2.0 * torch.log(tokens.to(centre.dtype) + 1.0)).sqrt() + 8.0
        low, high = top - 1.0, top + a * width.amax(1, keepdim=True) * reach
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            mass = (weight * expected_power(a * centre - middle, a * width, 1.0 / a)).sum(1, keepdim=True)
            low, high = torch.where(mass >= 1.0, middle, low), torch.where(mass >= 1.0, high, middle)
        return 0.5 * (low + high)

    def options(self) -> dict[str, object]:
        return {
            "alpha": self.alpha,
            "safety_margin_z": self.safety_margin_z,
            "excess": self.excess,
            "mixture": self.mixture,
        }


class GaussianFloor(GaussianTau):
    """The threshold that selects pages: :class:`GaussianTau`, raised to what the row's last page tells for certain.

    mu and sigma are RAGGED ``[S, G, 1]``. No threshold of entmax lies below a · max s − 1 over any of the tokens, so
    the result is at least that of the exact scores in the last page, which is always attended. GaussianTau knows
    nothing of that page, and is far too low where slopes are steep.

    Args:
        alpha, safety_margin_z, excess, mixture: as for :class:`GaussianTau`.

    Source: the floor of EntmaxKV (arXiv:2605.21649); the last page's part in it is flowlib's.
    """

    reads_queries: ClassVar[bool] = True

    def __init__(
        self, alpha: float, safety_margin_z: float = 0.0, excess: float = 0.1, mixture: bool | None = None
    ) -> None:
        super().__init__(alpha, safety_margin_z, excess, mixture)

    @property
    def per_head(self) -> bool:
        return True

    def meaning(
        self, mu: torch.Tensor, sigma: torch.Tensor, *, scored: torch.Tensor, rows: Rows | None = None
    ) -> torch.Tensor:
        tau = super().meaning(mu, sigma, scored=scored, rows=rows)
        if rows is None:
            raise FormatError(f"{self.label}: needs the rows whose last pages it reads")
        known = (self.alpha - 1.0) * rows.tail_maximum().to(tau.dtype)[:, None, :, None] - 1.0
        return torch.where(scored.any(1)[:, None, None, None], torch.maximum(tau, known), tau)

    def options(self) -> dict[str, object]:
        return {**super().options(), "tail": True}

    def also_gives(self, other: SegmentOp) -> str:
        if not isinstance(other, GaussianTau) or isinstance(other, GaussianFloor):
            return ""
        same = (other.alpha, other.mixture) == (self.alpha, self.mixture)
        return "estimate" if same and (other.safety_margin_z, other.excess) == (0.0, 0.0) else ""


class TailFloor(SegmentOp):
    """a · max s − 1 over the exact scores in the row's last page, BATCHED ``[B, G, 1]``; a = alpha − 1.

    No threshold of entmax over the row lies below it, so a page whose bound does not exceed it holds no weight, and
    leaving it out changes nothing. -inf for an empty row.

    Args:
        alpha: in (1, 2].
    """

    names: ClassVar[tuple[str, ...]] = ()
    reads_rows: ClassVar[bool] = True
    reads_queries: ClassVar[bool] = True
    kernel: ClassVar[str] = "flowlib.kernels.gaussian:launch_tail_floor"

    def __init__(self, alpha: float) -> None:
        if not 1.0 < alpha <= 2.0:
            raise OptionError(f"{self.label}: alpha is {alpha}, expected a number above 1 and at most 2")
        self.alpha = float(alpha)
        self.group_size = 1

    def bound(self, spec: Spec) -> TailFloor:
        resolved = copy.copy(self)
        resolved.group_size = spec.group_size
        return resolved

    def infer(self) -> Inner:
        return (self.group_size, 1)

    def result_format(self, formats: Sequence[FORMAT], side: Side) -> FORMAT:
        return FORMAT.BATCHED

    def meaning(self, *, scored: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        if rows is None:
            raise FormatError(f"{self.label}: needs the rows whose last pages it reads")
        return (self.alpha - 1.0) * rows.tail_maximum()[:, None, :, None] - 1.0

    def options(self) -> dict[str, object]:
        return {"alpha": self.alpha}


def threshold_floor(
    tau: torch.Tensor,
    mu: torch.Tensor,
    sigma: torch.Tensor,
    scored: torch.Tensor,
    a: float | torch.Tensor,
    safety_margin_z: float,
    excess: float,
) -> torch.Tensor:
    """tau ``[R, 1, r, c]`` lowered by the margin of :class:`GaussianTau`; a row without a scored page gives 0."""
    mask = scored[:, :, None, None]
    mu, sigma = mu.masked_fill(~mask, 0.0), sigma.masked_fill(~mask, 0.0)
    count, _, row = _row_moments(mu, sigma, mask)
    upper = (mu + 1.5 * sigma).sum(1, keepdim=True) / count
    margin = torch.maximum(safety_margin_z * row, excess * (tau / a - upper).clamp(min=0.0))
    return (tau - a * margin).masked_fill(~mask.any(1, keepdim=True), 0.0)


def _row_moments(
    mu: torch.Tensor, sigma: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scored pages of each row (at least 1), mean and deviation of their tokens' scores."""
    count = mask.sum(1, keepdim=True).clamp(min=1).to(mu.dtype)
    mean = mu.sum(1, keepdim=True) / count
    spread = (mu - mean).masked_fill(~mask, 0.0)
    row = ((sigma * sigma + spread * spread).sum(1, keepdim=True) / count).sqrt().clamp(min=MIN_SIGMA)
    return count, mean, row


def expected_power(mean: torch.Tensor, sigma: torch.Tensor, beta: float) -> torch.Tensor:
    """E[max(Y, 0)^beta] of a normal Y; far above 0 by its expansion, which no small sigma can upset."""
    t = mean / sigma.clamp(min=1e-10)
    near = t.clamp(max=FAR)
    scaled = sigma.clamp(min=1e-10) ** beta * truncated_moment(near, beta)
    expansion = mean.clamp(min=0.0) ** beta * (1.0 + 0.5 * beta * (beta - 1.0) / t.clamp(min=FAR) ** 2)
    return torch.where(t > FAR, expansion, scaled)


def truncated_moment(t: torch.Tensor, beta: float) -> torch.Tensor:
    """E[max(t + Z, 0)^beta] of a standard normal Z; closed forms for beta 1, 2 and 3, else a quadrature."""
    density = torch.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
    below = torch.special.erfc(-t / math.sqrt(2.0)) / 2.0
    closed: dict[float, Callable[[], torch.Tensor]] = {
        1.0: lambda: t * below + density,
        2.0: lambda: (t * t + 1.0) * below + t * density,
        3.0: lambda: (t * t + 3.0) * t * below + (t * t + 2.0) * density,
    }
    order = round(beta)
    if abs(beta - order) < 1e-9 and float(order) in closed:
        return closed[float(order)]().clamp(min=0.0)
    return _quadrature(t, beta)


def _quadrature(t: torch.Tensor, beta: float) -> torch.Tensor:
    """∫ x^beta · density(x − t) dx over x > 0, with x = u², which smooths the power at 0."""
    steps = (torch.arange(NODES, dtype=t.dtype, device=t.device) + 0.5) / NODES
    start, end = (t - REACH).clamp(min=0.0).sqrt(), (t.clamp(min=0.0) + REACH).sqrt()
    total = torch.zeros_like(t)
    for step in steps:
        u = start + (end - start) * step
        x = u * u
        total += x**beta * torch.exp(-0.5 * (x - t) ** 2) * 2.0 * u
    return total * (end - start) / NODES / math.sqrt(2.0 * math.pi)
