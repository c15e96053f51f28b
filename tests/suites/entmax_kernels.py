"""Entmax attention over page lists, against float64 loops over tokens that solve by bisection."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flowlib.testing import gamma
from tests.suites.entmax_problem import (
    BF16,
    FP8,
    FP16,
    FP32,
    Case,
    check,
    make,
    of_scores,
    of_threshold,
    run,
    tokens_of,
    truth,
)  # fmt: skip

CASES = [
    Case(),
    Case(group=1, heads=3, page=1, splits=2, width=150, alpha=2.0, alibi=True),
    Case(group=3, dim=96, v_dim=80, alibi=True, splits=3, per_head=False),
    Case(heads=1, group=8, dim=128, dtype=BF16, page=64, splits=2, width=5, spread=3.0),
    Case(group=8, heads=1, dim=64, dtype=FP16, page=1, width=140, per_head=False, alpha=2.0, spread=4.0),
    Case(group=3, dtype=BF16, alibi=True, splits=2, alpha=1.25, physical=False),
    Case(group=20, heads=1, dim=32, v_dim=24, per_head=False, splits=2, alpha=1.75),
    Case(group=2, dim=40, v_dim=8, page=48, width=4, alpha=1.01),
    Case(group=1, heads=1, dim=192, v_dim=128, dtype=BF16, page=128, width=3, splits=2, alpha=2.0),
    Case(heads=1, group=2, dim=16, page=16, width=300, splits=4, alpha=1.5, spread=2.0),
    Case(heads=1, group=2, dim=16, page=64, width=80, splits=2, alpha=1.3, per_head=False, spread=0.1),
    Case(dtype=BF16, kv_dtype=FP8, splits=2),
    Case(group=3, dtype=FP32, kv_dtype=BF16, alpha=2.0),
]  # fmt: skip
CASES += [replace(case, few=False) for case in CASES]
EITHER_WAY = pytest.mark.parametrize("few", [True, False])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attends_to_exactly_the_listed_tokens(case, device):
    problem = make(case)
    check(problem, run(problem, device))


def test_splits_do_not_change_the_threshold(device):
    """Nor do repetitions change a bit."""
    case = Case(heads=1, group=2, page=8, width=20, few=False)
    whole = run(make(case, [157]), device)
    for splits in (2, 5, 16):
        problem = make(replace(case, splits=splits), [157])
        got = run(problem, device)
        check(problem, got)
        assert torch.equal(got.tau, whole.tau)
    assert torch.equal(run(problem, device).o, got.o)


@EITHER_WAY
@pytest.mark.parametrize("per_head", [True, False])
def test_whole_rows(per_head, few, device):
    """Without lists, which are written where there is room for them; nothing is left out."""
    case = Case(heads=2, group=2, per_head=per_head, splits=2, width=4, dim=40, few=few)
    problem = make(case, [57, 0, 1, 32], keep=1.0)
    bounds = torch.full((8, 2, 9), math.nan, device=device)
    for listed in (True, False):
        problem.lists = [[[0] for _ in row] for row in problem.lists]  # what run() fills in, and nobody reads
        got = run(problem, device, listed, every=True, bounds=bounds)
        problem.lists = [[list(range(-(-n // 16)))] * (2 * case.lanes) for n in problem.seq_lens]
        check(problem, got)
        assert got.certified.all()
    problem.lists = [[[0] for _ in row] for row in problem.lists]
    got = run(problem, device, every=True)
    for row, n in enumerate(problem.seq_lens):
        count, width = -(-n // 16), got.pages.shape[2]
        assert (got.lengths[row] == count).all()
        assert (got.pages[row] == torch.tensor([*range(count), *[-1] * width][:width])).all()


ROWS = {
    "equal": torch.full((200,), -3.25),
    "one token": torch.tensor([7.5]),
    "two far apart": torch.tensor([0.0, 60.0]),
    "one, then equals": torch.cat([torch.zeros(1), torch.full((700,), -0.7)]),
    "one, then almost equals": torch.cat([torch.zeros(1), -0.7 - 1e-6 * torch.arange(300)]),
    "geometric": -(0.9 ** torch.arange(120.0)),
    "harmonic": -torch.cumsum(1.0 / (1.0 + torch.arange(300.0)), 0) / 5,
    "a power": -(torch.linspace(0, 1, 300) ** 8),
    "beyond registers": torch.sin(torch.arange(4300.0)) * 3,
    "beyond registers, few of them near": torch.cat([torch.arange(-8000.0, -2.0, 2.0), torch.linspace(-1, 1, 300)]),
    "large": 1000 * torch.cos(torch.arange(64.0)),
}


@pytest.mark.parametrize("alpha", [1.001, 1.5, 1.7, 2.0])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_hard_to_solve(name, alpha, device):
    if len(ROWS[name]) > 4096 and alpha not in (1.5, 1.7) and device == "cpu":
        pytest.skip("slow when interpreted")
    problem = of_scores(ROWS[name], alpha, splits=2 if len(ROWS[name]) > 64 else 1)
    check(problem, run(problem, device))


def test_as_many_tokens_as_a_list_holds_are_weighed_where_they_are_found(device):
    """Of equal scores all have weight; one more, and the tiles are looked through."""
    for tokens, listed in ((256, 256), (257, -1)):
        problem = of_scores(torch.full((tokens,), 1.0), 1.5, splits=2)
        got = run(problem, device)
        check(problem, got)
        assert got.state[0, 0, 4] == listed
    scores = torch.cat([torch.zeros(5), torch.full((5000,), -9.0)])
    problem = of_scores(scores[torch.randperm(5005, generator=torch.Generator().manual_seed(0))], 1.5, splits=2)
    got = run(problem, device)
    check(problem, got)
    assert got.state[0, 0, 4] == 5


def test_tiles_without_a_list_are_looked_through_where_the_threshold_is_low(device):
    """A fixed threshold below what tiles left out hold: their tokens are no list's, and weighed all the same."""
    scores = torch.cat([torch.zeros(64), torch.full((4200,), -3.0)])
    problem = of_scores(scores, 1.5, splits=2)
    got = run(problem, device, mode="fixed", estimate=torch.full((1, 1), -1.75, device=device))
    assert got.state[0, 0, 4] == -1
    o, mass = of_threshold(problem, 0, 0, -1.75)
    torch.testing.assert_close(got.mass[0, 0].double(), mass, rtol=gamma(4264), atol=0.0)
    torch.testing.assert_close(got.o[0, 0].double(), o, rtol=gamma(4264), atol=gamma(4264) * float(mass))


