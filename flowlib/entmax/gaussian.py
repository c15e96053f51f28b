"""Selection by the distribution of scores: pages whose likely maximum exceeds the estimated threshold of entmax."""

from __future__ import annotations

from statistics import NormalDist

import torch

from flowlib.core.errors import FormatError, OptionError
from flowlib.entmax import checks
from flowlib.entmax.checks import Alpha
from flowlib.entmax.pages import scorable
from flowlib.entmax.selection import Selection, certified_skip, pack
from flowlib.ops.gaussian_tau import GaussianTau, threshold_floor

DEFAULT_QUANTILE = 0.995
DEFAULT_EXCESS = 0.1


def gaussian_tau(
    mu: torch.Tensor,
    sigma: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    alpha: Alpha,
    mixture: bool | torch.Tensor = False,
) -> torch.Tensor:
    """The threshold that entmax would have over the pages before the tail, were their scores normal.

    Solves Σ_p c_p · E[max(a · S_p − tau, 0)^(1/a)] = 1 with a = alpha − 1: one normal with the row's mean and
    deviation for all its n tokens, or a normal per page (`mixture`), which heads with an ALiBi slope need.

    Args:
        mu, sigma: ``[B, H_q, P]``, see :func:`page_moments`; what stands from the tail on is not looked at.
        seq_lens: int32 ``[B]``.
        page_size: tokens of a page, a power of two.
        alpha: above 1, at most 2; a number or a tensor ``[H_q]``.
        mixture: for all heads, or bool ``[H_q]``: ``alibi_slopes != 0``.

    Returns:
        tau ``[B, H_q]`` in the scaled domain, float32 (float64 if an input is); 0 for a row of one page or none.

    Raises:
        OptionError, FormatError, ShapeError, BatchError: an argument is out of range or does not fit.

    Source: EntmaxKV (arXiv:2605.21649), Gaussian-aware selection. Solved by :class:`flowlib.ops.GaussianTau`.
    """
    mu, sigma, scored = _moments("gaussian_tau", mu, sigma, seq_lens, page_size)
    heads = mu.shape[2]
    alpha_heads = checks.alphas("gaussian_tau", alpha, [heads], mu.device, above_one=True)
    mixed = _per_head("gaussian_tau", mixture, heads, mu.device)
    tau = mu.new_zeros(mu.shape[0], heads)
    if mu.shape[1] == 0:
        return tau
    for value in alpha_heads.unique().tolist():
        for kind in (False, True):
            chosen = ((alpha_heads == value) & (mixed == kind)).nonzero().squeeze(-1)
            if len(chosen):
                op = GaussianTau(value, excess=0.0, mixture=kind)
                op.page_size = page_size
                tau[:, chosen] = op.meaning(mu[:, :, chosen], sigma[:, :, chosen], scored=scored)[:, 0, :, 0]
    return tau


