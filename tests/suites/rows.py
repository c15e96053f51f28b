"""What each row gets: dense attention where the budget covers it, its own budget otherwise, whatever runs beside it."""

import dataclasses

import pytest
import torch

import flowlib
from flowlib.runtime.plan import StepOutput
from flowlib.testing import fill_nan, rounding_step, scene
from flowlib.testing.stages import Run, judge_attention
from tests.suites.flow_cases import CASES, FLOWS, STATEFUL, plan_for
from tests.suites.same import IMPLEMENTATIONS, LENGTHS, SPEC, bits, differing, int32, page_counts, tokens, total

flows = pytest.mark.parametrize("name", FLOWS)
impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def in_float64(impl: str) -> dict[str, object]:
    return {"impl": impl, "dtype": torch.float64 if impl == "reference" else None}


def scene_of(name: str, device: str, spec: flowlib.Spec = SPEC, lengths=LENGTHS):
    plan = plan_for(name, spec)
    return scene(plan, [n * plan.spec.page_size // spec.page_size for n in lengths], device=device)


def whole_rows(made, out: StepOutput) -> StepOutput:
    """An output that attended to every page of its rows."""
    spec, widest = made.spec, made.batch.width
    counts = torch.tensor(page_counts([seen for _, seen in made.rows], spec.page_size))
    logical = torch.arange(widest)
    pages = torch.where(logical < counts[:, None], logical, -1)[:, None].expand(-1, spec.num_kv_heads, -1)
    lists = (pages, counts[:, None].expand(-1, spec.num_kv_heads))
    lse, tau, mass = (None if x is None else x.cpu() for x in (out.lse, out.tau, out.mass))
    return StepOutput(out.plan, out.o.cpu(), lse, *lists, tau=tau, mass=mass)


def assert_dense(made, impl: str, out: StepOutput) -> None:
    run = Run(impl, made, made.q.cpu(), {}, made.pool, whole_rows(made, out))
    for label, (verdict, where) in judge_attention(run).items():
        assert verdict.ok, f"{label}, {where}: {verdict}"


@flows
@impls
def test_a_row_within_the_budget_gets_dense_attention(name, impl, device):
    covered = SPEC.top_k + SPEC.bos + SPEC.eos
    own = {"streaming_attention": {"bos": 3}, "entmax_gaussian_attention": {"dense_below": covered * SPEC.page_size}}
    spec = SPEC.replace(**own.get(name, {}))  # what these two keep does not follow from a budget
    made = scene_of(name, device, spec, [SPEC.page_size * covered - i for i in (0, 1, 7, 17, 24, 31)])
    out = made.plan.step(made.q, made.pool_by(impl), made.batch, **in_float64(impl))
    counts = torch.tensor(page_counts(made.lengths, made.spec.page_size))
    assert torch.equal(out.lengths.cpu().long(), counts[:, None].expand_as(out.lengths))
    assert_dense(made, impl, out)


@impls
@pytest.mark.parametrize("case", CASES, ids=[c.label for c in CASES])
def test_dense(case, impl, device):
    """`flowlib.dense` against the oracle, in every geometry."""
    plan = flowlib.profile(flowlib.build("streaming"), case.spec)
    made = scene(plan, case.lengths, device=device, q_lens=case.q_lens)
    out = flowlib.dense(made.q, made.pool, made.batch, **in_float64(impl))
    assert_dense(made, impl, StepOutput(plan, out.o, out.lse, out.o, out.o))


@flows
@impls
def test_rows_do_not_see_each_other(name, impl, device):
    """A batch gives what its requests give one at a time: the same pages, and numbers that differ by a rounding."""
    made = scene_of(name, device)
    together = made.plan.step(made.q, made.pool_by(impl), made.batch, **in_float64(impl))
    alone = made.pool_by(impl)
    for row in range(made.batch.size):
        batch = flowlib.Batch(made.batch.page_table[row : row + 1], made.batch.seq_lens[row : row + 1])
        one = made.plan.step(made.q[row : row + 1], alone, batch, **in_float64(impl))
        assert torch.equal(one.pages[0], together.pages[row])
        assert torch.equal(one.lengths[0], together.lengths[row])
        near(one.o[0], together.o[row])
        near(total(one)[0], total(together)[row])


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal up to one rounding of fp32 (of the output's own dtype if that is coarser)."""
    coarser = torch.float32 if one.dtype is torch.float64 else one.dtype
    got, wanted = one.cpu().double(), other.cpu().double()
    assert ((got == wanted) | ((got - wanted).abs() <= rounding_step(wanted, coarser))).all()


@flows
@impls
def test_several_query_tokens_equal_single_steps(name, impl, device):
    plan = plan_for(name, SPEC)
    if plan.state_fields:
        pytest.skip(f"state field {plan.state_fields[0]!r}: see test_several_query_tokens_are_refused_with_state")
    size = plan.spec.page_size
    lengths, q_lens = [10 * size + 1, 7 * size, 2 * size, size], [3, 1, 0, 2 if size > 1 else 1]
    made = scene(plan, lengths, device=device, q_lens=q_lens)
    store = made.pool_by(impl)
    together = plan.step(made.q, store, made.batch, **in_float64(impl))
    assert together.o.shape[0] == sum(q_lens) == len(made.rows)
    for row, (request, seen) in enumerate(made.rows):
        table = torch.full_like(made.batch.page_table[:1], -9)
        own = made.pages[request][: -(-seen // size)]
        table[0, : len(own)] = int32(own, device)
        one = plan.step(made.q[row : row + 1], store, flowlib.Batch(table, int32([seen], device)), **in_float64(impl))
        assert torch.equal(one.pages[0], together.pages[row])
        near(one.o[0], together.o[row])
        near(total(one)[0], total(together)[row])


@flows
def test_several_query_tokens_are_refused_with_state(name, device):
    plan = plan_for(name, SPEC)
    made = scene(plan, [plan.spec.page_size * 5], device=device, q_lens=[2])
    if not plan.state_fields:
        assert plan.step(made.q, made.pool, made.batch).o.shape == (2, plan.spec.num_heads, plan.spec.dv)
        return
    before = made.pool.clone()
    with pytest.raises(flowlib.errors.BatchError, match=f"q_lens with state field '{plan.state_fields[0]}'"):
        plan.step(made.q, made.pool, made.batch)
    for field, value in before.fields.items():
        assert torch.equal(bits(value), bits(made.pool.fields[field]))


@flows
@impls
def test_a_row_without_tokens_gives_nothing(name, impl, device):
    made = scene_of(name, device)
    empty = LENGTHS.index(0)
    out = made.plan.step(made.q, made.pool_by(impl), made.batch, impl=impl)
    assert (out.o[empty] == 0).all()
    assert (total(out)[empty] == float("-inf")).all()
    assert out.mass is None or (out.mass[empty] == 0).all()
    assert (out.pages[empty] == -1).all()
    assert (out.lengths[empty] == 0).all()


@flows
@impls
def test_an_empty_batch(name, impl, device):
    plan = plan_for(name, SPEC)
    spec, pool = plan.spec, flowlib.PagedPool(plan, num_pages=2, device=device)
    nobody = flowlib.Batch(torch.zeros(0, 5, dtype=torch.int32, device=device), int32([], device))
    q = torch.zeros(0, spec.num_heads, spec.head_dim, dtype=spec.field_dtype, device=device)
    out = plan.step(q, pool, nobody, impl=impl)
    assert (out.o.shape, total(out).shape) == ((0, spec.num_heads, spec.dv), (0, spec.num_heads))
    assert out.pages.shape == (0, spec.num_kv_heads * plan.lanes, plan.max_selected)
    assert flowlib.dense(q, pool, nobody, impl=impl).o.shape == out.o.shape
    pool.write(*tokens(spec, 0, 1, device), torch.zeros(0, dtype=torch.int64, device=device), impl=impl)


@flows
@impls
def test_a_wider_table_changes_nothing(name, impl, device):
    made = scene_of(name, device)
    wide = torch.full((made.batch.size, made.spec.max_pages + 77), -3, dtype=torch.int32, device=device)
    wide[:, : made.batch.width] = made.batch.page_table
    batch = flowlib.Batch(wide, made.batch.seq_lens)
    before = made.plan.step(made.q, made.pool_by(impl), made.batch, impl=impl)
    after = made.plan.step(made.q, made.pool_by(impl), batch, impl=impl)
    assert not differing(before, after, columns=made.batch.width)
    if after.scores is not None:
        assert after.scores[..., made.batch.width :].isnan().all()


@flows
def test_launching_again_into_the_same_buffers_equals_fresh_steps(name, device):
    made = scene_of(name, device)
    plan, again, fresh = made.plan, made.pool_by("triton"), made.pool_by("triton")
    size, lengths = plan.spec.page_size, made.batch.seq_lens
    out = plan.allocate(made.batch.size, made.batch.width, device)
    for seq_lens in (lengths, lengths.roll(1).clamp(max=2 * size) * (lengths > 0), lengths - (lengths > size).int()):
        batch = flowlib.Batch(made.batch.page_table, torch.minimum(seq_lens, lengths))
        plan.launch(made.q, again, batch, out)
        assert not differing(out, plan.step(made.q, fresh, batch, impl="triton"))
    for field, value in fresh.fields.items():
        assert torch.equal(bits(value), bits(again.fields[field]))


@impls
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1 / 3, 1.0])
def test_the_budget_of_a_row_follows_its_length(ratio, impl, device):
    spec = SPEC.replace(page_size=1, top_k=2, top_k_ratio=ratio, max_pages=64, bos=1, eos=2)
    made = scene(flowlib.profile(flowlib.build("quest_sparse_attention"), spec), [0, 1, 3, 4, 6, 20, 64], device=device)
    out = made.plan.step(made.q, made.pool_by(impl), made.batch, impl=impl)
    wanted = [min(n, 3 + max(2, (n * round(ratio * 65536)) >> 16)) for n in made.lengths]
    assert out.lengths.tolist() == [[n, n] for n in wanted]
    assert out.pages.shape[-1] == made.plan.max_selected >= max(wanted)


@flows
@impls
def test_short_rows_can_be_kept_dense(name, impl, device):
    if name in STATEFUL:
        with pytest.raises(flowlib.errors.OptionError, match="dense_below is 41, expected 0 for a flow with state"):
            plan_for(name, SPEC.replace(dense_below=41, top_k=1))
        return
    plan = plan_for(name, SPEC.replace(dense_below=41, top_k=1))
    made = scene(plan, [41, 42, 8, 93], device=device)
    out = plan.step(made.q, made.pool_by(impl), made.batch, impl=impl)
    counts = page_counts(made.lengths, plan.spec.page_size)
    full = [bool((out.lengths[row] == counts[row]).all()) for row in range(4)]
    assert full[0]
    assert full[2]
    assert not full[3] or name == "entmax_gaussian_attention", "which keeps whatever may have weight"
    assert (out.pages[0, :, : counts[0]].cpu() == torch.arange(counts[0])).all()


@pytest.mark.parametrize("name", ["block_sparse_attention", "quest_sparse_attention", "gqa_quest_sparse_attention"])
@impls
def test_ties_go_to_the_lower_page_and_bad_scores_to_none(name, impl, device):
    """Queries of zero tie every page; a page whose field is NaN is not chosen, not even to fill the budget."""
    made = scene_of(name, device)
    store = made.pool_by(impl)
    out = made.plan.step(torch.zeros_like(made.q), store, made.batch, impl=impl)
    assert out.pages[0, 0].tolist() == [0, 1, 2, 11], "the first page, two tied ones, the last page"
    for field in store.fields.values():
        fill_nan(field[list(made.pages[0][2:])])
        field[list(made.pages[0][2:])] = float("nan")
    out = made.plan.step(made.q, store, made.batch, impl=impl)
    assert out.pages[0].tolist() == [[0, 1, 11, -1]] * SPEC.num_kv_heads
    assert out.lengths[0].tolist() == [3] * SPEC.num_kv_heads
    assert out.o[0].isfinite().all()


@impls
def test_a_flow_called_with_a_context_runs_its_plan(impl, device):
    made = scene_of("gqa_quest_sparse_attention", device)
    ctx = flowlib.RunContext(made.plan, made.pool_by(impl), made.batch, impl=impl)
    handle, rows = flowlib.SelectionHandle(ctx), made.batch.size * SPEC.num_kv_heads
    q = flowlib.as_vtensor(made.q.reshape(rows, SPEC.group_size, SPEC.head_dim), flowlib.FORMAT.BATCHED, ctx)
    made.plan.flow.forward_indexer(q, handle, {}, ctx)
    out = made.plan.step(made.q, made.pool_by(impl), made.batch, impl=impl)
    assert torch.equal(handle.pages, out.pages)
    assert torch.equal(handle.lengths, out.lengths)


def test_outputs_are_of_the_dtype_asked_for(device):
    made = scene_of("quest_sparse_attention", device)
    store = made.pool
    assert made.plan.step(made.q, store, made.batch).o.dtype is torch.bfloat16
    assert made.plan.step(made.q, store, made.batch, impl="triton").o.dtype is torch.bfloat16
    for dtype in (torch.float32, torch.float64):
        assert made.plan.step(made.q, store, made.batch, dtype=dtype).o.dtype is dtype
    assert {f.name for f in dataclasses.fields(StepOutput)} >= {"o", "lse", "pages", "lengths"}