def test_each_head_has_its_own_alpha(device):
    case = Case(heads=2, group=3, alibi=True, width=3)
    alphas = [1.5, 2.0, 1.25, 1.05, 1.75, 1.5]
    for per_head in (True, False):
        problem = make(replace(case, per_head=per_head), [43, 1])
        a = torch.tensor(alphas, dtype=torch.float64).sub(1.0).float().to(device)
        check(problem, run(problem, device, a_of_head=a, alpha=math.nan), alphas)


@pytest.mark.parametrize(("alpha", "per_head"), [(1.3, True), (1.5, True), (1.5, False), (2.0, True)])
def test_an_estimate_is_corrected(alpha, per_head, device):
    """Step by step towards the threshold, whichever side it starts on; o is divided by the mass."""
    problem = make(Case(heads=1, group=2, alpha=alpha, per_head=per_head, width=3), [43])
    exact = run(problem, device)
    for away in (-0.3, 1e-3, 5.0):
        estimate = (exact.tau + away).to(device)
        check(problem, run(problem, device, mode="corrected", steps=10, estimate=estimate))
        errors = []
        for steps in (0, 1, 3):
            got = run(problem, device, mode="corrected", steps=steps, estimate=estimate)
            errors.append(float((got.tau - exact.tau).abs().max()))
            for head in range(2):
                o, mass = of_threshold(problem, 0, head, float(got.tau[0, head]))
                assert float(got.mass[0, head]) == pytest.approx(float(mass), rel=2e-4)
                torch.testing.assert_close(got.o[0, head].double(), o / mass, rtol=1e-3, atol=1e-4)
        assert errors[0] <= min(abs(away), 1.0) + 1e-6, "an estimate is taken into the bracket"
        assert errors[2] <= max(0.05 * errors[0], 1e-6), errors


def test_an_estimate_is_corrected_beyond_registers(device):
    """Tiles that cannot hold mass are left out, even where the estimate lies below what they hold."""
    problem = of_scores(torch.sin(torch.arange(4300.0)) * 3, 1.5, splits=2)
    estimate = torch.full((1, 1), truth(problem, 0, 0).tau - 0.4, device=device)
    check(problem, run(problem, device, mode="corrected", steps=10, estimate=estimate))


@pytest.mark.parametrize("low", [1000, 4000])
def test_one_step_beyond_registers_leaves_tiles_out(low, device):
    """With alpha 2 a step is linear: from top - 1, over all tokens, or the 320 that the tiles' maxima leave."""
    scores = torch.cat([torch.zeros(320), torch.full((low,), -63 / 64)])
    estimate = torch.full((1, 1), -1.0, device=device)
    got = run(of_scores(scores, 2.0), device, mode="corrected", steps=1, estimate=estimate)
    want = -1 / 320 if len(scores) > 4096 else -1 + (320 + low / 64 - 1) / (320 + low)
    assert float(got.tau) == pytest.approx(want, abs=gamma(16))


