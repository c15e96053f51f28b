"""Attention over page lists, written out for one request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowlib.core.spec import Spec


@dataclass(frozen=True)
class Attention:
    """Attention of H heads.

    Attributes:
        o: ``[H, Dv]``.
        lse: ``[H]``, natural log.
        mass: ``[H, Dv]``, Σ_j w_j · |v_j| (for tolerances).
        logit: ``[H]``, the largest Σ_d |scale · q_d · k_jd| + |bias_j| (for tolerances).
    """

    o: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    logit: torch.Tensor


def tokens_of(pages: Sequence[int], length: int, page_size: int) -> list[int]:
    """Positions of the tokens in logical `pages` of a request of `length` tokens, in order."""
    tokens = []
    for page in pages:
        for token in range(page * page_size, min((page + 1) * page_size, length)):
            tokens.append(token)
    return tokens


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: Sequence[int],
    query_position: int,
    spec: Spec,
    slopes: Sequence[float] | None = None,
    weights_dtype: torch.dtype | None = None,
) -> Attention:
    """Softmax attention of q ``[H, D]`` over k ``[T, D]`` and v ``[T, Dv]``, one head after the other.

    Args:
        q, k, v: of one floating dtype, de-scaled.
        positions: positions of the T tokens; none gives o = 0 and lse = -inf.
        query_position: position of the query token.
        spec: gives the scale.
        slopes: ALiBi slopes of the H heads: adds ``slope · (position - query_position)``.
        weights_dtype: rounds the weights, as a product on tensor cores does.
    """
    scale = q.shape[1] ** -0.5 if spec.scale is None else spec.scale
    heads, size = q.shape[0], v.shape[1]
    o, mass = q.new_zeros(heads, size), q.new_zeros(heads, size)
    lse, logit = q.new_full((heads,), -math.inf), q.new_zeros(heads)
    if not positions:
        return Attention(o, lse, mass, logit)
    distance = torch.tensor([p - query_position for p in positions], dtype=q.dtype)
    for h in range(heads):
        bias = distance * (0.0 if slopes is None else slopes[h])
        s = scale * torch.einsum("td,d->t", k, q[h]) + bias
        logit[h] = (scale * torch.einsum("td,d->t", k.abs(), q[h].abs()) + bias.abs()).max()
        top = s.max()
        w = (s - top).exp()
        lse[h] = top + w.sum().log()
        w = w / w.sum()
        if weights_dtype is not None:
            w = w.to(weights_dtype).to(q.dtype)
        o[h] = torch.einsum("t,te->e", w, v)
        mass[h] = torch.einsum("t,te->e", w, v.abs())
    return Attention(o, lse, mass, logit)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec, slopes: Sequence[float] | None = None
) -> Attention:
    """Attention of the last of T tokens over all of them; arguments of :func:`attention`."""
    return attention(q, k, v, range(k.shape[0]), k.shape[0] - 1, spec, slopes)
