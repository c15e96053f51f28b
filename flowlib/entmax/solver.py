"""alpha-entmax of scores: softmax at alpha 1, sparsemax at 2, and exact zeros for every alpha above 1.

With a = alpha − 1 and z = a · s the probabilities are p = max(z − tau, 0)^(1/a), tau the root of Σ p = 1. Rows are
solved relative to their largest score, so that nothing depends on where the scores lie; the unknown of the iteration is
u = log p of that score, in [−log L, 0], in which softmax is the limit a → 0 and no digits are lost on the way there.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from flowlib.core.errors import FormatError, ShapeError
from flowlib.entmax import checks
from flowlib.entmax.checks import Alpha

ITERATIONS = 64
"""Most steps of the iteration; it stops when no row moves, after about 8."""


@overload
def entmax(
    scores: torch.Tensor,
    alpha: Alpha,
    dim: int = -1,
    mask: torch.Tensor | None = None,
    return_tau: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def entmax(
    scores: torch.Tensor, alpha: Alpha, dim: int = -1, mask: torch.Tensor | None = None, *, return_tau: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def entmax(
    scores: torch.Tensor, alpha: Alpha, dim: int = -1, mask: torch.Tensor | None = None, return_tau: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """alpha-entmax along an axis: max((alpha − 1) · s − tau, 0)^(1/(alpha − 1)), with a sum of 1 and exact zeros.

    Exact by sorting at alpha 1.5 and 2, softmax at 1, a bracketed iteration to the last digits otherwise. A score of
    -inf gives exactly 0; a row with NaN or +inf gives NaN. Differentiable in the scores.

    Args:
        scores: of any shape, float16, bfloat16, float32 or float64; computed in float32, or float64 if it is that.
        alpha: from 1 to 2; a number, or a tensor that broadcasts to the shape of `scores` without axis `dim`
            (``[H]`` for scores ``[B, H, L]``).
        dim: the axis that sums to 1.
        mask: bool, broadcasts to `scores`; True keeps. What it hides is not looked at, NaN included. A row without a
            kept score above -inf gives 0.
        return_tau: return the threshold as well.

    Returns:
        Probabilities in the shape and dtype of `scores`; with `return_tau` also tau, without axis `dim`, in the dtype
        computed in and without gradient. tau is in the scaled domain: a token has mass where (alpha − 1) · s > tau. At
        alpha 1 it is the log-sum-exp of the scores; an empty row has -inf.

    Raises:
        OptionError: alpha is out of range. FormatError: a dtype is wrong. ShapeError: `dim`, `mask` or alpha does not
        fit.

    Source: Peters, Niculae, Martins, Sparse Sequence-to-Sequence Models (arXiv:1905.05702).
    """
    checks.floating("entmax", "scores", scores)
    if scores.dim() == 0 or not -scores.dim() <= dim < scores.dim():
        raise ShapeError(f"entmax: dim is {dim}, expected an axis of scores {list(scores.shape)}")
    x = scores.to(checks.computed_in(scores))
    if mask is not None:
        x = x.masked_fill(~_checked_mask(mask, scores), float("-inf"))
    x = x.movedim(dim, -1)
    rows = x.shape[:-1]
    alpha_rows = checks.alphas("entmax", alpha, rows, x.device)
    p, tau = _Entmax.apply(x.reshape(rows.numel(), x.shape[-1]), alpha_rows.reshape(-1))  # type: ignore[misc]
    p = p.view(x.shape).movedim(-1, dim).to(scores.dtype)
    return (p, tau.view(rows)) if return_tau else p


def _checked_mask(mask: object, scores: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise FormatError(f"entmax: mask is {got}, expected a bool tensor, True where a score is kept")
    return checks.broadcast("entmax", "mask", mask, scores.shape)


class _Entmax(torch.autograd.Function):
    """Rows ``[R, L]`` and alpha float64 ``[R]`` to p ``[R, L]`` and tau ``[R]``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return solve(s, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        p, tau = output
        ctx.mark_non_differentiable(tau)
        ctx.save_for_backward(p, inputs[1])

    @staticmethod
    def backward(ctx: Any, dp: torch.Tensor, dtau: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        p, alpha = ctx.saved_tensors
        u = torch.where(p > 0, p ** (2.0 - alpha[:, None]).to(p.dtype), 0.0)
        weighted = u * dp
        mean = weighted.sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        return weighted - u * mean, None


def solve(s: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p ``[R, L]`` and tau ``[R]`` of rows s ``[R, L]`` with alpha float64 ``[R]``; see :func:`entmax`."""
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
