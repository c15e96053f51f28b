"""The threshold of alpha-entmax, in torch: exactly, or from an estimate. What attention and the functional API share.

With a = alpha − 1 and z = a · s the probabilities are p = max(z − tau, 0)^(1/a), tau the root of Σ p = 1. Rows are
solved relative to their largest score, so that nothing depends on where the scores lie; the unknown of the iteration is
u = log p of that score, in [−log L, 0], in which softmax is the limit a → 0 and no digits are lost on the way there.
"""

from __future__ import annotations

import torch

ITERATIONS = 64
"""Most steps of the iteration; it stops when no row moves, after about 8."""


def solve(s: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p ``[R, L]`` and tau ``[R]`` of rows s ``[R, L]``, alpha float64 ``[R]``; see :func:`flowlib.entmax.entmax`."""
    hidden = s == float("-inf")
    if s.numel() == 0:
        return torch.zeros_like(s), s.new_full(s.shape[:1], float("-inf"))
    empty = hidden.all(-1)
    top = s.amax(-1).masked_fill(empty, 0.0)
    p, peak = torch.zeros_like(s), torch.zeros_like(top)
    a = (alpha - 1.0).to(s.dtype)
    exact = {0.0: _softmax, 0.5: _root, 1.0: _sparsemax}
    kinds = [(a == value, solver) for value, solver in exact.items()]
    other = ~torch.stack([rows for rows, _ in kinds]).any(0)
    for rows, solver in [*kinds, (other, _iterate)]:
        chosen = (rows & ~empty).nonzero().squeeze(-1)
        if len(chosen):
            p[chosen], peak[chosen] = solver(s[chosen] - top[chosen, None], a[chosen, None])
    p = torch.where(hidden, 0.0, p / p.sum(-1, keepdim=True))
    tau = torch.where(a == 0.0, top - peak, a * top - peak)
    return p, tau.masked_fill(empty, float("-inf"))


def _softmax(d: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp of d = s − max, and the log of its largest probability."""
    p = d.exp()
    return p, -p.sum(-1).log()


def _sparsemax(d: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha 2: max(d − tau, 0) and −tau; the support is the longest prefix with 1 + j · d_j > d_1 + .. + d_j."""
    d = d.clamp(min=-2.0)  # below max − 1 nothing has mass
    ordered, j = _sorted(d)
    sums = ordered.cumsum(-1)
    size = (1.0 + j * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    tau = (sums.gather(-1, size - 1) - 1.0) / size
    return _settled(d - tau, tau, 1)


def _root(d: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha 1.5: max(d/2 − tau, 0)² and −tau, from mean and squared deviations of the largest j.

    The deviations are added up one by one (Welford), all positive: Σ z² − (Σ z)²/j would cancel over long rows.
    """
    z = 0.5 * d.clamp(min=-4.0)
    ordered, j = _sorted(z)
    mean = ordered.cumsum(-1) / j
    away = ordered[:, 1:] - mean[:, :-1]
    spread = (away * away * (j[1:] - 1.0) / j[1:]).cumsum(-1)
    spread = torch.nn.functional.pad(spread, (1, 0))
    taus = mean - ((1.0 - spread).clamp(min=0.0) / j).sqrt()
    size = (taus <= ordered).sum(-1, keepdim=True).clamp(min=1)
    tau = taus.gather(-1, size - 1)
    return _settled(z - tau, tau, 2)


def _settled(x: torch.Tensor, tau: torch.Tensor, beta: int) -> tuple[torch.Tensor, torch.Tensor]:
    """max(x, 0)^beta and −tau after one more Newton step.

    The step is added to x = z − tau: over many tokens of little mass it is smaller than tau can tell.
    """
    positive = x.clamp(min=0.0)
    slope = (x > 0).sum(-1, keepdim=True) if beta == 1 else 2.0 * positive.sum(-1, keepdim=True)
    step = (1.0 - (positive**beta).sum(-1, keepdim=True)) / slope
    return (x + step).clamp(min=0.0) ** beta, (step - tau).squeeze(-1)


def _sorted(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in descending order, and the numbers 1 to L."""
    return z.sort(-1, descending=True).values, torch.arange(1, z.shape[-1] + 1, device=z.device).to(z.dtype)


def _iterate(d: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Any alpha: Newton on log Σ p over u, inside a bracket; every fourth step halves it.

    Σ p grows with u, and is at most 1 at u = −log L, at least 1 at u = 0.
    """
    low = torch.full_like(a, -float(torch.tensor(d.shape[-1], dtype=torch.float64).log()))
    high = torch.zeros_like(low)
    u, eps = 0.5 * (low + high), torch.finfo(d.dtype).eps
    for step in range(ITERATIONS):
        logs = _log_x(d, a, u)
        mass = (logs / a).exp().sum(-1, keepdim=True)
        growth = (logs * (1.0 / a - 1.0) + a * u).exp().sum(-1, keepdim=True)
        low, high = torch.where(mass <= 1.0, u, low), torch.where(mass >= 1.0, u, high)
        following = u - mass.log() * mass / growth
        inside = (following >= low) & (following <= high)
        halve = ~inside if step % 4 < 3 else ~inside | ((u - following).abs() > 1e-2)
        following = torch.where(halve, 0.5 * (low + high), following)
        moved = (following - u).abs() > 4.0 * eps * (1.0 + u.abs())
        u = following
        if not bool(moved.any()):
            break
    logs = _log_x(d, a, u)
    mass, slope = ((logs * power).exp().sum(-1, keepdim=True) for power in (1.0 / a, 1.0 / a - 1.0))
    step = a * (1.0 - mass) / slope  # as in _settled
    return (_log_x(d, a, u, step) / a).exp(), ((a * u).exp() + step).squeeze(-1)


def _log_x(d: torch.Tensor, a: torch.Tensor, u: torch.Tensor, step: torch.Tensor | float = 0.0) -> torch.Tensor:
    """log of x = exp(a·u) + a·d + step, -inf where x <= 0; near 1 by log1p, to keep the digits of a small alpha − 1."""
    above = (a * u).expm1() + a * d + step
    x = ((a * u).exp() + a * d + step).clamp(min=0.0)
    return torch.where(above > -0.5, above.clamp(min=-0.5).log1p(), x.log())


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


def from_estimate(
    s: torch.Tensor, a: torch.Tensor, estimate: torch.Tensor, mode: str, niter: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, tau and the mass before any division, of scores ``[B, H_q, T]``, a ``[H_q]`` and estimates ``[B, H_q]``.

    Args:
        s: -inf where hidden.
        a: alpha − 1, in the dtype of `s`.
        estimate: of tau.
        mode: ``"corrected"`` or ``"fixed"``.
        niter: steps of ``"corrected"``, which divides p by the mass.
    """
    if s.shape[2] == 0:
        return s, torch.full_like(estimate, float("-inf")), torch.zeros_like(estimate)
    top = s.amax(-1, keepdim=True)
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    z, a = a[:, None] * (s - top), a[:, None].expand(*s.shape[:2], 1)
    tau = estimate[..., None] - a * top
    if mode == "corrected":
        tau = correct_tau(z.flatten(0, 1), tau.flatten(0, 1), a.flatten(0, 1), niter).view(tau.shape)
    p = power(z - tau, 1.0 / a)
    mass = p.sum(-1, keepdim=True)
    if mode == "corrected":
        p = torch.where(mass > 0, p / mass, 0.0)
    return p, (tau + a * top).masked_fill(empty, float("-inf")).squeeze(-1), mass.squeeze(-1)
