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
        error: the largest distance of a decoded token's log probability from the truth.
        allowed: twice that of the same tokens' by the server's own prefill, which is dense, and one rounding of the
            largest logit: as in the serving benchmark's gate.
        prefill: the largest distance of the same tokens' log probabilities by the server's prefill.
        twin: twice the distance of transformers in the served dtype, and that rounding: what `prefill` may be. It is
            the larger bound, since transformers rounds more; it sees what is wrong in prefill and decoding alike.
        answers, steps: how much was compared.
        covered: the flow's budget covers all of it, so that attention should be dense; else pages were left out.
    """

    error: float
    allowed: float
    prefill: float
    twin: float
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


def taken(answers: list[Answer]) -> list[Answer]:
    """The first :data:`ANSWERS` whole answers that have a decoded token.

    Those with the vocabulary's last token are left out: SGLang scores token 0 in its place.
    """
    whole = (a for a in answers if len(a.tokens) > 1 and len(a.logprobs) == len(a.tokens))
    return [a for a in whole if gate.VOCABULARY - 1 not in a.tokens][:ANSWERS]


def compare(
    model: Path, answers: list[Answer], prefilled: list[list[float]], longest_dense: int, dtype: str, device: str
) -> Compared:
    """The decoded tokens' log probabilities against those of the model in float64, by transformers.

    Args:
        model: its folder.
        answers: what :func:`taken` gives.
        prefilled: of each answer, the log probabilities of all its tokens by the server's prefill.
        longest_dense: tokens of the longest request that the flow attends to in full.
        dtype: what was served.
        device: where the truth is computed.
    """
    asked = [{"prompt": a.request.prompt, "force": a.tokens} for a in answers]
    rows, largest = gate.truth(model, asked, device)
    rounded, _ = gate.truth(model, asked, device, getattr(torch, dtype))
    truth, other = _of_tokens(rows, answers), _of_tokens(rounded, answers)
    decoded, dense = [np.array(a.logprobs[1:]) for a in answers], [np.array(x[1:]) for x in prefilled]
    prefill = gate.distance(dense, truth)
    allowed, twin = (gate.tolerance(error, largest, dtype) for error in (prefill, gate.distance(other, truth)))
    covered = max(len(a.request.prompt) + len(a.tokens) for a in answers) <= longest_dense
    steps = sum(len(row) for row in truth)
    return Compared(gate.distance(decoded, truth), allowed, prefill, twin, len(answers), steps, covered)


def _of_tokens(rows: list[np.ndarray], answers: list[Answer]) -> list[np.ndarray]:
    """Of log probabilities ``[steps, vocabulary]``, those of the answers' tokens after the first."""
    return [row[np.arange(len(row)), answer.tokens[1:]] for row, answer in zip(rows, answers, strict=True)]