def gaussian_select(
    mu: torch.Tensor,
    sigma: torch.Tensor,
    tau: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    alpha: Alpha,
    safety_margin_z: float = 0.0,
    max_quantile: float = DEFAULT_QUANTILE,
    excess: float = DEFAULT_EXCESS,
    known: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
) -> Selection:
    """The tail and every page before it whose likely largest score exceeds the threshold, lowered by a margin.

    A page is kept where a · (mu + z_page · sigma) > floor (strict), z_page the quantile `max_quantile` of the largest
    of page_size standard normals; floor = tau − a · max(safety_margin_z · sigma_row, excess · max(tau/a − upper, 0)),
    upper the mean of mu + 1.5 · sigma.

    Args:
        mu, sigma: ``[B, H_q, P]``, see :func:`page_moments`.
        tau: ``[B, H_q]``, see :func:`gaussian_tau`.
        seq_lens: int32 ``[B]``.
        page_size: tokens of a page, a power of two.
        alpha: above 1, at most 2; a number or a tensor ``[H_q]``.
        safety_margin_z: row deviations subtracted.
        max_quantile: in (0, 1).
        excess: share of the height above the typical page maximum that is subtracted.
        known: ``[B, H_q]``, the largest exactly known score (of the tail, say): the floor is at least a · known − 1,
            which no threshold lies below. `tau` knows nothing of the tail, and is far too low where slopes are steep.
        bounds: ``[B, H_q, P]``, see :func:`page_bounds`: with `known`, pages that cannot hold support are left out.

    Returns:
        a selection of width P.

    Raises:
        OptionError, FormatError, ShapeError, BatchError: an argument is out of range or does not fit.

    Source: EntmaxKV (arXiv:2605.21649), Gaussian-aware selection; `known` and `bounds` are flowlib's.
    """
    mu, sigma, scored = _moments("gaussian_select", mu, sigma, seq_lens, page_size)
    rows, width, heads, _ = mu.shape
    a = checks.alphas("gaussian_select", alpha, [heads], mu.device, above_one=True).to(mu.dtype) - 1.0
    z_page = page_quantile("gaussian_select", max_quantile, page_size)
    margins = check_margins("gaussian_select", safety_margin_z, excess)
    _checked("gaussian_select", "tau", tau, (rows, heads))
    floor = threshold_floor(tau.to(mu.dtype)[:, None, :, None], mu, sigma, scored, a[:, None], *margins)
    if known is not None:
        _checked("gaussian_select", "known", known, (rows, heads))
        floor = torch.maximum(floor, (a * known.to(mu.dtype) - 1.0)[:, None, :, None])
    keep = (a[:, None] * (mu + z_page * sigma) > floor).squeeze(-1).transpose(1, 2)
    if bounds is not None:
        if known is None:
            raise OptionError("gaussian_select: bounds is given without known, the score they are held against")
        _checked("gaussian_select", "bounds", bounds, (rows, heads, width))
        keep = keep & ~certified_skip(bounds, known, alpha)
    return pack(keep, seq_lens, page_size, width)


def page_quantile(what: str, max_quantile: float, page_size: int) -> float:
    """Standard deviations below which the largest of `page_size` normals lies with probability `max_quantile`.

    Raises:
        OptionError: `max_quantile` is not in (0, 1).
    """
    q = checks.number(what, "max_quantile", max_quantile, "a number above 0 and below 1")
    if not 0.0 < q < 1.0:
        raise OptionError(f"{what}: max_quantile is {q}, expected a number above 0 and below 1")
    return NormalDist().inv_cdf(q ** (1.0 / page_size))


def check_margins(what: str, safety_margin_z: float, excess: float) -> tuple[float, float]:
    """Both margins as floats of at least 0. Raises OptionError."""
    margin = checks.number(what, "safety_margin_z", safety_margin_z, "a number of at least 0", 0.0)
    return margin, checks.number(what, "excess", excess, "a number of at least 0", 0.0)


def _moments(
    what: str, mu: torch.Tensor, sigma: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mu and sigma as ``[B, P, H_q, 1]``, which is how segment ops see pages, and the scored pages ``[B, P]``."""
    checks.floating(what, "mu", mu, "B, H_q, P")
    checks.floating(what, "sigma", sigma)
    checks.same_shape(what, "sigma", sigma, mu.shape, "as mu")
    page_size = checks.power_of_two(what, "page_size", page_size)
    checks.lengths(what, seq_lens, mu.shape[0], mu.shape[2] * page_size)
    dtype = checks.computed_in(mu, sigma)
    wide = [x.to(dtype).transpose(1, 2)[..., None] for x in (mu, sigma)]
    return wide[0], wide[1], scorable(seq_lens, page_size, mu.shape[2])


def _per_head(what: str, mixture: object, heads: int, device: torch.device) -> torch.Tensor:
    if isinstance(mixture, bool):
        return torch.full((heads,), mixture, device=device)
    if not isinstance(mixture, torch.Tensor) or mixture.dtype is not torch.bool:
        got = mixture.dtype if isinstance(mixture, torch.Tensor) else type(mixture).__name__
        raise FormatError(f"{what}: mixture is {got}, expected a bool, or a bool tensor [H_q]")
    checks.same_shape(what, "mixture", mixture, (heads,), "[H_q]")
    return mixture


def _checked(what: str, name: str, value: object, shape: tuple[int, ...]) -> None:
    checks.same_shape(what, name, checks.floating(what, name, value), shape, "as mu")
