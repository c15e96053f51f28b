"""alpha-entmax of scores: softmax at alpha 1, sparsemax at 2, and exact zeros for every alpha above 1."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from flowlib.core.entmax import solve
from flowlib.core.errors import FormatError, ShapeError
from flowlib.entmax import checks
from flowlib.entmax.checks import Alpha


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
