"""The selection stage: page lists judged by the scores they picked, not by their indices."""

from __future__ import annotations

import math

import torch

from flowlib.core.spec import Spec
from flowlib.testing.oracles import Oracle
from flowlib.testing.stages import Run
from flowlib.testing.tolerance import Judgement


def judge_selection(
    run: Run, oracle: Oracle, truths: dict[tuple[int, int], torch.Tensor], slack: float
) -> tuple[Judgement, str]:
    """Page lists, by the scores they picked.

    Exact, on the implementation's own scores: ascending lists, reserved pages once, as many pages as the budget says,
    none better left out, ties to the lower page. And the oracle's scores of what was picked may fall short of the best
    left out by twice `slack`, what scores may be off.
    """
    spec, lists = run.scene.spec, run.out.pages.shape[1]
    lanes = lists // spec.num_kv_heads
    pages, lengths = run.out.pages.cpu(), run.out.lengths.cpu()
    scores = None if run.out.scores is None else run.out.scores.cpu().to(torch.float64)
    worst, where = 0.0, ""
    for i, (_, seen) in enumerate(run.scene.rows):
        for lane in range(lists):
            label = f"row {i} ({seen} tokens), list {lane}"
            own = None if scores is None else scores[i, lane]
            full = bool(run.scene.plan.in_full(torch.tensor(seen)))
            problem, regret = _judge_list(pages[i, lane], int(lengths[i, lane]), own, seen, spec, oracle, full)
            truth = truths.get((i, lane // lanes))
            if not problem and truth is not None:
                chosen = [p - spec.bos for p in pages[i, lane, : int(lengths[i, lane])].tolist()]
                regret = _regret(truth[lane % lanes], [p for p in chosen if 0 <= p < truth.shape[1]])
            if problem:
                return Judgement(math.inf, 2 * slack, (i, lane), False), f"{label}: {problem}"
            if regret > worst:
                worst, where = regret, label
    return Judgement(worst, 2 * slack, (), worst <= 2 * slack), where


def _judge_list(
    listed: torch.Tensor, length: int, own: torch.Tensor | None, seen: int, spec: Spec, oracle: Oracle, full: bool
) -> tuple[str, float]:
    """What is wrong with one page list ``[max_selected]`` by the scores ``[W]`` it was made from, and its regret."""
    num_pages = -(-seen // spec.page_size)
    if not 0 <= length <= len(listed):
        return f"length {length}, expected from 0 to {len(listed)}", 0.0
    pages, rest = listed[:length].tolist(), listed[length:].tolist()
    if pages != sorted(set(pages)) or any(not 0 <= p < num_pages for p in pages):
        return f"pages {pages}, expected ascending pages below {num_pages}, each once", 0.0
    if any(p != -1 for p in rest):
        return f"{rest} past the list's end, expected -1", 0.0
    scored = range(spec.bos, max(spec.bos, num_pages - spec.eos))
    missing = [p for p in range(num_pages) if p not in scored and p not in pages]
    if missing:
        return f"reserved pages {missing} are not attended", 0.0
    chosen = [p - spec.bos for p in pages if p in scored]
    if full:
        return "" if len(pages) == num_pages else f"pages {pages}, expected all {num_pages} of so short a row", 0.0
    values = torch.zeros(len(scored)) if own is None else own[spec.bos : spec.bos + len(scored)]
    fewest, most = oracle.counts(values, num_pages, spec)
    if not fewest <= len(chosen) <= most:
        return f"{len(chosen)} pages chosen of {len(scored)} scored, expected {fewest}", 0.0
    if any(not float(values[p]) > -math.inf for p in chosen):
        return "a page with score -inf or NaN is chosen", 0.0
    regret = _regret(values, chosen)
    if regret > 0:
        return f"a page that scores {regret:.3g} more than a chosen one is left out", regret
    return _judge_ties(values, chosen), 0.0


def _judge_ties(values: torch.Tensor, chosen: list[int]) -> str:
    if not chosen:
        return ""
    lowest = min(float(values[p]) for p in chosen)
    tied = [p for p in range(len(values)) if float(values[p]) == lowest]
    taken = [p for p in tied if p in chosen]
    return "" if taken == tied[: len(taken)] else f"of tied pages {tied} the list has {taken}, expected the lowest"


def _regret(values: torch.Tensor, chosen: list[int]) -> float:
    """Best score left out less the worst chosen, at least 0."""
    left = [float(s) for p, s in enumerate(values) if p not in chosen and float(s) > -math.inf]
    picked = [float(values[p]) for p in chosen]
    return max(0.0, max(left) - min(picked)) if left and picked else 0.0
