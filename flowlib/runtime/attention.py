"""Attention over page lists in torch, in any dtype: scores first, then softmax or entmax."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowlib.core.attention import Entmax
from flowlib.core.entmax import from_estimate, solve
from flowlib.core.errors import BackendError
from flowlib.core.rows import Rows
from flowlib.core.spec import Spec
from flowlib.runtime.batch import Batch
from flowlib.runtime.pool import KVStore


class Listed(NamedTuple):
    """The tokens of page lists.

    Attributes:
        scores: ``[bs, lists, H_q / lists, T]``, -inf for what is not attended.
        v: ``[bs, lists, T, Dv]``, 0 there.
    """

    scores: torch.Tensor
    v: torch.Tensor


class Weighted(NamedTuple):
    """What entmax attention gives: o ``[bs, H_q, Dv]``, tau and mass ``[bs, H_q]``; see ``StepOutput``."""

    o: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


def listed(
    q: torch.Tensor, store: KVStore, batch: Batch, pages: torch.Tensor, spec: Spec, dtype: torch.dtype
) -> Listed:
    """Scores of q ``[bs, H_q, D]`` over logical page lists ``[bs, H_kv or H_q, M]``, and the values, in `dtype`."""
    size, lists = pages.shape[0], pages.shape[1]
    longest = int((pages >= 0).sum(-1).max()) if pages.numel() else 0
    pages = pages[..., :longest].to(torch.int64)
    slot = torch.arange(spec.page_size, device=q.device)
    position = (pages[..., None] * spec.page_size + slot).flatten(2)  # [bs, lists, T]
    valid = (pages >= 0)[..., None].expand(*pages.shape, spec.page_size).flatten(2)
    valid = valid & (position < batch.seq_lens[:, None, None])
    physical = batch.page_table.to(torch.int64)[:, None, :].expand(-1, lists, -1).gather(2, pages.clamp(min=0))
    token = (physical[..., None] * spec.page_size + slot).flatten(2)
    token = torch.where(valid, token, 0)
    head = (torch.arange(lists, device=q.device) * spec.num_kv_heads // lists)[None, :, None]
    k = torch.where(valid[..., None], store.k[token, head].to(dtype) * spec.k_scale, 0.0)
    v = torch.where(valid[..., None], store.v[token, head].to(dtype) * spec.v_scale, 0.0)
    scores = (
        q.to(dtype).view(size, lists, spec.num_heads // lists, spec.head_dim) @ k.transpose(-1, -2) * spec.softmax_scale
    )
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=q.device).view(1, lists, -1, 1)
        scores = scores + slopes * (position - (batch.seq_lens[:, None, None] - 1)).to(dtype)[:, :, None, :]
    return Listed(scores.masked_fill(~valid[:, :, None, :], float("-inf")), v)


def entmax(
    tokens: Listed, spec: Spec, attention: Entmax, estimate: torch.Tensor | None, whole: torch.Tensor
) -> Weighted:
    """Entmax of listed tokens.

    Args:
        tokens: the lists.
        spec: the numbers.
        attention: alpha, and how tau is found.
        estimate: of tau, ``[bs, H_q]``.
        whole: bool ``[bs]``, rows whose tau is solved for whatever the mode: they have no estimate.
    """
    scores = tokens.scores
    size, width = scores.shape[0], scores.shape[3]
    rows = scores.reshape(size * spec.num_heads, width)
    alpha = torch.full((len(rows),), attention.alpha, dtype=torch.float64, device=scores.device)
    p, tau = solve(rows, alpha)
    p, tau = p.view(size, spec.num_heads, width), tau.view(size, spec.num_heads)
    mass = p.sum(-1)
    if estimate is not None and attention.tau_mode != "exact":
        a = torch.full((spec.num_heads,), attention.alpha - 1.0, dtype=scores.dtype, device=scores.device)
        flat = scores.reshape(size, spec.num_heads, width)
        near = from_estimate(flat, a, estimate.to(scores.dtype), attention.tau_mode, attention.niter)
        p = torch.where(whole[:, None, None], p, near[0])
        tau, mass = (torch.where(whole[:, None], x, y) for x, y in ((tau, near[1]), (mass, near[2])))
    o = p.view(scores.shape) @ tokens.v
    return Weighted(o.reshape(size, spec.num_heads, spec.dv), tau, mass)


def certified(
    bounds: torch.Tensor, scored: torch.Tensor, pages: torch.Tensor, done: Weighted, a: float, kv_heads: int
) -> torch.Tensor:
    """Whether no scored page left out can hold a token above tau: bool ``[bs, H_q]``.

    Args:
        bounds: of the scores in each page, ``[R, W, G or 1, 1]``.
        scored: bool ``[R, W]``.
        pages: int32 ``[bs, H_kv or H_q, M]``.
        done: attention over these lists.
        a: alpha − 1.
        kv_heads: of a row's R / bs.
    """
    size, heads = done.tau.shape
    lists, width = pages.shape[1], scored.shape[1]
    logical = torch.where(pages < 0, width, pages).to(torch.int64)
    inside = torch.zeros(size, lists, width + 1, dtype=torch.bool, device=pages.device).scatter(-1, logical, True)
    inside = inside[..., :width].repeat_interleave(heads // lists, 1)  # [bs, H_q, W]
    per_head = bounds.squeeze(-1).transpose(1, 2).expand(-1, heads // kv_heads, -1).reshape(size, heads, width)
    left_out = scored.view(size, kv_heads, width).repeat_interleave(heads // kv_heads, 1) & ~inside
    below = a * per_head <= done.tau[..., None]
    enough = (done.mass >= 1.0 - 64.0 * torch.finfo(done.mass.dtype).eps) | (done.tau == float("-inf"))
    return enough & (below | ~left_out).all(-1)


def rows_of(q: torch.Tensor | None, store: KVStore, batch: Batch, spec: Spec, dtype: torch.dtype) -> Rows:
    """What ops may know of the rows (query token, kv head) of a batch; without `q` not their last pages."""
    heads, group = spec.num_kv_heads, spec.group_size
    slopes = torch.tensor(spec.alibi_slopes or [0.0] * spec.num_heads, dtype=dtype, device=batch.device)

    def tail_maximum() -> torch.Tensor:
        if q is None:
            raise BackendError("an op called alone has no queries, whose scores in the last page it could read")
        tail = torch.div(batch.seq_lens - 1, spec.page_size, rounding_mode="floor")[:, None, None].expand(-1, heads, 1)
        scores = listed(q, store, batch, tail, spec, dtype).scores
        if scores.shape[3] == 0:
            return scores.new_full((batch.size * heads, group), float("-inf"))
        return scores.amax(-1).reshape(batch.size * heads, group)

    position = (batch.seq_lens - 1).to(dtype).repeat_interleave(heads)
    return Rows(position, slopes.view(heads, group).repeat(batch.size, 1), tail_maximum)
