"""How far a result may be from float64: derived from the computation, never typed.

For a result kept in dtype T and computed in dtype C (float32 in kernels, float64 in reference mode)::

    tolerance = 2 · max|f_C(x) - f_64(x)|  +  eps(T) · |f_64(x)|  +  γ_n(C) · (Σ_i |x_i · ∂f/∂x_i| + |f_64(x)|)

1. Twice the error of a straightforward evaluation: the same formula in torch, in C, rounded to T. The largest error of
   the tensor counts, so that an element which came out exact by luck sets no bar of zero.
2. One rounding step of T: an exact value still has to be stored.
3. One step of accumulation. A sum of n products in any order is the exact sum of inputs perturbed by at most
   γ_n = n·u / (1 - n·u) relative, u the unit roundoff of C (Higham, Accuracy and Stability of Numerical Algorithms,
   section 3.1); to first order such a perturbation moves f by γ_n · Σ|x_i · ∂f/∂x_i|. It matters where T is as fine as
   C, and the straightforward evaluation happened to add in a luckier order (pairwise) than the kernel (one by one).
   |f| itself is added for the roundings of elementary functions and normalisers, which scale with the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

Function = Callable[..., torch.Tensor]
_GRADIENT_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Judgement:
    """A result held against its tolerance, at the element where error / tolerance is largest.

    Attributes:
        error: |result - truth| there; inf where a NaN or an infinity is on one side only.
        tolerance: what was allowed there.
        where: its index, ``()`` for an empty tensor.
        ok: whether every element is within its tolerance.
        size: the largest finite |truth|.
    """

    error: float
    tolerance: float
    where: tuple[int, ...] = ()
    ok: bool = True
    size: float = 0.0

    @property
    def ratio(self) -> float:
        """error / tolerance; 0 for an exact result."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0 else float("inf")

    def __str__(self) -> str:
        verdict = "within" if self.ok else "beyond"
        return f"error {self.error:.3g} {verdict} tolerance {self.tolerance:.3g} at {list(self.where)}"


@dataclass(frozen=True)
class Expected:
    """float64 `truth` and the `tolerance` of each of its elements."""

    truth: torch.Tensor
    tolerance: torch.Tensor

    def judge(self, result: torch.Tensor) -> Judgement:
        """Holds a result of the same shape against it."""
        return judge(result, self.truth, self.tolerance)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest: half of eps."""
    return torch.finfo(dtype).eps / 2


def gamma(n: int, dtype: torch.dtype = torch.float32) -> float:
    """γ_n = n·u / (1 - n·u): relative error bound of n roundings in a row."""
    product = n * unit_roundoff(dtype)
    return product / (1 - product)


def rounding_step(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of `dtype`, or more, at each element of the float64 `truth`; never 0."""
    limits = torch.finfo(dtype)
    size = torch.where(torch.isfinite(truth), truth.abs(), 0.0)
    return limits.eps * size.clamp(min=limits.tiny)


