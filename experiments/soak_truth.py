"""Answers that a loaded server gave over HTTP against the model in float64, for `soak.py`."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import bench_serving_gate as gate
import numpy as np
import torch
from soak_requests import Answer

ANSWERS = 48
"""How many are compared."""


@dataclass(frozen=True)
class Compared:
    """What was found.

    Args:
        error: the largest distance of a token's log probability from the truth.
        allowed: how far dense attention in the served dtype may be off, as in the serving benchmark's gate.
        answers, steps: how much was compared.
        covered: the flow's budget covers all of it, so that attention should be dense; else pages were left out.
    """

    error: float
    allowed: float
    answers: int
    steps: int
    covered: bool

    @property
    def ok(self) -> bool:
        """Near the truth with a budget that covers; visibly off it with one that does not. NaN is neither."""
        return self.error <= self.allowed if self.covered else self.error > self.allowed


def sparse_above(url: str) -> int:
    """Requests of more tokens than this leave pages out, as the server says."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
        return json.load(response)["flow_served"]["sparse_above_tokens"]


def compare(model: Path, answers: list[Answer], longest_dense: int, dtype: str, device: str) -> Compared:
    """The decoded tokens' log probabilities against those of the model, by transformers.

    Args:
        model: its folder.
        answers: whole answers; the first :data:`ANSWERS` with a decoded token are taken.
        longest_dense: tokens of the longest request that the flow attends to in full.
        dtype: what was served.
        device: where the truth is computed.
    """
    taken = [a for a in answers if len(a.tokens) > 1 and len(a.logprobs) == len(a.tokens)][:ANSWERS]
    asked = [{"prompt": a.request.prompt, "force": a.tokens} for a in taken]
    wanted, largest = gate.truth(model, asked, device=device)
    dense, _ = gate.truth(model, asked, dtype=getattr(torch, dtype), device=device)
    got = [np.array(a.logprobs[1:]) for a in taken]
    chosen = [_of_tokens(rows, a) for rows, a in zip(wanted, taken, strict=True)]
    twin = [_of_tokens(rows, a) for rows, a in zip(dense, taken, strict=True)]
    allowed = gate.tolerance(gate.distance(twin, chosen), largest, dtype)
    lengths = [len(a.request.prompt) + len(a.tokens) for a in taken]
    steps = sum(len(rows) for rows in chosen)
    return Compared(gate.distance(got, chosen), allowed, len(taken), steps, max(lengths) <= longest_dense)


def _of_tokens(rows: np.ndarray, answer: Answer) -> np.ndarray:
    """Of log probabilities ``[steps, vocabulary]``, those of the answer's tokens after the first."""
    return rows[np.arange(len(rows)), answer.tokens[1:]]
