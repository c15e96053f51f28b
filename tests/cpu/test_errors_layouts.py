"""Strides, devices and kinds of arguments: what a kernel would misread is refused before anything is read or stored."""

import pytest
import torch

import flowlib
from flowlib.core.formats import FORMAT, Side
from flowlib.errors import BatchError, FormatError, OptionError, ShapeError
from flowlib.ops import CMax
from tests.refusals import refused

PAGE, HEADS, GROUP, DIM, PAGES = 4, 2, 3, 8, 7
SPEC = flowlib.Spec(page_size=PAGE, head_dim=DIM, group_size=GROUP, num_kv_heads=HEADS, top_k=1, max_pages=6)
TOKENS = PAGES * PAGE
IMPLS = ["reference", "triton"]
impls = pytest.mark.parametrize("impl", IMPLS)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each."""
    return torch.stack([x, torch.full_like(x, -5)], -1)[..., 0]


def tokens(count: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, HEADS, DIM), torch.randn(count, HEADS, DIM)


def contents(pool) -> list[torch.Tensor]:
    return [x.clone().view(torch.int16) for x in (pool.k, pool.v, *pool.fields.values())]


def plan_of(name: str = "gqa_block_sparse_attention", **changes):
    return flowlib.profile(flowlib.build(name), SPEC.replace(**changes))


@pytest.fixture
def pool():
    pool = flowlib.PagedPool(plan_of(), PAGES)
    pool.write(*tokens(), torch.arange(TOKENS))
    return pool


@pytest.fixture
def batch():
    return flowlib.Batch(ints([[0, 1, 2, 3, 4, 99], [5, 6, 99, 99, 99, 99]]), ints([18, 7]))


@pytest.fixture
def q():
    return torch.randn(2, HEADS * GROUP, DIM, dtype=torch.bfloat16)


# -- strides


def test_a_transposed_page_table(batch):
    turned = batch.page_table.t().contiguous().t()
    with refused(
        BatchError, "Batch: the columns of page_table have stride 2, expected 1; pass page_table.contiguous()"
    ):
        flowlib.Batch(turned, batch.seq_lens)
    with refused(BatchError, "Batch: the columns of page_table have stride 2"):
        flowlib.Batch(strided(batch.page_table), batch.seq_lens)


def test_strided_lengths(batch):
    with refused(BatchError, "Batch: seq_lens has stride 2, expected 1; pass seq_lens.contiguous()"):
        flowlib.Batch(batch.page_table, strided(batch.seq_lens))


@impls
def test_layouts_that_every_kernel_reads(pool, batch, q, impl):
    """Rows of a wider table, a table of one column, queries that are part of a wider tensor."""
    wide = torch.full((2, 9), 77, dtype=torch.int32)
    wide[:, :6] = batch.page_table
    beside = torch.full((2, HEADS * GROUP, 2 * DIM), float("nan"), dtype=q.dtype)
    beside[..., :DIM] = q
    expected = pool.plan.step(q, pool, batch, impl=impl)
    given = pool.plan.step(beside[..., :DIM], pool, flowlib.Batch(wide[:, :6], batch.seq_lens), impl=impl)
    assert torch.equal(given.pages, expected.pages)
    assert torch.equal(given.o, expected.o)
    column = flowlib.Batch(strided(ints([[3], [5]])), ints([2, 4]))
    assert pool.plan.step(q, pool, column, impl=impl).pages[..., 0].eq(0).all()


@impls
def test_queries_whose_last_axis_is_strided(pool, batch, q, impl):
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    with refused(FormatError, "step: the last axis of 'q' has stride 6, expected 1; pass q.contiguous()"):
        pool.plan.step(turned, pool, batch, impl=impl)
    with refused(FormatError, "dense: the last axis of 'q' has stride 6, expected 1"):
        flowlib.dense(turned, pool, batch, impl=impl)


@impls
def test_a_write_at_strided_slots(impl):
    k, v = tokens()
    plain, gaps = (flowlib.PagedPool(plan_of(), PAGES) for _ in range(2))
    loc = torch.arange(TOKENS)
    plain.write(k, v, loc, impl=impl)
    gaps.write(k, v, strided(loc), impl=impl)
    assert all(map(torch.equal, contents(gaps), contents(plain)))
    assert (gaps.fields["centroid"] != 0).any(-1).all()


@impls
def test_an_update_at_strided_slots(pool, impl):
    with refused(BatchError, "update: loc has stride 2, expected 1; pass loc.contiguous()"):
        pool.plan.update(pool, strided(torch.tensor([3, 7])), impl=impl)


@impls
def test_an_op_called_alone_at_strided_slots(pool, impl):
    ctx = flowlib.RunContext(pool.plan, pool, impl=impl, side=Side.CACHE)
    x = flowlib.as_vtensor(torch.randn(PAGES * HEADS, PAGE, DIM), FORMAT.PAGED, ctx)
    loc = torch.tensor([3, 11])
    one, other = (CMax(dim=1)(x, None, loc=given).data for given in (loc, strided(loc)))
    assert torch.equal(one.nan_to_num(-9.0), other.nan_to_num(-9.0))
    assert (one.view(PAGES, -1).isfinite().all(-1)).nonzero().flatten().tolist() == [0, 2]
    with refused(BatchError, "CMax: loc has 28, expected from -1 to 27"):
        CMax(dim=1)(x, None, loc=torch.tensor([28]))


# -- slots and pages

NOT_SLOTS = [
    ([3], "is list, expected int64 ["),
    (torch.tensor([[3]]), "is torch.int64 [1, 1], expected int64 ["),
    (torch.tensor([3.0]), "is torch.float32 [1], expected int64 ["),
    (torch.tensor([True]), "is torch.bool [1], expected int64 ["),
    (torch.tensor([-2]), "has -2, expected from "),
    (torch.tensor([10**9]), "has 1000000000, expected from "),
    (torch.tensor([3], device="meta"), "is on meta, expected cpu, where the pool lies"),
]


@pytest.mark.parametrize(("values", "text"), NOT_SLOTS, ids=[text[:22] for _, text in NOT_SLOTS])
@impls
def test_what_is_no_tensor_of_slots(pool, values, text, impl):
    before = contents(pool)
    with refused(BatchError, f"update: loc {text}"):
        pool.plan.update(pool, values, impl=impl)
    with refused(BatchError, f"write: loc {text}"):
        pool.write(*tokens(1), values, impl=impl)
    with refused(BatchError, f"refresh: pages {text}"):
        pool.refresh(values, impl=impl)
    assert all(map(torch.equal, contents(pool), before))


@impls
def test_padding_updates_nothing_and_is_no_slot_to_write_at(impl):
    pool = flowlib.PagedPool(plan_of(), PAGES)
    pool.k.copy_(torch.randn_like(pool.k))
    pool.plan.update(pool, torch.tensor([-1, 7, -1]), impl=impl)
    assert pool.fields["centroid"].flatten(1).any(-1).nonzero().flatten().tolist() == [1]
    before = contents(pool)
    for call in (lambda: pool.write(*tokens(1), torch.tensor([-1]), impl=impl),
                 lambda: pool.refresh(torch.tensor([-1]), impl=impl)):  # fmt: skip
        with refused(BatchError, "has -1, expected from 0 to "):
            call()
    assert all(map(torch.equal, contents(pool), before))


@impls
def test_an_update_of_the_pool_of_another_plan(pool, impl):
    with refused(BatchError, "update: the pool holds ", "centroid", "this plan needs ", "k_max", "PagedPool(plan"):
        plan_of("gqa_quest_sparse_attention").update(pool, torch.tensor([3]), impl=impl)


# -- devices and kinds


@impls
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_write_from_another_device_stores_nothing(pool, name, impl):
    before, given = contents(pool), dict(zip("kv", tokens(), strict=True))
    given[name] = given[name].to("meta")
    with refused(BatchError, f"write: '{name}' is on meta, expected cpu"):
        pool.write(**given, loc=torch.arange(TOKENS), impl=impl)
    assert all(map(torch.equal, contents(pool), before))


@pytest.mark.parametrize("name", ["v", "centroid"])
def test_storage_on_two_devices(pool, name):
    given = {"k": pool.k, "v": pool.v, "fields": dict(pool.fields)}
    place = given if name == "v" else given["fields"]
    place[name] = place[name].to("meta")
    with refused(BatchError, f"KVStore: '{name}' is on meta, expected cpu, where the pool's K lies"):
        flowlib.KVStore(pool.plan, **given)


def test_a_write_without_values(pool):
    before = contents(pool)
    with refused(FormatError, "write: 'v' is NoneType, expected a tensor [28, 2, 8] [T, H_kv, D]"):
        pool.write(tokens()[0], None, torch.arange(TOKENS))
    assert all(map(torch.equal, contents(pool), before))


@impls
def test_a_step_of_things_that_are_none(pool, batch, q, impl):
    plan, pair = pool.plan, (batch.page_table, batch.seq_lens)
    with refused(FormatError, "step: 'q' is NoneType, expected a tensor [2, 6, 8] [rows, H_q, D]"):
        plan.step(None, pool, batch, impl=impl)
    with refused(FormatError, "step: the pool is NoneType, expected flowlib.PagedPool(plan, num_pages)"):
        plan.step(q, None, batch, impl=impl)
    with refused(FormatError, "step: 'batch' is tuple, expected flowlib.Batch(page_table, seq_lens)"):
        plan.step(q, pool, pair, impl=impl)
    with refused(FormatError, "dense: the pool is NoneType, expected a flowlib.PagedPool or KVStore"):
        flowlib.dense(q, None, batch, impl=impl)
    with refused(FormatError, "dense: 'batch' is tuple, expected flowlib.Batch"):
        flowlib.dense(q, pool, pair, impl=impl)
    with refused(FormatError, "update: the pool is NoneType"):
        plan.update(None, torch.tensor([3]), impl=impl)


def test_a_profile_of_things_that_are_none():
    flow = flowlib.build("quest")
    for given, text in ((type(flow), "the class GQAQuestSparseAttention"), ("quest", "'quest'"), (None, "None")):
        with refused(FormatError, f"profile: 'flow' is {text}; pass an instance: flowlib.build(name) or FlowClass()"):
            flowlib.profile(given, SPEC)
    with refused(FormatError, "profile: 'spec' is NoneType, expected flowlib.Spec(...)"):
        flowlib.profile(flow, None)


# -- dense, several query tokens, contexts


def test_a_dtype_for_dense_triton(pool, batch, q):
    with refused(OptionError, "dense: dtype is for impl='reference'; impl='triton' accumulates in fp32"):
        flowlib.dense(q, pool, batch, impl="triton", dtype=torch.float64)
    assert flowlib.dense(q, pool, batch, dtype=torch.float64).o.dtype is torch.float64


def test_state_allows_requests_with_at_most_one_query_token(batch, q):
    plan = plan_of("running_avg_block_sparse_attention")
    pool = flowlib.PagedPool(plan, PAGES)
    pool.write(*tokens(), torch.arange(TOKENS))
    twin = pool.clone()
    single = flowlib.Batch(batch.page_table, batch.seq_lens, ints([1, 0]))
    assert not single.multi_token
    alone = plan.step(q[:1], twin, flowlib.Batch(batch.page_table[:1], batch.seq_lens[:1]))
    assert torch.equal(plan.step(q[:1], pool, single).pages, alone.pages)
    assert all(map(torch.equal, contents(pool), contents(twin)))


@impls
def test_dense_of_several_query_tokens_leaves_the_state_alone(batch, q, impl):
    plan = plan_of("running_avg_block_sparse_attention")
    pool = flowlib.PagedPool(plan, PAGES)
    pool.write(*tokens(), torch.arange(TOKENS))
    several, before = flowlib.Batch(batch.page_table, batch.seq_lens, ints([2, 0])), contents(pool)
    assert several.multi_token
    done = flowlib.dense(q, pool, several, impl=impl)
    alone = flowlib.dense(q[:1], pool, flowlib.Batch(batch.page_table[:1], batch.seq_lens[:1] - 1), impl=impl)
    assert torch.equal(done.o[0], alone.o[0])
    assert all(map(torch.equal, contents(pool), before))
    with refused(BatchError, "step: q_lens with state field "):
        plan.step(q, pool, several, impl=impl)


def near_ties():
    """Two pools, each with its batch and better page: scores 2^24 + 1 and 2^24, in both orders.

    fp32 rounds the first to 2^24, and breaks the tie by position: it is right for one of the two orders.
    """
    spec = flowlib.Spec(page_size=1, head_dim=2, group_size=1, num_kv_heads=1, top_k=1, max_pages=4,
                        kv_dtype=torch.float32)  # fmt: skip
    plan = flowlib.profile(flowlib.build("block_sparse_attention"), spec)
    better, worse = [2.0**24, 1.0], [2.0**24, 0.0]
    chosen = []
    for first, second in ((better, worse), (worse, better)):
        pool = flowlib.PagedPool(plan, 4)
        k = torch.tensor([[0.0, 0.0], first, second, [0.0, 0.0]])[:, None]
        pool.write(k, k, torch.arange(4))
        chosen.append((plan, pool, flowlib.Batch(ints([[0, 1, 2, 3]]), ints([4])), 1 if first is better else 2))
    return chosen


def test_a_reference_context_computes_in_its_dtype():
    right = {torch.float32: 0, torch.float64: 0}
    for plan, pool, batch, best in near_ties():
        for dtype in right:
            ctx = flowlib.RunContext(plan, pool, batch, dtype=dtype)
            o = flowlib.SelectionHandle(ctx)
            q = flowlib.as_vtensor(torch.ones(1, 1, 2), FORMAT.BATCHED, ctx)
            plan.flow.forward_indexer(q, o, {}, ctx)
            right[dtype] += o.pages[0, 0].tolist() == [0, best, 3]
    assert right == {torch.float32: 1, torch.float64: 2}


@impls
def test_a_context_given_queries_of_the_wrong_size(pool, batch, q, impl):
    ctx = flowlib.RunContext(pool.plan, pool, batch, impl=impl)
    o, flow = flowlib.SelectionHandle(ctx), pool.plan.flow
    text = "expected [4, 3, 8] [rows * num_kv_heads, G, D] or [2, 6, 8] [rows, H_q, D]"
    with refused(ShapeError, f"forward_indexer: 'q' is [1, 6, 8], {text}"):
        flow.forward_indexer(q[:1], o, {}, ctx)
    with refused(ShapeError, f"forward_indexer: 'q' is [4, 8, 3], {text}"):
        flow.forward_indexer(q.reshape(4, 8, 3), o, {}, ctx)
    with refused(ShapeError, f"forward_indexer: 'q' is NoneType, {text}"):
        flow.forward_indexer(None, o, {}, ctx)
    flow.forward_indexer(q.reshape(4, 3, 8), o, {}, ctx)
    assert torch.equal(o.pages, pool.plan.step(q, pool, batch, impl=impl).pages)
