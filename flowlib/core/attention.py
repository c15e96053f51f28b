"""Normalisers: what turns the scores of attention into weights."""

from __future__ import annotations

from dataclasses import dataclass

from flowlib.core.errors import FlowDefinitionError, OptionError

TAU_MODES = ("exact", "corrected", "fixed")


@dataclass(frozen=True)
class Softmax:
    """exp(s) / Σ exp(s): every attended token has weight. What a flow attends with unless it says otherwise."""

    def __str__(self) -> str:
        return "softmax"


@dataclass(frozen=True)
class Entmax:
    """max((alpha − 1) · s − tau, 0)^(1/(alpha − 1)), tau such that the weights sum to 1: most tokens have none.

    A flow says ``attention = Entmax(alpha=1.5)``, as an attribute of its class or in ``__init__``. Its steps give
    ``tau`` in place of ``lse``.

    Args:
        alpha: above 1 (which is softmax) and at most 2 (sparsemax).
        tau_mode: ``"exact"`` solves for tau. ``"corrected"`` takes `niter` steps from the estimate that the flow gives
            with :class:`flowlib.ops.TauEstimate`, and divides by the mass; ``"fixed"`` takes the estimate as it is and
            does not divide: a diagnostic. Over lists of more than 4,096 tokens the kernels leave tokens that cannot
            have weight out of a step, even where the estimate would give them some: too low an estimate is corrected
            by other steps than in the reference, towards the same tau.
        niter: steps of ``"corrected"``.

    Raises:
        OptionError: an option is out of range.

    Source: Peters, Niculae, Martins (arXiv:1905.05702); decoding: EntmaxKV (arXiv:2605.21649).
    """

    alpha: float = 1.5
    tau_mode: str = "exact"
    niter: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 1.0 < self.alpha <= 2.0:
            raise OptionError(
                f"Entmax: alpha is {self.alpha!r}, expected a number above 1 and at most 2; Softmax() is alpha 1"
            )
        mode = self.tau_mode.lower() if isinstance(self.tau_mode, str) else self.tau_mode
        if mode not in TAU_MODES:
            raise OptionError(
                f"Entmax: tau_mode is {self.tau_mode!r}, expected one of {', '.join(map(repr, TAU_MODES))}"
            )
        if isinstance(self.niter, bool) or not isinstance(self.niter, int) or self.niter < 0:
            raise OptionError(f"Entmax: niter is {self.niter!r}, expected an integer of at least 0")
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "tau_mode", mode)

    def __str__(self) -> str:
        steps = f", {self.niter} steps" if self.tau_mode == "corrected" else ""
        return f"entmax, alpha {self.alpha:g}, tau {self.tau_mode}{steps}"


Normaliser = Softmax | Entmax


def check_normaliser(owner: str, value: object) -> Normaliser:
    """`value` if it is a normaliser. Raises FlowDefinitionError that names the `owner` of the attribute."""
    if not isinstance(value, (Softmax, Entmax)):
        got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise FlowDefinitionError(
            f"{owner}: attention is {got}, expected flowlib.attention.Softmax() or flowlib.attention.Entmax(alpha)"
        )
    return value
