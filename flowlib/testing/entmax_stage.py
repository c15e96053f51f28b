"""The attention stage of flows with entmax: o, tau, mass and certificates over the implementation's own page lists."""

from __future__ import annotations

import torch

from flowlib.core.attention import Entmax
from flowlib.runtime.entmax import unestimated
from flowlib.testing.oracles import tokens_of
from flowlib.testing.oracles.entmax import EntmaxAttention, entmax_attention
from flowlib.testing.stages import ELEMENTARY, Collected, Run
from flowlib.testing.tolerance import Judgement, gamma, upcast


def judge_entmax(run: Run, attention: Entmax) -> dict[str, tuple[Judgement, str]]:
    """o, tau and mass; where a flow gives bounds, that no certified head leaves out a token above its threshold.

    A threshold that was only estimated is taken as it came: then o is what the weights it gives say.
    """
    spec, out = run.scene.spec, run.out
    o_dtype = torch.float64 if run.impl == "reference" else spec.field_dtype
    coarse = None if spec.field_dtype is torch.float32 else spec.field_dtype
    found = {"o": Collected(), "tau": Collected(), "mass": Collected(), "certificate": Collected()}
    solved = unestimated(run.scene.plan, torch.tensor([seen for _, seen in run.scene.rows]))
    for i, (_, seen) in enumerate(run.scene.rows):
        own = None if attention.tau_mode == "exact" or solved[i] else attention.tau_mode == "corrected"
        for lane in range(out.pages.shape[1]):
            label = f"row {i} ({seen} tokens), list {lane}"
            pages = [p for p in out.pages[i, lane].tolist() if 0 <= p < -(-seen // spec.page_size)]
            truth = _attention(run, attention.alpha, i, lane, pages, own)
            low = truth
            if run.compute is torch.float32:
                low = _attention(run, attention.alpha, i, lane, pages, own, torch.float32, coarse)
            heads, a = _heads(run, lane), attention.alpha - 1.0
            tokens = truth.scores.shape[1]
            off = gamma(spec.head_dim + 3, run.compute) * truth.logit + gamma(ELEMENTARY, run.compute) / a
            step = 2 * off[:, None] * truth.spread + gamma(tokens + ELEMENTARY, run.compute) * truth.size
            found["o"].add(label, out.o[i, heads], truth.o, low.o.to(o_dtype), step)
            tau, mass = (x[i, heads].cpu() for x in (out.tau, out.mass))  # type: ignore[index]
            rounding = a * off + gamma(2, run.compute) * torch.where(tau > -torch.inf, tau.abs().double(), 0.0)
            found["tau"].add(label, tau, truth.tau, low.tau, rounding)
            moved = torch.full_like(truth.mass, gamma(64, run.compute) + gamma(ELEMENTARY, run.compute) / a)
            if own is not None:
                moved += gamma(tokens + ELEMENTARY, run.compute) * truth.mass + 2 * off * truth.weight
            found["mass"].add(label, mass, truth.mass, low.mass, moved)
            if out.certified is not None:
                _judge_certificates(run, attention, i, lane, pages, found["certificate"])
    kept = {name: c for name, c in found.items() if name != "certificate" or out.certified is not None}
    return {name: c.judge(o_dtype if name == "o" else run.compute) for name, c in kept.items()}


def _heads(run: Run, lane: int) -> slice:
    per_list = run.scene.spec.num_heads // run.out.pages.shape[1]
    return slice(lane * per_list, (lane + 1) * per_list)


def _attention(
    run: Run,
    alpha: float,
    row: int,
    lane: int,
    pages: list[int],
    divided: bool | None = None,
    dtype: torch.dtype = torch.float64,
    weights_dtype: torch.dtype | None = None,
) -> EntmaxAttention:
    """The oracle's attention over some pages; with `divided`, by the implementation's own threshold."""
    scene, spec, out = run.scene, run.scene.spec, run.out
    request, seen = scene.rows[row]
    positions, heads = tokens_of(pages, seen, spec.page_size), _heads(run, lane)
    kv_head = lane * spec.num_kv_heads // out.pages.shape[1]
    slopes = None if spec.alibi_slopes is None else spec.alibi_slopes[heads]
    k, v = upcast(scene.k[request][positions, kv_head], scene.v[request][positions, kv_head])
    q, k, v = (x.to(dtype) for x in (run.q[row, heads].cpu().double(), k * spec.k_scale, v * spec.v_scale))
    given = [None] * spec.num_heads if divided is None else [(t, divided) for t in out.tau[row, heads].tolist()]  # type: ignore[index]
    return entmax_attention(
        q, k, v, positions, seen - 1, spec, alpha, slopes, weights_dtype, lambda h: given[h]
    )


def _judge_certificates(
    run: Run, attention: Entmax, row: int, lane: int, pages: list[int], collected: Collected
) -> None:
    """By how much the tokens left out by certified heads exceed the threshold: not at all."""
    scene, spec, heads = run.scene, run.scene.spec, _heads(run, lane)
    left = [p for p in range(-(-scene.rows[row][1] // spec.page_size)) if p not in pages]
    away = _attention(run, attention.alpha, row, lane, left)
    a, sure = attention.alpha - 1.0, run.out.certified[row, heads].cpu()  # type: ignore[index]
    if away.scores.shape[1] == 0:
        excess = torch.where(sure, 0.0, 1.0)
    else:
        above = a * away.scores.amax(1) - run.out.tau[row, heads].cpu().double()  # type: ignore[index]
        excess = torch.where(sure, above.clamp(min=0.0), 0.0)
    slack = a * gamma(spec.head_dim + ELEMENTARY, run.compute) * away.logit
    zero = torch.zeros(len(excess), dtype=torch.float64)
    collected.add(f"row {row}, list {lane}", excess, zero, zero, slack)
