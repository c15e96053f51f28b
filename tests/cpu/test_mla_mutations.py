"""Each known bug, put into the loop, must turn the gate red: a test of the tests."""

import itertools

import pytest
import torch

from flowlib import mla
from tests.suites.mla_loop import ALL, cases, mutations

CHOSEN = {case.name: case for case in ALL if case.name in (*mutations.CASES, "context-free middle")}


@pytest.fixture(scope="module")
def problems():
    return {name: cases.problem(case, dtype=torch.float64) for name, case in CHOSEN.items()}


@pytest.mark.parametrize("schedule", ["packed", "even"])
@pytest.mark.parametrize("bug", mutations.KNOWN)
def test_the_gate_sees(bug, schedule, problems):
    for made in problems.values():
        assert made.error(mutations.run(made, schedule).o) <= 1e-14
    with mutations.mutated(bug):
        errors = {name: made.error(mutations.run(made, schedule).o) for name, made in problems.items()}
    assert max(errors.values()) > cases.GATE
    if schedule == "even" and bug in mutations.ORDER_FREE:
        for name, known in zip(mutations.CASES, mutations.KNOWN[bug], strict=True):
            assert errors[name] == pytest.approx(known, rel=0.03, abs=1e-3), "what the bug did elsewhere"


@pytest.mark.parametrize("bug", mutations.KNOWN)
def test_the_gate_sees_it_in_bf16_too(bug):
    made = {name: cases.problem(case) for name, case in CHOSEN.items()}
    with mutations.mutated(bug):
        assert max(p.error(mutations.run(p).o) for p in made.values()) > cases.GATE
    assert max(p.error(mutations.run(p).o) for p in made.values()) <= cases.GATE


def test_every_order_free_bug_is_seen_in_most_cases(problems):
    for bug in mutations.ORDER_FREE:
        with mutations.mutated(bug):
            errors = [problems[name].error(mutations.run(problems[name]).o) for name in mutations.CASES]
        assert sum(e > cases.GATE for e in errors) >= 4, bug


def test_a_swapped_page_order_is_invisible_to_attention_and_seen_by_the_gather(problems):
    """Attention does not care in which order keys come, so the gather has a test of its own, bit by bit."""
    made = problems["three"]
    case = made.case
    context = mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, 16, "even")
    swapped = made.block_table.clone()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    given = made.q, made.k, made.v, made.cache
    done = mla.chunked_prefill(*given, swapped, context, made.up_project, scale=case.sizes.scale)
    assert made.error(done.o) <= 1e-14
    rows = []
    for table in (made.block_table, swapped):
        out = torch.empty(32, 576, dtype=torch.float64)
        rows.append(mla.gather_latent(made.cache, table, context.cu_seq_lens[0], context.token_to_seq[0], 32, out))
    assert not torch.equal(*rows)


def test_no_two_bugs_are_the_same(problems):
    found = {}
    for bug in mutations.KNOWN:
        with mutations.mutated(bug):
            found[bug] = [round(p.error(mutations.run(p, "even").o), 6) for p in problems.values()]
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], (one, other)
