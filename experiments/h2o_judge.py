"""What a run of the token-level H2O flows must show: three verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from h2o_oracle import Result, Snapshot

ERROR, MASS, RATIO = 0.15, 0.10, 0.99


@dataclass(frozen=True)
class Verdict:
    """One PASS/FAIL line."""

    name: str
    ok: bool
    text: str


def judge(result: Result) -> list[Verdict]:
    """Accumulation, selection and page reuse; every reported step of every seed counts."""
    return [_accumulation(result), _selection(result), _reuse(result)]


def _accumulation(result: Result) -> Verdict:
    shots = result.snapshots
    worst = max(shots, key=lambda s: _nan_last(s.error))
    furthest = max(shots, key=lambda s: _nan_last(_mass_error(s)))
    ok = worst.error < ERROR and _mass_error(furthest) <= MASS
    text = (
        f"relative error {worst.error:.1e}, expected < {ERROR}; mass {furthest.mass:.2f} of {furthest.expected:.2f} "
        f"at step {furthest.step}, expected within {MASS:.0%}"
    )
    return Verdict("accumulation", ok, text if ok else text + _reason(result, furthest))


def _reason(result: Result, shot: Snapshot) -> str:
    """Whether rounding of the state alone explains the mass that is missing."""
    lost = shot.expected - shot.mass
    explained = (shot.expected - shot.rounded_mass) / lost if lost else math.nan
    if not 0.9 <= explained <= 1.1:
        return "; rounding of the state does not explain it"
    dtype = str(result.options.state_dtype).removeprefix("torch.")
    return f"; {lost / shot.expected:.0%} of the mass was lost to rounding of the {dtype} state"


def _selection(result: Result) -> Verdict:
    shots = result.snapshots
    exact = result.options.state_dtype is torch.float32
    ratio, overlap = _least([s.ratio for s in shots]), _least([s.overlap for s in shots])
    well_formed = all(s.well_formed for s in shots)
    ok = ratio >= RATIO and well_formed and (overlap == 1.0 or not exact)
    wanted = "expected 100%" if exact else "not judged with a bfloat16 state"
    text = f"score ratio {ratio:.4f}, expected >= {RATIO}; overlap {overlap:.0%}, {wanted}"
    if not well_formed:
        text += "; a page list does not hold the reserved tokens and top_k scored ones, once each"
    return Verdict("selection", ok, text)


def _reuse(result: Result) -> Verdict:
    before, after = result.reuse.before, result.reuse.after
    text = f"hh_score has {before} entries that are not 0 before the slots change hands, {after} after, expected 0"
    if before == 0:
        text = "vacuous: hh_score was 0 everywhere before the slots changed hands"
    return Verdict("page reuse", before > 0 and after == 0, text)


def _mass_error(shot: Snapshot) -> float:
    return abs(shot.mass - shot.expected) / shot.expected


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _least(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)
