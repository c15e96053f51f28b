"""How `soak.py` judges what happened."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench_serving_gate import EPSILON, LAYERS
from rich.console import Console
from rich.table import Table
from soak_requests import Answer, Mix
from soak_server import EXIT_SECONDS
from soak_truth import Compared

FULL = 0.9
"""Share of the pool that must have been in use at some time."""


@dataclass(frozen=True)
class Verdict:
    """One check: what was found, what was expected, and whether it holds."""

    name: str
    found: str
    wanted: str
    ok: bool


@dataclass
class Outcome:
    """What happened: answers, the pool in use over time, what the checker found, how the server ended."""

    alone: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    retracted: int = 0
    busy: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)
    killed: dict[str, Any] = field(default_factory=dict)
    compared: Compared | None = None

    def add(self, answer: Answer) -> None:
        """Keeps an answer."""
        self.answers.append(answer)

    def of(self, *kinds: str) -> list[Answer]:
        """The answers to requests of some kinds."""
        return [answer for answer in self.answers if answer.request.kind in kinds]


def margin(alone: list[Answer], dtype: str) -> float:
    """How close two tokens must be for one to take the other's place: batches of another size round otherwise.

    Each of the model's layers rounds what it adds, in both runs, for both tokens: so many times `EPSILON` of the
    largest log probability.
    """
    largest = max(abs(value) for answer in alone for value in answer.logprobs)
    return 2 * 2 * LAYERS * EPSILON[dtype] * max(1.0, largest)


def parts_early(answer: Answer, alone: Answer, allowed: float) -> bool:
    """Whether a probe's answer is not whole, or leaves the one it had alone where the best token was clear."""
    if len(answer.tokens) != len(alone.tokens):
        return True
    for got, want, distance in zip(answer.tokens, alone.tokens, alone.margins, strict=True):
        if got != want:
            return distance > allowed
    return False


def judge(outcome: Outcome, mix: Mix, dtype: str) -> list[Verdict]:
    """Every check of the run."""
    return [*_answers(outcome, mix, dtype), *_truth(outcome.compared), *_memory(outcome), *_end(outcome)]


def _truth(found: Compared | None) -> list[Verdict]:
    names = "prefilled log probabilities off float64", "log probabilities off float64"
    if found is None:
        return [Verdict(name, "nothing compared", "some answers", False) for name in names]
    wanted = f"at most {found.allowed:.1e}" if found.covered else f"above {found.allowed:.1e}: pages are left out"
    told = f"({found.steps} tokens of {found.answers} answers)"
    return [
        Verdict(names[0], f"{found.prefill:.1e} {told}", f"at most {found.twin:.1e}", found.prefill <= found.twin),
        Verdict(names[1], f"{found.error:.1e} {told}", wanted, found.ok),
    ]


def _answers(outcome: Outcome, mix: Mix, dtype: str) -> list[Verdict]:
    whole = outcome.of("plain", "stream", "probe")
    short = [a for a in whole if a.status != 200 or len(a.tokens) != a.request.new_tokens]
    values = [value for answer in outcome.answers for value in answer.logprobs]
    strange = [v for v in values if not math.isfinite(v) or v > 0]
    outside = [t for answer in outcome.answers for t in answer.tokens if not 0 <= t < mix.vocabulary]
    probes, allowed = outcome.of("probe"), margin(outcome.alone, dtype)
    early = [a for a in probes if parts_early(a, outcome.alone[a.request.probe], allowed)]
    refused = outcome.of("malformed", "too long")
    accepted = [a for a in refused if not 400 <= a.status < 600]  # SGLang calls some of its refusals 500
    cut = [a for a in outcome.of("aborted", "left") if a.request.new_tokens > 3]
    ran = [a for a in cut if len(a.tokens) == a.request.new_tokens]
    kinds = Counter(answer.request.kind for answer in outcome.answers)
    return [
        Verdict("requests ended", f"{len(outcome.answers)} ({_told(kinds)})", f"{mix.count}",
                len(outcome.answers) == mix.count),
        Verdict("answers with other than the asked tokens", _some(short), f"0 of {len(whole)}",
                not short and bool(whole)),
        Verdict("log probabilities that are none", f"{len(strange)}", f"0 of {len(values)}",
                not strange and bool(values)),
        Verdict("tokens outside the vocabulary", f"{len(outside)}", "0", not outside),
        # what a retracted request has answered is prefilled anew, densely: a sparse answer may then go on otherwise
        Verdict("probes unlike alone", _some(early), f"no more than retracted, of {len(probes)} (margin {allowed:.1e})",
                len(early) <= outcome.retracted and bool(probes)),
        Verdict("malformed or too long, not refused", _some(accepted), f"0 of {len(refused)}",
                not accepted and bool(refused)),
        Verdict("aborted or left, yet answered whole", f"{len(ran)}", f"fewer than {len(cut)}", len(ran) < len(cut)),
        Verdict("answers that used the radix cache", f"{sum(a.cached > 0 for a in whole)}", "some",
                any(a.cached for a in whole)),
    ]  # fmt: skip


def _memory(outcome: Outcome) -> list[Verdict]:
    busy, idle, top = outcome.busy, outcome.idle, max(outcome.usage, default=0.0)
    accounted = busy["available"] + busy["cached"]
    return [
        Verdict("largest share of the pool in use", f"{top:.2f}", f"at least {FULL}", top >= FULL),
        Verdict("requests retracted", f"{outcome.retracted}", "some", outcome.retracted > 0),
        Verdict("summaries that differ", f"{busy['wrong']}", f"0 of {busy['pages']} pages x {busy['layers']} layers",
                busy["wrong"] == 0 and busy["pages"] > 0 and busy["layers"] > 0),
        Verdict("tokens free or cached, idle", f"{accounted}", f"{busy['total']}", accounted == busy["total"]),
        Verdict("tokens locked, requests held", f"{busy['locked']}, {busy['requests']}", "0, 0",
                busy["locked"] == 0 and busy["requests"] == 0),
        Verdict("tokens free, cache flushed", f"{idle['available']}", f"{idle['total']}",
                idle["available"] == idle["total"]),
    ]  # fmt: skip


def _end(outcome: Outcome) -> list[Verdict]:
    killed = outcome.killed
    return [
        Verdict("scheduler killed: exit status", f"{killed['code']} after {killed['seconds']} s",
                f"not 0, within {EXIT_SECONDS:.0f} s", killed["code"] not in (0, None)),
        Verdict("processes left", f"{len(killed['left'])}", "0", not killed["left"]),
    ]  # fmt: skip


def _told(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _some(answers: list[Answer]) -> str:
    """How many, and the first of them."""
    if not answers:
        return "0"
    first = answers[0]
    return f"{len(answers)}, such as {first.request.kind} {first.request.index}: {first.status} {first.error[:80]}"


def render(verdicts: list[Verdict], console: Console) -> None:
    """The table."""
    table = Table("check", "found", "expected", "")
    for verdict in verdicts:
        table.add_row(verdict.name, verdict.found, verdict.wanted, "ok" if verdict.ok else "WRONG")
    console.print(table)
