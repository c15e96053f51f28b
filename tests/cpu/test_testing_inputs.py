"""Scenes: what may not be read is hostile, and what may be read is what was drawn."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import flowlib
from flowlib.errors import BatchError
from flowlib.testing import fill_nan, ragged_lengths, reverse_interleaved, scene
from flowlib.testing.inputs import POISON
from flowlib.testing.strategies import lengths, scenes, specs

SPEC = flowlib.Spec(page_size=4, head_dim=8, v_head_dim=6, group_size=3, kv_dtype=torch.bfloat16, top_k=2, max_pages=12)


def plan_of(name: str = "quest", spec: flowlib.Spec = SPEC) -> flowlib.Plan:
    return flowlib.profile(flowlib.build(name), spec)


def test_pages_are_interleaved_descend_and_leave_gaps():
    pages, num_pages = reverse_interleaved([3, 0, 2])
    used = [p for own in pages for p in own]
    assert [len(own) for own in pages] == [3, 0, 2]
    assert len(set(used)) == 5 < num_pages
    assert all(a > b for own in pages for a, b in itertools.pairwise(own))
    assert pages[0][0] > pages[2][0] > pages[0][1] > pages[2][1] > pages[0][2]
    assert max(used) - min(used) >= 5, "an unused page lies between used ones"


def test_lengths_meet_every_edge():
    wanted = ragged_lengths(SPEC)
    within = (SPEC.top_k + SPEC.bos + SPEC.eos) * SPEC.page_size
    assert {0, 1, 4, 5, within, within + 1} <= set(wanted)
    assert within + 1 < max(wanted) <= SPEC.max_pages * SPEC.page_size


def test_owned_slots_hold_what_was_drawn_and_all_others_nan():
    made = scene(plan_of(), (0, 1, 4, 21), seed=3)
    owned = torch.zeros(len(made.pool.k), dtype=torch.bool)
    for own, k, v in zip(made.pages, made.k, made.v, strict=True):
        for t in range(len(k)):
            slot = own[t // 4] * 4 + t % 4
            owned[slot] = True
            assert torch.equal(made.pool.k[slot], k[t])
            assert torch.equal(made.pool.v[slot], v[t])
    assert made.k[3].dtype is torch.bfloat16
    assert made.pool.k[~owned].isnan().all()
    assert made.pool.v[~owned].isnan().all()
    finished = {own[j] for own, n in zip(made.pages, made.lengths, strict=True) for j in range(n // 4)}
    for value in made.pool.fields.values():
        for page in range(made.pool.num_pages):
            assert bool(value[page].isnan().any()) is (page not in finished)


def test_the_table_past_a_row_names_no_page():
    made = scene(plan_of(), (0, 1, 21))
    for own, row in zip(made.pages, made.batch.page_table.tolist(), strict=True):
        assert tuple(row[: len(own)]) == own
        assert len(row) > len(own)
        assert set(row[len(own) :]) <= set(POISON)


def test_a_scene_is_a_function_of_its_seed():
    first, again, other = (scene(plan_of(), (9, 13), seed=s) for s in (5, 5, 6))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.pool.k.nan_to_num(), again.pool.k.nan_to_num())
    assert not torch.equal(first.q, other.q)


def test_query_tokens_see_what_came_before_them():
    made = scene(plan_of(), (9, 5, 13), q_lens=(2, 0, 1))
    assert made.rows == ((0, 8), (0, 9), (2, 13))
    assert made.q.shape == (3, SPEC.num_heads, SPEC.head_dim)
    assert made.batch.seq_lens.tolist() == [8, 9, 13]


def test_fields_are_computed_again_from_nan():
    made = scene(plan_of(), (9, 13))
    for value in made.pool.fields.values():
        fill_nan(value)
    done = made.pool_by("reference")
    finished = made.finished_slots() // 4
    assert len(finished) == 2 + 3
    assert done.fields["k_max"][finished].isfinite().all()
    assert made.pool.fields["k_max"].isnan().all(), "the scene's own pool stays as it is"


def test_float8_values_come_back_through_the_scale():
    made = scene(plan_of(spec=SPEC.replace(kv_dtype=torch.float8_e4m3fn, k_scale=0.3, v_scale=4.0)), (9, 4))
    slots = [made.pages[0][t // 4] * 4 + t % 4 for t in range(9)]
    assert torch.equal(made.pool.k[slots].float(), made.k[0].float())
    assert torch.equal(made.pool.v[slots].float(), made.v[0].float())


@pytest.mark.parametrize("wrong", [(), (-1,), (4, 49)])
def test_lengths_that_do_not_fit(wrong):
    with pytest.raises(BatchError, match=r"scene: lengths "):
        scene(plan_of(), wrong)


@given(made=scenes(flowlib.build("gqa_quest_sparse_attention"), specs(head_dims=(8, 24), max_pages=6)))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_scenes_run(made):
    out = made.plan.step(made.q, made.pool, made.batch)
    assert out.o.isfinite().all()
    assert out.lengths.shape == (len(made.lengths), made.spec.num_kv_heads)


@given(some=lengths(SPEC))
@settings(max_examples=30, deadline=None)
def test_drawn_lengths_fit(some):
    assert some
    assert all(0 <= n <= SPEC.max_pages * SPEC.page_size for n in some)