def upcast(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in float64 on the CPU."""
    return tuple(x.detach().to("cpu", torch.float64) for x in values)


def derive(
    truth: torch.Tensor,
    low: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    step: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Tolerance of each element.

    Args:
        truth: float64 result.
        low: straightforward low-precision evaluation of the same shape, on the CPU.
        dtype: what results are stored in.
        step: accumulation step, from :func:`accumulation_step`.
    """
    tolerance = rounding_step(truth, dtype) + step
    if low is not None and truth.numel():
        difference = (low.to(torch.float64) - truth).abs()
        known = torch.isfinite(difference)
        tolerance = tolerance + 2 * torch.where(known, difference, 0.0).max()
    return tolerance


def judge(result: torch.Tensor, truth: torch.Tensor, tolerance: torch.Tensor) -> Judgement:
    """Holds `result` (any dtype and device) against float64 `truth`; infinities of one sign and NaN pairs are equal."""
    if tuple(result.shape) != tuple(truth.shape):
        return Judgement(float("inf"), 0.0, (), False)
    if truth.numel() == 0:
        return Judgement(0.0, 0.0)
    got = upcast(result)[0]
    same = (got == truth) | (got.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (got - truth).abs())
    difference = torch.where(difference.isnan(), float("inf"), difference)
    ratio = torch.where(difference == 0.0, 0.0, difference / tolerance)
    worst = int(ratio.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
    return Judgement(
        float(difference.flatten()[worst]),
        float(tolerance.expand_as(ratio).flatten()[worst]),
        where,
        bool((difference <= tolerance).all()),
        float(torch.where(torch.isfinite(truth), truth.abs(), 0.0).max()),
    )


def condition(function: Function, inputs: Sequence[torch.Tensor], *, independent: bool = False) -> torch.Tensor:
    """Σ_i |x_i · ∂f/∂x_i| of each output element, in float64.

    Args:
        function: differentiable almost everywhere.
        inputs: its arguments.
        independent: axis 0 of the output and of every input counts entries that do not see each other; the gradients
            of all entries are then taken at once.
    """
    leaves = [x.detach().clone().requires_grad_() for x in upcast(*inputs)]
    with torch.enable_grad():
        out = function(*leaves)
    if out.numel() == 0 or not out.requires_grad:
        return torch.zeros(out.shape, dtype=torch.float64)
    entries = len(out) if independent else 1
    targets = out.reshape(entries, -1)
    moved = [_moved(targets, leaves, chosen, entries) for chosen in _chunks(targets.shape[1], leaves)]
    return torch.cat(moved, 1).view(out.shape)


def _chunks(count: int, leaves: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Indices of outputs whose gradients together hold at most _GRADIENT_ELEMENTS numbers."""
    size = max(1, _GRADIENT_ELEMENTS // max(1, sum(x.numel() for x in leaves)))
    return torch.arange(count).split(size)


def _moved(targets: torch.Tensor, leaves: list[torch.Tensor], chosen: torch.Tensor, entries: int) -> torch.Tensor:
    """Σ|x · ∂f/∂x| ``[entries, len(chosen)]`` of the `chosen` columns of `targets` ``[entries, m]``."""
    directions = torch.zeros(len(chosen), *targets.shape, dtype=torch.float64)
    directions[torch.arange(len(chosen)), :, chosen] = 1.0
    gradients = torch.autograd.grad(
        targets, leaves, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    total = torch.zeros(entries, len(chosen), dtype=torch.float64)
    for x, g in zip(leaves, gradients, strict=True):
        if g is not None:
            change = (x.detach() * g).abs().nan_to_num(0.0, 0.0, 0.0)
            total += change.reshape(len(chosen), entries, -1).sum(2).T
    return total


def accumulation_step(
    function: Function,
    inputs: Sequence[torch.Tensor],
    terms: int,
    dtype: torch.dtype = torch.float32,
    *,
    independent: bool = False,
) -> torch.Tensor:
    """γ_terms(dtype) · (Σ|x_i · ∂f/∂x_i| + |f|) of each output element: term 3 of the tolerance.

    Args:
        function, inputs, independent: as for :func:`condition`.
        terms: roundings in a row: the numbers added up, plus a few for elementary functions.
        dtype: what is accumulated in.
    """
    truth = function(*upcast(*inputs)).abs()
    finite = torch.where(torch.isfinite(truth), truth, 0.0)
    return gamma(terms, dtype) * (condition(function, inputs, independent=independent) + finite)


def expect(
    function: Function,
    inputs: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype,
    compute: torch.dtype = torch.float32,
    terms: int | None = None,
    independent: bool = False,
) -> Expected:
    """float64 truth and derived tolerance of a formula.

    Args:
        function: the formula in torch, right in any floating dtype.
        inputs: in the target dtype, so that float64 starts from the same numbers.
        dtype: what results are stored in.
        compute: what they are computed in.
        terms: roundings in a row; ``None`` leaves term 3 out (enough where `dtype` is coarser than `compute`).
        independent: as for :func:`condition`.
    """
    truth = function(*upcast(*inputs))
    low = function(*(x.detach().cpu().to(compute) for x in inputs)).to(dtype)
    step: torch.Tensor | float = 0.0
    if terms is not None:
        step = accumulation_step(function, inputs, terms, compute, independent=independent)
    return Expected(truth, derive(truth, low, dtype=dtype, step=step))