@EITHER_WAY
def test_a_fixed_threshold_is_taken_as_it_is(few, device):
    problem = make(Case(heads=1, group=2, splits=2, width=3, few=few), [43, 0, 1])
    exact = run(problem, device).tau
    for away in (-0.4, 0.0, 9.0):
        estimate = (exact + away).nan_to_num(neginf=-7.0)
        got = run(problem, device, mode="fixed", estimate=estimate.to(device))
        assert (got.o[1] == 0).all()
        for row, head in ((0, 0), (0, 1), (2, 0), (2, 1)):
            assert float(got.tau[row, head]) == pytest.approx(float(estimate[row, head]), abs=1e-6)
            o, mass = of_threshold(problem, row, head, float(estimate[row, head]))
            torch.testing.assert_close(got.o[row, head].double(), o, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.mass[row, head].double(), mass, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("per_head", "planes"), [(True, 3), (False, 3), (False, 1)])
def test_certificates(per_head, planes, device):
    """Set where every scored page left out has a bound of at most tau; a NaN bound certifies nothing."""
    case = Case(
        heads=2, group=3, page=4, width=12, per_head=per_head
    )
    problem = make(case, [45, 0, 3, 8, 33])
    rows, bos, eos = len(problem.seq_lens), 1, 2
    tau = run(problem, device).tau
    g = torch.Generator().manual_seed(5)
    seen = set()
    for spread in (0.02, 0.3, 3.0):
        bounds = torch.full((rows * 2, planes, case.width + 5), math.nan)
        for row, seq_len in enumerate(problem.seq_lens):
            for plane in range(2 * planes):
                heads = slice(plane * 3 // planes, (plane + 1) * 3 // planes)
                scored = slice(bos, max(bos, -(-seq_len // 4) - eos))
                values = torch.randn(case.width, generator=g)[scored] * spread - spread
                top = tau[row, heads].max() if seq_len else 0.0
                bounds[row * 2 + plane // planes, plane % planes, scored] = 2.0 * (values + top)
        if spread == 0.3:
            bounds[0, 0, 4] = math.nan
        got = run(problem, device, bounds=bounds.to(device), bos=bos, eos=eos)
        for row, seq_len in enumerate(problem.seq_lens):
            for head in range(6):
                listed = problem.lists[row][head if per_head else head // 3]
                plane = bounds[row * 2 + head // 3, (head % 3) if planes == 3 else 0]
                left = [p for p in range(bos, -(-seq_len // 4) - eos) if p not in listed]
                wanted = all(float(0.5 * plane[p]) <= float(got.tau[row, head]) for p in left)
                assert got.certified[row, head] == wanted, (spread, row, head)
                seen.add((wanted, bool(left)))
    assert {(True, True), (False, True), (True, False)} <= seen


@EITHER_WAY
def test_a_page_of_nan_shows(few, device):
    """NaN in an attended key is no zero: the output says so."""
    problem = make(Case(heads=1, group=1, width=3, few=few), [43, 0, 17])
    page = problem.lists[0][0][1]
    problem.k[int(problem.table[0, page]) * 16 + 3] = math.nan
    got = run(problem, device)
    assert got.o[0, 0].isnan().all()
    assert got.mass[0, 0].isnan()
    assert got.o[1:].isfinite().all()


def test_strides_of_queries_and_pool_are_free(device):
    case = Case(group=3, dim=64, v_dim=32)
    problem = make(case)
    wide = torch.full((problem.k.shape[0], case.heads, 200), math.nan)  # K and V side by side
    wide[..., 4:68], wide[..., 100:132] = problem.k, problem.v
    q = torch.full((8, case.query_heads * 2, 64), math.nan)
    q[::2, ::2] = problem.q
    strided = replace(problem, k=wide[..., 4:68], v=wide[..., 100:132], q=q[::2, ::2])
    check(problem, run(strided, device))


@EITHER_WAY
def test_values_are_read_where_there_is_mass_only(few, device):
    """V of a token without mass may be anything."""
    problem = make(Case(heads=1, group=1, page=4, width=40, spread=4.0, few=few))
    truths = truth(problem, 0, 0)
    at = torch.tensor(tokens_of(problem, 0, 0))
    none = at[truths.p == 0]
    assert len(none) > 50
    clean = run(problem, device)
    problem.v[problem.table[0, none // 4].long() * 4 + none % 4] = math.nan
    assert torch.equal(run(problem, device).o, clean.o)
