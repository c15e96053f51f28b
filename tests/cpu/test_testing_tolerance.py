"""Derived tolerances: wide enough for every right way to compute, narrow enough for the next worse one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowlib.testing import accumulation_step, condition, derive, expect, gamma, judge, rounding_step, unit_roundoff

NAN, INF = float("nan"), float("inf")


def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("d,nd->n", q, k)


def drawn(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def one_after_the_other(q: torch.Tensor, k: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(k), dtype=q.dtype)
    for d in order.tolist():
        total = total + q[d] * k[:, d]
    return total


def test_units():
    assert unit_roundoff(torch.float32) == 2.0**-24
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
    assert gamma(3, torch.bfloat16) == (3 * 2.0**-8) / (1 - 3 * 2.0**-8)
    step = rounding_step(torch.tensor([1.0, -8.0, 0.0, INF], dtype=torch.float64), torch.bfloat16)
    assert step[:2].tolist() == [2.0**-7, 2.0**-4]
    assert (step > 0).all()
    assert step.isfinite().all()


@pytest.mark.parametrize(
    ("got", "truth", "ok", "error"),
    [
        ([1.0, -INF], [1.0, -INF], True, 0.0),
        ([NAN], [NAN], True, 0.0),
        ([1.05], [1.0], True, 0.05),
        ([1.0, 1.2], [1.0, 1.0], False, 0.2),
        ([NAN], [1.0], False, INF),
        ([1.0], [NAN], False, INF),
        ([INF], [-INF], False, INF),
        ([0.0], [-INF], False, INF),
        ([], [], True, 0.0),
    ],
)
def test_judge(got, truth, ok, error):
    verdict = judge(torch.tensor(got), torch.tensor(truth, dtype=torch.float64), torch.full((len(got),), 0.1))
    assert verdict.ok is ok
    assert verdict.error == pytest.approx(error)


def test_judge_names_the_worst_element_by_its_own_tolerance():
    truth = torch.zeros(2, 2, dtype=torch.float64)
    tolerance = torch.tensor([[1.0, 1.0], [1e-3, 1.0]])
    verdict = judge(torch.tensor([[0.5, 0.0], [2e-3, 0.0]]), truth, tolerance)
    assert verdict.where == (1, 0)
    assert verdict.ratio == pytest.approx(2.0)
    assert not verdict.ok
    assert str(verdict) == "error 0.002 beyond tolerance 0.001 at [1, 0]"
    assert not judge(torch.zeros(4), truth, tolerance).ok, "another shape"


def test_condition_of_a_dot_product_is_the_sum_of_the_sizes():
    q, k = drawn(0, (17,), (5, 17))
    wanted = 2 * dot(q.abs().double(), k.abs().double())  # q and k may both be perturbed
    torch.testing.assert_close(condition(dot, (q, k)), wanted, rtol=1e-12, atol=0)


def test_condition_of_independent_entries_is_that_of_each_alone(monkeypatch):
    (x,) = drawn(1, (4, 3, 6))

    def norms(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum(2, keepdim=True).sqrt() - x.amax(2, keepdim=True)

    alone = torch.stack([condition(lambda y: norms(y[None])[0], (entry,)) for entry in x])
    torch.testing.assert_close(condition(norms, (x,), independent=True), alone, rtol=1e-12, atol=0)
    monkeypatch.setattr("flowlib.testing.tolerance._GRADIENT_ELEMENTS", 1)
    torch.testing.assert_close(condition(norms, (x,), independent=True), alone, rtol=1e-12, atol=0)


def test_condition_of_what_depends_on_nothing_is_zero():
    assert condition(lambda x: torch.ones(3, dtype=x.dtype), (torch.ones(2),)).tolist() == [0.0, 0.0, 0.0]


@given(seed=st.integers(0, 2**31), size=st.integers(1, 300), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_fp32_sums_in_any_order_are_within_and_bf16_products_are_beyond(seed, size, dtype):
    q, k = drawn(seed, (size,), (8, size), dtype=dtype)
    wanted = expect(dot, (q, k), dtype=torch.float32, terms=size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    assert wanted.judge(one_after_the_other(q.float(), k.float(), order)).ok
    worse = (q.float() * k.float()).to(torch.bfloat16).float().sum(1)
    assert size < 8 or not wanted.judge(worse).ok


def test_a_straightforward_evaluation_that_is_exact_by_luck_leaves_one_rounding_step():
    truth = torch.tensor([3.0], dtype=torch.float64)
    tolerance = derive(truth, truth.to(torch.bfloat16), dtype=torch.bfloat16)
    one, two = 3.0 + 2.0**-6, 3.0 + 2.0**-5
    assert judge(torch.tensor([one], dtype=torch.bfloat16), truth, tolerance).ok
    assert not judge(torch.tensor([two], dtype=torch.bfloat16), truth, tolerance).ok


def test_twice_the_straightforward_error_counts_everywhere_but_infinities_do_not():
    truth = torch.tensor([1.0, 1.0, -INF], dtype=torch.float64)
    tolerance = derive(truth, torch.tensor([1.5, 1.0, -INF]), dtype=torch.float32)
    assert tolerance[:2].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert math.isfinite(tolerance[2])


def test_float64_is_held_to_float64():
    q, k = drawn(3, (64,), (8, 64))
    wanted = expect(dot, (q, k), dtype=torch.float64, compute=torch.float64, terms=64)
    assert wanted.judge(one_after_the_other(q.double(), k.double(), torch.arange(64))).ok
    assert not wanted.judge(one_after_the_other(q, k, torch.arange(64))).ok


def test_a_coarse_output_needs_no_accumulation_step():
    q, k = drawn(4, (64,), (8, 64), dtype=torch.bfloat16)
    wanted = expect(dot, (q, k), dtype=torch.bfloat16)
    right = dot(q.float(), k.float())
    assert wanted.judge(right.to(torch.bfloat16)).ok
    assert not wanted.judge((1.03 * right).to(torch.bfloat16)).ok


def test_the_step_is_gamma_of_condition_and_value():
    q, k = drawn(5, (16,), (4, 16))
    step = accumulation_step(dot, (q, k), 16)
    wanted = gamma(16) * (condition(dot, (q, k)) + dot(q.double(), k.double()).abs())
    torch.testing.assert_close(step, wanted, rtol=1e-12, atol=0)
