"""Public failures 1 to 12, heads and sizes; docs/pitfalls.md tells which."""

import pytest
import torch

import flowlib
from flowlib.errors import OptionError, ShapeError
from flowlib.kernels.attend import num_splits
from flowlib.testing import scene
from flowlib.testing.stages import judge_attention, run_step
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS
from tests.suites.worlds import near, random_tokens, repeated, world

impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
FP32 = torch.float32
SPEC = flowlib.Spec(page_size=4, head_dim=8, group_size=2, num_kv_heads=2, kv_dtype=FP32, top_k=2, max_pages=16)


@impls
def test_pitfall_01_opposite_queries_of_a_group_and_heads_that_need_other_pages(impl):
    """The group {+u, -u} has the mean 0; each head's page is found, in each kv head its own."""
    k = torch.zeros(40, 2, 8)
    hot = {0: (2, 5), 1: (3, 7)}  # kv head: page for +u, page for -u
    for head, (plus, minus) in hot.items():
        k[4 * plus : 4 * plus + 4, head] = 1.0
        k[4 * minus : 4 * minus + 4, head] = -1.0
    u = torch.ones(8)
    q = torch.stack([u, -u, u, -u])[None]
    for flow in ("gqa_quest_sparse_attention", "gqa_block_sparse_attention", "gaussian_sparse_attention"):
        out = world(flow, SPEC, [40], k=[k]).step(q, impl)
        assert out.pages[0].tolist() == [[0, 2, 5, 9], [0, 3, 7, 9]], flow


@impls
def test_pitfall_02_query_heads_read_their_own_kv_head(impl):
    spec = SPEC.replace(group_size=6)
    v = torch.tensor([0.0, 1.0])[None, :, None].expand(40, 2, 8)
    made = world("gqa_quest_sparse_attention", spec, [40, 7], v=[v, v[:7]])
    expected = torch.tensor([0.0] * 6 + [1.0] * 6)[None, :, None].expand(2, 12, 8)
    assert near(made.step(impl=impl).o, expected)
    assert near(flowlib.dense(made.queries(), made.pool, made.batch, impl=impl).o, expected)


def test_pitfall_03_heads_that_do_not_divide_are_refused():
    """33 query heads over 2 kv heads can't be said in a spec, and 33 heads in a query are refused."""
    with refused(OptionError, "Spec: group_size is 16.5, expected an integer of at least 1"):
        flowlib.Spec(group_size=33 / 2, num_kv_heads=2)
    made = world("gqa_quest_sparse_attention", SPEC.replace(group_size=16), [40])
    for heads in (33, 31):
        with refused(ShapeError, f"step: 'q' is [1, {heads}, 8], expected [1, 32, 8]"):
            made.step(torch.zeros(1, heads, 8))
    assert issubclass(ShapeError, ValueError)


@impls
def test_pitfall_04_alibi_slopes_belong_to_query_heads(impl):
    """Keys of 0 leave the slopes alone to decide: 0 attends evenly, 8 to the last token."""
    spec = SPEC.replace(alibi_slopes=(0.0, 8.0, 0.0, 8.0), top_k=8)
    tokens = 20
    v = repeated([float(t) for t in range(tokens)], spec, 8)
    made = world("gqa_quest_sparse_attention", spec, [tokens], k=[torch.zeros(tokens, 2, 8)], v=[v])
    out = made.step(torch.zeros(1, 4, 8), impl)
    weights = torch.exp(8.0 * torch.arange(tokens).double() - 8.0 * (tokens - 1))
    last = float((weights * torch.arange(tokens)).sum() / weights.sum())
    for head, wanted in enumerate((9.5, last, 9.5, last)):
        assert near(out.o[0, head], torch.full((8,), wanted)), head


@impls
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 32])
def test_pitfall_05_any_group_size(group, impl):
    plan = flowlib.profile(flowlib.build("quest"), SPEC.replace(group_size=group, kv_dtype=torch.bfloat16))
    made = scene(plan, [61, 13])
    run = run_step(made, impl, made.pool_by(impl), made.q)
    for label, (verdict, where) in judge_attention(run).items():
        assert verdict.ok, f"{label}, {where}: {verdict}"


@impls
def test_pitfall_06_layers_with_other_numbers_of_kv_heads(impl):
    """Every layer has a plan of its own: how a list is split follows its own heads, not the model's."""
    wide = SPEC.replace(page_size=16, top_k=62, max_pages=512)
    spread = {heads: num_splits(64, 16, heads) for heads in (1, 4)}
    assert spread[1] >= spread[4] > 1
    for heads in (1, 4):
        plan = flowlib.profile(flowlib.build("quest"), wide.replace(num_kv_heads=heads))
        assert plan.allocate(1, 64, "cpu").num_splits == num_splits(plan.max_selected, 16, heads)
    for heads in (1, 4, 1):
        spec = SPEC.replace(num_kv_heads=heads)
        made = world("quest", spec, [40])
        made.judged(made.step(impl=impl), made.queries(), impl)


