"""What `experiments/bench_decode.py` counts and plans: bytes by hand, shapes, pools in turn."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_pools
import bench_shapes
from bench_bytes import count_bytes, dense_bytes
from bench_shapes import BenchError, FlowChoice, Numbers, Workload

SMALL = Numbers(group_size=2, num_kv_heads=2, head_dim=16, page_size=8, top_k=2)
QUEST, BLOCK = FlowChoice("gqa_quest_sparse_attention", {}), FlowChoice("block_sparse_attention", {})


def small(*lengths):
    return Workload(bench_shapes.canonical(lengths), lengths, SMALL, standard=False)


# -- bytes


def test_bytes_of_quest_by_hand():
    """16 x 32,768 tokens, 32 query and 8 kv heads of 128, pages of 16, 128 + 2 of 2,048 pages, bf16."""
    work = Workload("16x32k", (32768,) * 16, Numbers())
    moved = count_bytes(QUEST.plan(work), work.lengths)
    scored = 16 * (2048 - 2)
    assert moved.update == 8 * (16 * 128 * 2 + 2 * 128 * 2), "one row of 16 finishes a page"
    assert moved.plan == 16 * 2048 * 8 / 32
    assert moved.score == scored * (8 * (2 * 128 * 2 + 4) + 4)
    assert moved.select == scored * 8 * 4 + 16 * 8 * 130 * 4
    assert moved.attend == 16 * 8 * 130 * (16 * 256 * 2 + 4) + 16 * 32 * (256 * 2 + 4)
    assert moved.total == pytest.approx(moved.update + moved.plan + moved.score + moved.select + moved.attend)
    assert moved.floor_us(4.54e12) == pytest.approx(moved.total / 4.54e6)


def test_bytes_of_block_sparse_read_half_of_quests_fields():
    work = Workload("16x32k", (32768,) * 16, Numbers())
    quest, block = (count_bytes(c.plan(work), work.lengths) for c in (QUEST, BLOCK))
    assert quest.score - block.score == 16 * 2046 * 8 * 128 * 2
    assert quest.attend == block.attend
    assert dense_bytes(work.spec(), work.lengths) == 16 * 32768 * 8 * 256 * 2 + 16 * 32 * 256 * 2 + 16 * 2048 * 4


def test_a_row_within_the_budget_needs_no_scores_and_moves_what_dense_does():
    work = Workload("1x2048", (2048,), Numbers())
    plan = QUEST.plan(work)
    moved = count_bytes(plan, work.lengths)
    assert (moved.score, moved.select) == (0, 8 * 128 * 4)
    assert count_bytes(plan, work.lengths, score_all=True).score == 126 * (8 * (2 * 128 * 2 + 4) + 4)
    assert moved.attend - 32 * 4 - 8 * 128 * 4 == dense_bytes(work.spec(), work.lengths) - 128 * 4


def test_bytes_of_a_ragged_batch_with_short_last_pages():
    """Pages of 8: 21 tokens are 3 pages, all attended; 45 are 6, of which 2 + 2; 0 are none."""
    work = small(21, 45, 0)
    plan = BLOCK.plan(work)
    moved = count_bytes(plan, work.lengths)
    assert moved.update == 2 * 2 * (8 * 16 * 2 + 16 * 2) / 8
    assert moved.score == 4 * (2 * (16 * 2 + 4) + 4)
    assert moved.attend == 2 * (21 + 4 * 8 - 3) * 64 + 2 * 7 * 4 + 3 * 4 * (32 * 2 + 4)
    told = count_bytes(plan, work.lengths, [[3, 3], [2, 6], [0, 0]])
    assert told.attend - moved.attend == (16 - 3 + 48 - 3 - 2 * (32 - 3)) * 64


def test_a_flow_that_scores_nothing_moves_no_scores():
    work = small(64)
    moved = count_bytes(FlowChoice("streaming_attention", {}).plan(work), work.lengths, score_all=True)
    assert (moved.update, moved.score) == (0, 0)


# -- shapes and pools


def test_shapes():
    assert bench_shapes.parse_shape("16x32k") == (32768,) * 16
    assert bench_shapes.parse_shape("1x2048") == (2048,)
    ragged = bench_shapes.parse_shape("16xragged")
    assert (min(ragged), max(ragged), len(ragged)) == (1024, 131072, 16)
    for wrong in ("16", "0x4", "4x0", "x", "4x-1"):
        with pytest.raises(BenchError, match="expected BATCHxCONTEXT"):
            bench_shapes.parse_shape(wrong)
    assert [bench_shapes.canonical(bench_shapes.parse_shape(s)) for s in ("16x32768", "1x2048", "2xragged")] == [
        "16x32k", "1x2048", "2xragged",
    ]  # fmt: skip


def test_also_keeps_the_budget_in_tokens_and_drops_the_goals():
    made = bench_shapes.workloads(("16x32k",), Numbers(), also=True)
    budgets = {w.numbers.page_size: w.numbers.page_size * w.numbers.top_k for w in made}
    assert budgets == {1: 2048, 16: 2048, 32: 2048, 64: 2048}
    assert {w.numbers.group_size for w in made} == {1, 3, 4, 7, 8}
    assert [w.standard for w in made if w.numbers != Numbers()] == [False] * 8


def test_flow_options():
    assert bench_shapes.parse_flow('lserve:{"parts": 4}') == FlowChoice("lserve", {"parts": 4})
    for wrong in ("quest:{", "quest:[1]"):
        with pytest.raises(BenchError, match="--flow"):
            bench_shapes.parse_flow(wrong)


@pytest.mark.parametrize(
    ("step", "fit", "wanted"),
    [(270e6, 100, 4), (17e6, 100, 32), (8.4e6, 100, 64), (8.4e6, 40, 32), (270e6, 3, 2), (270e6, 0, 1), (1e12, 9, 2)],
)
def test_pools_of_a_step_divide_its_layers_or_are_a_multiple(step, fit, wanted):
    turn = bench_pools.rotation(step, [], 60 << 20, fit, 32)
    assert turn.step == wanted
    if fit == 100:
        assert (turn.step - 1) * step >= 8 * (60 << 20)


def test_stages_that_read_little_get_more_pools():
    turn = bench_pools.rotation(270e6, [30e6, 0.0], 60 << 20, 100, 32)
    assert turn == bench_pools.Rotation(pools=18, step=4)
    assert bench_pools.rotation(270e6, [30e6], 60 << 20, 10, 32).pools == 10


def test_problem_has_each_page_once_and_the_newest_slot():
    made = bench_pools.problem(small(64, 21, 40), "cpu")
    owned = [row[:n].tolist() for row, n in zip(made.table, made.workload.pages, strict=True)]
    flat = [page for own in owned for page in own]
    assert sorted(set(flat)) == sorted(flat)
    assert max(flat) < made.num_pages
    assert made.loc.tolist() == [own[-1] * 8 + slot for own, slot in zip(owned, (7, 4, 7), strict=True)]
    assert made.batch.page_table[1].tolist() == [*owned[1], *[-7] * 5]
