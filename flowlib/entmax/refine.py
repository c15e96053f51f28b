"""Correcting an estimated threshold of entmax by a few bracketed steps."""

from __future__ import annotations

import torch


def correct_tau(z: torch.Tensor, tau: torch.Tensor, a: torch.Tensor, niter: int) -> torch.Tensor:
    """The threshold of rows after `niter` steps from an estimate, never outside the bracket that holds it.

    A step tries Halley's formula, then Newton's, from the second step on the secant, then the middle of the bracket,
    and takes the first that is finite and inside. For alpha above 1.5 Newton comes first: the second derivative has
    no bound there. A row whose mass is 1 to within rounding stays.

    Args:
        z: ``[R, L]``, a · (s − max s); -inf where hidden, and 0 somewhere unless all is hidden.
        tau: ``[R, 1]``, the estimate, relative to a · max s; taken into [-1, -n^(-a)], n the number not hidden.
        a: ``[R, 1]``, alpha − 1, above 0.
        niter: steps.

    Returns:
        ``[R, 1]``.
    """
    tolerance = 8.0 * torch.finfo(z.dtype).eps
    shown = (z > float("-inf")).sum(-1, keepdim=True).clamp(min=1).to(z.dtype)
    low, high = torch.full_like(tau, -1.0), -(shown ** (-a))
    tau = torch.maximum(torch.minimum(tau, high), low)
    previous, f_previous = tau, torch.full_like(tau, float("nan"))
    for _ in range(niter):
        f, slope, bend = _derivatives(z - tau, a)
        low, high = torch.where(f > 0, tau, low), torch.where(f < 0, tau, high)
        middle = 0.5 * (low + high)
        secant = tau - f * (tau - previous) / (f - f_previous)
        newton = tau - f / slope
        halley = torch.where(a <= 0.5, tau - 2.0 * f * slope / (2.0 * slope * slope - f * bend), newton)
        following = middle
        for candidate in (secant, newton, halley):
            good = (candidate > low - tolerance) & (candidate < high + tolerance)
            following = torch.where(good, torch.maximum(torch.minimum(candidate, high), low), following)
        previous, f_previous = tau, f
        tau = torch.where(f.abs() <= tolerance, tau, following)
    return tau


def power(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^exponent, 0 where x <= 0 for every exponent."""
    return torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny) ** exponent, 0.0)


def _derivatives(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f = Σ x^beta − 1 over the positive x = z − tau, its first and its second derivative by tau."""
    beta = 1.0 / a
    f = power(x, beta).sum(-1, keepdim=True) - 1.0
    slope = -beta * power(x, beta - 1.0).sum(-1, keepdim=True)
    return f, slope, beta * (beta - 1.0) * power(x, beta - 2.0).sum(-1, keepdim=True)
