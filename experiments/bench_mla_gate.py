"""The gate of latent prefill: sampled rows of every variant against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from bench_gate import Verdict
from bench_mla_problem import Sample

_LOW_SLACK = 2.0
"""An output may be this many times as far from float64 as a plain evaluation that rounds what must be rounded."""


def judge_outputs(
    name: str, label: str, found: Sequence[Sample], o: torch.Tensor, lse: torch.Tensor | None = None,
    absorbed: bool = False,
) -> list[Verdict]:  # fmt: skip
    """Verdicts on o ``[T, H, dv]``, by the 2-norm of each sampled row, and on lse ``[T, H]`` where one is given.

    Args:
        name, label: the variant and the shape.
        found: what the rows must be.
        o, lse: of the variant.
        absorbed: whether it rounds as the absorbed form does.
    """
    verdicts = []
    for sample in found:
        row = f"request {sample.request}, new token {sample.token}, head {sample.head}"
        low = sample.absorbed if absorbed else sample.materialised
        size = float(sample.o.norm())
        error = float((o[sample.row, sample.head].double() - sample.o).norm()) / size
        allowed = _LOW_SLACK * float((low - sample.o).norm()) / size + torch.finfo(torch.bfloat16).eps
        verdicts.append(_verdict(name, label, "o", row, error, allowed))
        if lse is not None:
            error = abs(float(lse[sample.row, sample.head]) - sample.lse)
            verdicts.append(_verdict(name, label, "lse", row, error, sample.lse_tolerance))
    return verdicts


def _verdict(name: str, label: str, stage: str, row: str, error: float, allowed: float) -> Verdict:
    error = math.inf if math.isnan(error) else error
    return Verdict(name, label, stage, row, error, allowed, error <= allowed)


def raised(name: str, label: str, error: BaseException) -> Verdict:
    """The verdict on a variant that raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return Verdict(name, label, "run", "all", math.inf, 0.0, False, text)