def mass_kept(made, out) -> torch.Tensor:
    """Share of dense attention's mass that each kv head's page list holds, the mean over its query heads."""
    full = flowlib.dense(made.queries(), made.pool, made.batch, dtype=torch.float64)
    share = (out.lse - full.lse).exp()
    return share.view(len(share), made.plan.spec.num_kv_heads, -1).mean(-1)


def test_pitfall_07_recall_of_each_kv_head_can_be_told():
    """A list shared by 8 query heads keeps less than one a head; the step says how much."""
    kept = {}
    for group in (1, 8):
        spec = SPEC.replace(group_size=group, kv_dtype=FP32, max_pages=64)
        made = world("quest", spec, [200])
        kept[group] = mass_kept(made, made.step())
        assert kept[group].shape == (1, 2)
        covering = world("quest", spec.replace(top_k=50), [200])
        assert near(mass_kept(covering, covering.step()), torch.ones(1, 2, dtype=torch.float64))
    assert (kept[8] < 1).all()
    assert (kept[8] > 0).all()
    assert float(kept[1].mean()) > float(kept[8].mean())


@impls
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 576])
def test_pitfall_08_head_dimensions_that_are_no_powers_of_two(head_dim, impl):
    spec = SPEC.replace(head_dim=head_dim, v_head_dim=head_dim - 24, num_kv_heads=1, kv_dtype=torch.bfloat16)
    made = scene(flowlib.profile(flowlib.build("quest"), spec), [45])
    run = run_step(made, impl, made.pool_by(impl), made.q)
    for label, (verdict, where) in judge_attention(run).items():
        assert verdict.ok, f"{label}, {where}: {verdict}"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_pitfall_09_the_head_dimension_asked_for_is_used(head_dim):
    made = world("quest", SPEC.replace(head_dim=head_dim, v_head_dim=40), [20])
    assert made.plan.fields["k_max"].shape == (1, head_dim)
    assert (made.pool.k.shape[-1], made.pool.v.shape[-1]) == (head_dim, 40)
    assert made.step().o.shape == (1, 4, 40)
    with refused(ShapeError, f"expected [1, 4, {head_dim}]"):
        made.step(torch.zeros(1, 4, head_dim // 2))


@impls
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 128])
def test_pitfall_10_page_sizes(page_size, impl):
    spec = SPEC.replace(page_size=page_size, num_kv_heads=1)
    made = scene(flowlib.profile(flowlib.build("quest"), spec), [page_size * 6 + (page_size + 1) // 2])
    run = run_step(made, impl, made.pool_by(impl), made.q)
    assert run.out.lengths.tolist() == [[4]]
    assert all(verdict.ok for verdict, _ in judge_attention(run).values())


def test_pitfall_10_a_page_size_that_is_too_large_is_refused():
    with refused(OptionError, "Spec: page_size is 256, expected an integer from 1 to 128"):
        SPEC.replace(page_size=256)


@impls
def test_pitfall_11_a_page_larger_than_a_tile(impl):
    """A page of 128 tokens of 256 channels is read in several tiles; one of 512 is refused, not compiled to nothing."""
    spec = SPEC.replace(page_size=128, head_dim=256, num_kv_heads=1, top_k=1, kv_dtype=torch.bfloat16)
    made = scene(flowlib.profile(flowlib.build("quest"), spec), [128 * 4 + 77])
    run = run_step(made, impl, made.pool_by(impl), made.q)
    assert all(verdict.ok for verdict, _ in judge_attention(run).values())
    with refused(OptionError, "page_size is 512, expected an integer from 1 to 128"):
        spec.replace(page_size=512)


@impls
@pytest.mark.parametrize("page_size", [3, 16, 48, 100])
def test_pitfall_12_pages_that_no_tile_divides(page_size, impl):
    """Of one request the answer is the same however it is paged, where the budget covers it."""
    tokens = 200
    spec = SPEC.replace(page_size=page_size, top_k=100, max_pages=128)
    k, v = random_tokens(spec, [tokens])
    made = world("quest", spec, [tokens], k=k, v=v)
    q = made.queries()
    out = made.step(q, impl)
    assert out.lengths.tolist() == [[-(-tokens // page_size)] * 2]
    made.judged(out, q, impl)
    whole = world("quest", spec.replace(page_size=16), [tokens], k=k, v=v).step(q)
    if impl == "reference":
        assert near(out.o, whole.o)


def test_pitfall_12_sub_blocks_that_do_not_divide_a_page_are_refused():
    flow = flowlib.build("lserve_sparse_attention")
    assert flowlib.profile(flow, SPEC.replace(page_size=48)).fields["k_max"].shape == (3, 8)
    with refused(OptionError, "page_size is 40, expected at most 16 or a multiple of it"):
        flowlib.profile(flow, SPEC.replace(page_size=40))
