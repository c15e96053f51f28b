"""A short soak: faults among requests that keep the pool full, and what its judge and its checker would see."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flowlib
from tests.sglang.engine import run

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
CHANCE = {"requests retracted", "largest share of the pool in use"}
"""What a short run need not reach."""


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def test_a_short_soak_is_green(tmp_path):
    command = [sys.executable, str(EXPERIMENTS / "soak.py"), "--device", "cpu", "--out", str(tmp_path)]
    command += ["--flow-config", '{"top_k": 80}']  # covers every request: answers do not depend on retraction
    ended = run([*command, "--requests", "30", "--concurrency", "12", "--pool-tokens", "2048"], timeout=300)
    verdicts = json.loads((tmp_path / "soak.json").read_text())["verdicts"]
    assert [v for v in verdicts if not v["ok"] and v["name"] not in CHANCE] == [], ended.text[-4000:]
    assert len(verdicts) == 18
    assert (ended.code == 0) == all(v["ok"] for v in verdicts)


def outcome_and_mix():
    """An outcome in which everything is right."""
    from soak_report import Outcome
    from soak_requests import Answer, Mix
    from soak_truth import Compared

    mix = Mix(200, 2048, 1)
    alone = [Answer(p, 200, [5] * p.new_tokens, [-1.0] * p.new_tokens, [0.5] * p.new_tokens) for p in mix.probes]
    answers = []
    for request in (mix.request(i) for i in range(mix.count)):
        tokens = 0 if request.kind in ("malformed", "too long", "left", "aborted") else request.new_tokens
        status = 400 if request.kind in ("malformed", "too long") else 200
        answers.append(Answer(request, status, [5] * tokens, [-1.0] * tokens, [0.5] * tokens, cached=16))
    found = {"pages": 9, "layers": 3, "wrong": 0, "total": 2048, "available": 2000, "cached": 48, "locked": 0}
    found |= {"requests": 0}
    killed = {"code": -9, "seconds": 1.0, "left": []}
    return Outcome(alone, answers, [0.2, 0.95], 3, found, found | {"available": 2048, "cached": 0}, killed,
                   Compared(0.01, 0.1, 0.02, 0.5, 48, 900, True)), mix  # fmt: skip


def spoil(outcome, kind, **changes):
    index = next(i for i, answer in enumerate(outcome.answers) if answer.request.kind == kind)
    outcome.answers[index] = replace(outcome.answers[index], **changes)


SPOILED = {
    "requests ended": lambda o: o.answers.pop(),
    "answers with other than the asked tokens": lambda o: spoil(o, "plain", status=0, tokens=[]),
    "log probabilities that are none": lambda o: spoil(o, "stream", logprobs=[float("nan")]),
    "tokens outside the vocabulary": lambda o: spoil(o, "stream", tokens=[512] * 3),
    "probes unlike alone": lambda o: (setattr(o, "retracted", 0), spoil(o, "probe", tokens=[5, 6] + [5] * 14)),
    "malformed or too long, not refused": lambda o: spoil(o, "malformed", status=200),
    "answers that used the radix cache": lambda o: o.answers.__setitem__(
        slice(None), [replace(a, cached=0) for a in o.answers]
    ),
    "prefilled log probabilities off float64": lambda o: setattr(o, "compared", replace(o.compared, prefill=0.6)),
    "log probabilities off float64": lambda o: setattr(o, "compared", replace(o.compared, error=float("nan"))),
    "largest share of the pool in use": lambda o: o.usage.pop(),
    "requests retracted": lambda o: setattr(o, "retracted", 0),
    "summaries that differ": lambda o: o.busy.update(wrong=1),
    "tokens free or cached, idle": lambda o: o.busy.update(available=1999),
    "tokens locked, requests held": lambda o: o.busy.update(requests=1),
    "tokens free, cache flushed": lambda o: o.idle.update(available=2032),
    "scheduler killed: exit status": lambda o: o.killed.update(code=None),
    "processes left": lambda o: o.killed.update(left=["sglang::detokenizer"]),
}


def red(outcome, mix):
    from soak_report import judge

    return {verdict.name for verdict in judge(outcome, mix, "float32") if not verdict.ok}


def test_no_request_is_aborted_with_another():
    """SGLang aborts every request whose name begins with the one it is given."""
    from soak_requests import Mix

    mix = Mix(200, 8192, 1)
    names = sorted([mix.request(i).rid for i in range(200)] + [probe.rid for probe in mix.probes])
    assert not any(later.startswith(name) for name, later in itertools.pairwise(names))


def test_an_outcome_without_faults_is_green():
    assert red(*outcome_and_mix()) == set()


@pytest.mark.parametrize("name", SPOILED)
def test_each_fault_is_seen(name):
    outcome, mix = outcome_and_mix()
    SPOILED[name](outcome)
    assert name in red(outcome, mix)


def test_a_whole_answer_to_every_cancelled_request_is_seen():
    outcome, mix = outcome_and_mix()
    outcome.answers = [replace(a, tokens=[5] * a.request.new_tokens) for a in outcome.answers]
    assert "aborted or left, yet answered whole" in red(outcome, mix)


@pytest.mark.parametrize(("error", "covered", "ok"), [(0.2, True, False), (0.2, False, True), (0.05, False, False)])
def test_what_is_off_the_truth_depends_on_the_budget(error, covered, ok):
    outcome, mix = outcome_and_mix()
    outcome.compared = replace(outcome.compared, error=error, covered=covered)
    assert ("log probabilities off float64" not in red(outcome, mix)) == ok


def test_answers_that_can_not_be_compared_are_red():
    outcome, mix = outcome_and_mix()
    outcome.compared = None
    assert {"prefilled log probabilities off float64", "log probabilities off float64"} <= red(outcome, mix)


def test_a_probe_may_part_where_two_tokens_are_equally_good():
    outcome, mix = outcome_and_mix()
    outcome.alone = [replace(a, margins=[0.0, *a.margins[1:]]) for a in outcome.alone]
    spoil(outcome, "probe", tokens=[6] * 16)
    assert "probes unlike alone" not in red(outcome, mix)


@pytest.mark.parametrize("flow", ["gqa_quest_sparse_attention", "block_sparse_attention"])
@pytest.mark.parametrize("float8", [False, True])
def test_the_checker_sees_one_wrong_bit_of_one_page(flow, float8):
    from soak_check import wrong_pages

    more = {"summary_dtype": torch.float8_e4m3fn} if float8 else {}
    spec = flowlib.Spec(num_kv_heads=2, group_size=3, head_dim=64, page_size=16, top_k=2, **more)
    plan = flowlib.profile(flowlib.build(flow), spec)
    pool = flowlib.PagedPool(plan, num_pages=5)
    pool.k.normal_(generator=torch.Generator().manual_seed(1))
    pages = torch.tensor([1, 2, 4])
    plan.update(pool, pages * 16 + 15, impl="reference")
    assert wrong_pages(pool, pages, "reference") == 0
    field = next(iter(pool.fields.values()))
    field.view(torch.uint8)[2, 1, 0, 7] ^= 1
    assert wrong_pages(pool, pages, "reference") == 1
    assert wrong_pages(pool, pages[:1], "reference") == 0
    pool.k[4 * 16] = float("nan")
    plan.update(pool, pages * 16 + 15, impl="reference")
    assert wrong_pages(pool, pages, "reference") == ("block" in flow), "a mean of NaN is no summary, a bound skips it"
