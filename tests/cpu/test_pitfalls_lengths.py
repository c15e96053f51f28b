"""Public failures 13 to 21, lengths and budgets; docs/pitfalls.md tells which."""

import pytest
import torch

import flowlib
from flowlib import ops
from flowlib.errors import BatchError, OptionError
from flowlib.testing import fill_nan
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS, differing
from tests.suites.worlds import int32, near, repeated, world

impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
SPEC = flowlib.Spec(
    page_size=4, head_dim=8, group_size=3, num_kv_heads=2, kv_dtype=torch.float32, top_k=2, max_pages=32
)


@impls
def test_pitfall_13_every_length_within_the_budget_is_dense(impl):
    covered = (SPEC.top_k + SPEC.bos + SPEC.eos) * SPEC.page_size
    made = world("quest", SPEC, range(1, covered + 2))
    q = made.queries()
    out = made.step(q, impl)
    made.judged(out, q, impl)
    for row, length in enumerate(range(1, covered + 1)):
        assert out.lengths[row].tolist() == [-(-length // 4)] * 2
    assert out.lengths[covered].tolist() == [4, 4], "one token more: a page of five is left out"


@impls
@pytest.mark.parametrize("length", [40, 17, 64, 65])
def test_pitfall_14_fewer_pages_than_are_reserved(length, impl):
    """Elsewhere: lengths of -8 and -15 tokens. Here a short row attends to all it has."""
    elsewhere = {40: -(16 - 1 - (40 - 1) % 16), 17: -(16 - 1 - (17 - 1) % 16)}
    assert (elsewhere[40], elsewhere[17]) == (-8, -15)
    spec = SPEC.replace(page_size=16, eos=4, bos=0)
    made = world("quest", spec, [length])
    q = made.queries()
    out = made.step(q, impl)
    pages = -(-length // 16)
    assert out.lengths.tolist() == [[pages] * 2]
    assert out.pages[0, 0, :pages].tolist() == list(range(pages))
    made.judged(out, q, impl)


@impls
def test_pitfall_15_the_unfinished_page_is_always_attended(impl):
    """It has no summary, so it can't be scored; leaving it out is refused."""
    with refused(OptionError, "Spec: eos is 0, expected an integer from 1 to", "unfinished last page has no summary"):
        SPEC.replace(eos=0)
    spec = SPEC.replace(page_size=16, bos=0, top_k=1)
    v = repeated([0.0] * 48 + [1.0], spec, 8)
    k = repeated([0.0] * 48 + [100.0], spec, 8)
    out = world("quest", spec, [49], k=[k], v=[v]).step(torch.ones(1, 6, 8), impl)
    assert (out.pages[0] == 3).sum() == 2
    assert near(out.o, torch.ones(1, 6, 8)), "the newest token, alone in its page, holds all the mass"
    assert world("quest", spec, [17]).step(impl=impl).lengths.tolist() == [[2, 2]]


@pytest.mark.parametrize("name", flowlib.list_flows())
def test_pitfall_16_defaults_run(name):
    """Every flow without an option, a spec of defaults but for the page size the flow asks for."""
    flow = flowlib.build(name)
    plan = flowlib.profile(flow, flow.default_spec())
    pool = flowlib.PagedPool(plan, num_pages=2)
    q = torch.zeros(1, plan.spec.num_heads, plan.spec.head_dim, dtype=torch.bfloat16)
    out = plan.step(q, pool, flowlib.Batch(int32([[0, 1]]), int32([1])))
    assert out.lengths.tolist() == [[1] * out.pages.shape[1]]


@impls
@pytest.mark.parametrize("name", ["quest", "block_sparse", "twilight", "streaming"])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_pitfall_17_a_single_page(length, name, impl):
    made = world(name, SPEC, [length])
    out = made.step(impl=impl)
    assert (out.lengths == 1).all()
    assert (out.pages[..., 0] == 0).all()
    if length == 1:
        assert near(out.o, made.v[0].repeat_interleave(3, 1))


@impls
def test_pitfall_18_every_row_has_its_own_length(impl):
    lengths = [1, 15, 16, 17, 4097]
    spec = SPEC.replace(page_size=16, group_size=2, num_kv_heads=1, max_pages=257)
    made = world("quest", spec, lengths)
    q = made.queries()
    together = made.step(q, impl)
    assert together.lengths.flatten().tolist() == [1, 1, 1, 2, 4]
    for row in range(len(lengths)):
        batch = flowlib.Batch(made.batch.page_table[row : row + 1], made.batch.seq_lens[row : row + 1])
        alone = made.step(q[row : row + 1], impl, batch)
        assert torch.equal(alone.pages[0], together.pages[row])
    made.judged(together, q, impl)


@impls
def test_pitfall_19_a_row_of_no_length(impl):
    made = world("quest", SPEC, [0, 30])
    out = made.step(impl=impl)
    assert out.lengths[0].tolist() == [0, 0]
    assert (out.o[0] == 0).all()
    assert (out.lse[0] == -torch.inf).all()
    with refused(BatchError, "Batch: seq_lens has -1, expected lengths of at least 0"):
        flowlib.Batch(made.batch.page_table, int32([-1, 30]))


class Forbidding(flowlib.vFlow):
    """Scores every page -inf."""

    def create_cache(self, page_size, head_dim):
        return {"k_mean": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        ops.CMean(dim=1)(cache["k"], cache["k_mean"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        x = ops.GeMV()(q.mean(dim=1, keepdim=True), cache["k_mean"], ctx=ctx)
        ops.topK()(ops.Add()(x, ops.WhereGreater()(x, x, ctx=ctx), ctx=ctx), o, ctx=ctx)


@impls
def test_pitfall_20_no_page_allowed(impl):
    """Masks are -inf, so nothing forbidden is averaged in: only reserved pages are left, or nothing at all."""
    made = world("quest", SPEC, [40, 0])
    plan = flowlib.profile(Forbidding(), SPEC)
    pool = flowlib.PagedPool(plan, made.pool.num_pages)
    for request in range(2):
        pool.write(made.k[request], made.v[request], made.slots(request))
    out = plan.step(made.queries(), pool, made.batch, impl=impl)
    assert out.pages[0].tolist() == [[0, 9, -1, -1]] * 2
    assert out.o[0].isfinite().all()
    assert (out.o[1] == 0).all()
    assert (out.lse[1] == -torch.inf).all()


@impls
def test_pitfall_21_only_listed_pages_are_read(impl):
    """What a step reads follows the list, not the table's width or the longest row: the rest may be NaN."""
    made = world("quest", SPEC, [30, 100])
    q = made.queries()
    before = made.step(q, impl)
    wide = torch.full((2, 2048), -9, dtype=torch.int32)
    wide[:, : made.batch.width] = made.batch.page_table
    batch = flowlib.Batch(wide, made.batch.seq_lens)
    for row, own in enumerate(made.pages):
        listed = {p for lane in before.pages[row].tolist() for p in lane if p >= 0}
        for logical, page in enumerate(own):
            if logical not in listed:
                fill_nan(made.pool.k[4 * page : 4 * page + 4])
                fill_nan(made.pool.v[4 * page : 4 * page + 4])
    assert not differing(before, made.step(q, impl, batch), columns=made.batch.width)
