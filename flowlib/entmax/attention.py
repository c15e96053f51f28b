"""Exact entmax attention of one token over a paged KV cache: over all pages, or over those selected per query head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowlib.core.attention import TAU_MODES
from flowlib.core.entmax import from_estimate
from flowlib.core.errors import BatchError, OptionError, ShapeError
from flowlib.entmax import checks
from flowlib.entmax.checks import Alpha
from flowlib.entmax.selection import check_selection
from flowlib.entmax.solver import entmax

DEFAULT_CORRECTIONS = 3


class Attended(NamedTuple):
    """What one step of attention gives.

    Attributes:
        o: ``[B, H_q, D]``.
        tau: ``[B, H_q]``, the threshold in the scaled domain; at alpha 1 the log-sum-exp; -inf for an empty row.
        mass: ``[B, H_q]``, the sum of the probabilities as the threshold gives them; 0 for an empty row.
    """

    o: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


class Tokens(NamedTuple):
    """The selected tokens of each query head, in the order of its pages; T = pages · page_size.

    Attributes:
        scores: ``[B, H_q, T]``, -inf for a token that is not attended.
        physical: int64 ``[B, H_q, T / page_size]``, physical pages; 0 where no token is attended.
    """

    scores: torch.Tensor
    physical: torch.Tensor


def entmax_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    alpha: Alpha = 1.5,
    pages: torch.Tensor | None = None,
    sel_lens: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    *,
    tau_mode: str = "exact",
    tau_hat: torch.Tensor | None = None,
    niter: int = DEFAULT_CORRECTIONS,
    dtype: torch.dtype | None = None,
) -> Attended:
    """alpha-entmax attention of each row's last token over its cache, or over a selection of its pages.

    Scores are s = q·k / sqrt(D) + slope · (position − query position), at logical positions, the query at
    ``seq_len − 1``. Slots at or past ``seq_len`` are never looked at, and V only where a token has mass.

    Args:
        q: ``[B, H_q, D]``; query head h reads kv head ``h // (H_q / H_kv)``.
        kv: ``[2, num_blocks, page_size, H_kv, D]``, K and V.
        block_table: int32 ``[B, P]``, logical to physical page; entries past a row's pages are not read.
        seq_lens: int32 ``[B]``; an empty row gives 0.
        alpha: from 1 to 2; a number or a tensor ``[H_q]``.
        pages: int32 ``[B, H_q, W]``, logical pages of each query head, each at most once; -1 is none. ``None`` means
            all.
        sel_lens: int32 ``[B, H_q]``: only the first so many slots of the listed pages count; ``None`` means all.
        alibi_slopes: ``[H_q]``; ``None`` means zeros.
        tau_mode: ``"exact"`` solves for the threshold; ``"corrected"`` takes `niter` steps from `tau_hat`, and divides
            by the mass; ``"fixed"`` takes `tau_hat` as it is, and does not: a diagnostic. In any case of letters.
        tau_hat: ``[B, H_q]``, an estimate, see :func:`gaussian_tau`; needed unless exact.
        niter: steps of ``"corrected"``.
        dtype: float32 or float64 to compute and answer in; ``None`` computes in float32 (float64 if an input is) and
            answers in the dtype of q.

    Raises:
        OptionError: an option is out of range, or alpha is 1 and the mode is not exact. FormatError, ShapeError: a
            tensor has the wrong dtype or shape. BatchError: a length or a page does not fit the cache.

    Source: EntmaxKV (arXiv:2605.21649), decode over a selection.
    """
    mode = check_tau_mode("entmax_attention", tau_mode)
    rows, heads, _ = _check("entmax_attention", q, kv, block_table, seq_lens).shape
    above_one = mode != "exact"
    alpha_heads = checks.alphas("entmax_attention", alpha, [heads], q.device, above_one=above_one)
    steps = checks.count("entmax_attention", "niter", niter, 0)
    if pages is not None:
        check_selection("entmax_attention", pages, rows, heads, sel_lens)
    elif sel_lens is not None:
        raise OptionError("entmax_attention: sel_lens is given without pages, whose tokens it counts")
    wide = checks.computed_in(q, kv) if dtype is None else _check_dtype(dtype)
    slopes = checks.slopes_of("entmax_attention", alibi_slopes, heads, q.new_empty(0, dtype=wide))
    tokens = selected_scores(q.to(wide), kv[0], block_table, seq_lens, pages, sel_lens, slopes)
    if mode == "exact":
        p, tau = entmax(tokens.scores, alpha_heads, return_tau=True)
        mass = p.sum(-1)
    else:
        estimate = _check_estimate("entmax_attention", mode, tau_hat, (rows, heads)).to(wide)
        p, tau, mass = from_estimate(tokens.scores, alpha_heads.to(wide) - 1.0, estimate, mode, steps)
    o = weighted_values(p, tokens.physical, kv[1])
    return Attended(o if dtype is not None else o.to(q.dtype), tau, mass)


def check_tau_mode(what: str, tau_mode: object) -> str:
    """`tau_mode` in small letters. Raises OptionError for an unknown one."""
    mode = tau_mode.lower() if isinstance(tau_mode, str) else tau_mode
    if mode not in TAU_MODES:
        raise OptionError(f"{what}: tau_mode is {tau_mode!r}, expected one of {', '.join(map(repr, TAU_MODES))}")
    return str(mode)


def _check(
    what: str, q: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    checks.floating(what, "q", q, "B, H_q, D")
    checks.floating(what, "kv", kv, "2, num_blocks, page_size, H_kv, D")
    if kv.shape[0] != 2:
        raise ShapeError(f"{what}: axis 0 of kv is {kv.shape[0]}, expected 2, K and V")
    page_size = checks.power_of_two(what, "page_size (axis 2 of kv)", kv.shape[2])
    if kv.shape[4] != q.shape[2]:
        raise ShapeError(f"{what}: axis D of kv is {kv.shape[4]}, expected {q.shape[2]} as in q")
    checks.group_of(what, q.shape[1], kv.shape[3])
    checks.int32(what, "block_table", block_table, [q.shape[0], None])
    checks.lengths(what, seq_lens, q.shape[0], block_table.shape[1] * page_size)
    return q


def _check_dtype(dtype: object) -> torch.dtype:
    if dtype is not torch.float32 and dtype is not torch.float64:
        raise OptionError(f"entmax_attention: dtype is {dtype}, expected torch.float32, torch.float64 or None")
    return dtype  # type: ignore[return-value]


def _check_estimate(what: str, mode: str, tau_hat: object, shape: tuple[int, int]) -> torch.Tensor:
    if tau_hat is None:
        raise OptionError(f"{what}: tau_hat is None, expected a tensor [B, H_q] where tau_mode is {mode!r}")
    estimate = checks.floating(what, "tau_hat", tau_hat)
    checks.same_shape(what, "tau_hat", estimate, shape, "[B, H_q]")
    return estimate


def selected_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: torch.Tensor | None,
    sel_lens: torch.Tensor | None,
    slopes: torch.Tensor,
) -> Tokens:
    """Scores of the tokens in `pages`, in the dtype of q ``[B, H_q, D]``; K ``[num_blocks, page_size, H_kv, D]``.

    Products are taken after K is widened to the dtype of q, one query head after the other.

    Raises:
        BatchError: a page of a row is not in K (looked at on the CPU only).
    """
    (rows, heads, size), page_size = q.shape, k.shape[1]
    lens = seq_lens.to(torch.int64)[:, None, None]
    if pages is None:
        longest = -(-int(seq_lens.max()) // page_size) if seq_lens.numel() else 0
        pages = torch.arange(longest, device=q.device).expand(rows, heads, -1)
    logical = pages.to(torch.int64)
    owned = (logical >= 0) & (logical * page_size < lens)
    physical = _physical(logical, owned, block_table, k.shape[0])
    position = (logical[..., None] * page_size + torch.arange(page_size, device=q.device)).flatten(2)
    attended = (position >= 0) & (position < lens)
    if sel_lens is not None:
        attended = attended & (torch.arange(position.shape[2], device=q.device) < sel_lens[..., None])
    dots = torch.zeros(*logical.shape, page_size, dtype=q.dtype, device=q.device)
    for b in range(rows):
        for h in range(heads):
            read = owned[b, h].nonzero().squeeze(-1)
            keys = k[physical[b, h][read], :, h * k.shape[2] // heads].to(q.dtype)  # [n, page_size, D]
            dots[b, h, read] = keys @ q[b, h] * size**-0.5
    scores = dots.flatten(2) + slopes[:, None] * (position - (lens - 1)).to(q.dtype)
    return Tokens(scores.masked_fill(~attended, float("-inf")), physical)


def _physical(
    logical: torch.Tensor, owned: torch.Tensor, block_table: torch.Tensor, num_blocks: int
) -> torch.Tensor:
    """Physical pages of those `owned`, else 0: entries past a row's pages may be anything."""
    if block_table.shape[1] == 0:
        return torch.zeros_like(logical)
    entries = block_table.to(torch.int64)[:, None].expand(-1, logical.shape[1], -1)
    physical = torch.where(owned, entries.gather(2, logical.clamp(0, block_table.shape[1] - 1)), 0)
    _check_physical(physical, num_blocks)
    return physical


def _check_physical(physical: torch.Tensor, num_blocks: int) -> None:
    if physical.device.type != "cpu" or physical.numel() == 0:
        return
    low, high = int(physical.min()), int(physical.max())
    if low < 0 or high >= num_blocks:
        raise BatchError(
            f"entmax_attention: block_table has {low if low < 0 else high} for a page of a row, "
            f"expected from 0 to {num_blocks - 1}"
        )


def weighted_values(p: torch.Tensor, physical: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Σ_t p_t · v_t ``[B, H_q, D]`` in the dtype of p; V ``[num_blocks, page_size, H_kv, D]`` is read where p > 0."""
    (rows, heads, _), page_size = p.shape, v.shape[1]
    o = p.new_zeros(rows, heads, v.shape[3])
    for b in range(rows):
        for h in range(heads):
            token = p[b, h].nonzero().squeeze(-1)
            page = torch.div(token, page_size, rounding_mode="floor")
            values = v[physical[b, h][page], token % page_size, h * v.shape[2] // heads]
            o[b, h] = p[b, h][token] @ values.to(p.dtype)
    return o
