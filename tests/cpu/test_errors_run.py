"""Queries, pools, batches and slots that do not fit are refused before anything runs or is stored."""

import pytest
import torch

import flowlib
from flowlib.compiler.load import source_path
from flowlib.core.formats import Side
from flowlib.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from flowlib.ops import CMax, GeMV, Mean, Multiply, topK
from tests.processes import python
from tests.refusals import refused

PAGE, HEADS, GROUP, DIM = 4, 2, 3, 8
SIZES = {"page_size": PAGE, "head_dim": DIM, "v_head_dim": 5, "group_size": GROUP, "num_kv_heads": HEADS}
SPEC = flowlib.Spec(**SIZES, top_k=1, max_pages=6)
TOKENS = 20


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def plan():
    return flowlib.profile(flowlib.build("gqa_quest_sparse_attention"), SPEC)


@pytest.fixture
def pool(plan):
    pool = flowlib.PagedPool(plan, num_pages=7)
    k, v = (torch.randn(TOKENS, HEADS, d, dtype=torch.bfloat16) for d in (DIM, 5))
    pool.write(k, v, torch.arange(TOKENS))
    return pool


@pytest.fixture
def batch():
    return flowlib.Batch(ints([[0, 1, 2, 3, 4, 99]]), ints([18]))


@pytest.fixture
def q():
    return torch.randn(1, HEADS * GROUP, DIM, dtype=torch.bfloat16)


def test_the_step_the_others_break_runs(plan, pool, batch, q):
    assert plan.step(q, pool, batch).lengths.tolist() == [[3, 3]]


# -- a step


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_queries_of_the_wrong_shape(plan, pool, batch, q, impl):
    with refused(ShapeError, "step: 'q' is [1, 5, 8], expected [1, 6, 8] [rows, H_q, D]"):
        plan.step(q[:, :5], pool, batch, impl=impl)
    with refused(ShapeError, "dense: 'q' is [2, 6, 8], expected [1, 6, 8]"):
        flowlib.dense(q.expand(2, -1, -1), pool, batch, impl=impl)


def test_queries_of_the_wrong_dtype(plan, pool, batch, q):
    with refused(FormatError, "step: 'q' is torch.float32, expected torch.bfloat16 to match the spec's kv_dtype"):
        plan.step(q.float(), pool, batch)


def test_a_table_too_narrow_for_a_row(plan, pool, q):
    batch = flowlib.Batch(ints([[0, 1, 2, 3]]), ints([18]))
    with refused(BatchError, "step: row 0 has 18 tokens = 5 pages, more than the 4 columns of the page table"):
        plan.step(q, pool, batch)


def test_a_row_longer_than_the_plan(pool, batch, q):
    narrow = flowlib.profile(flowlib.build("quest"), SPEC.replace(max_pages=4))
    with refused(BatchError, "step: row 0 has 18 tokens = 5 pages, more than the 4 max_pages of the spec"):
        narrow.step(q, pool, batch)


@pytest.mark.parametrize("page", [7, -1])
def test_a_page_that_is_not_in_the_pool(plan, pool, q, page):
    batch = flowlib.Batch(ints([[0, 1, page, 3, 4]]), ints([18]))
    with refused(BatchError, f"step: page_table has page {page}, expected from 0 to 6"):
        plan.step(q, pool, batch)


def test_a_pool_of_another_plan(plan, pool, batch, q):
    other = flowlib.profile(flowlib.build("gqa_block_sparse_attention"), SPEC)
    with refused(BatchError, "step: the pool holds ", "k_max", "this plan needs ", "centroid", "PagedPool(plan, ...)"):
        other.step(q, pool, batch)
    wider = flowlib.profile(flowlib.build("quest"), SPEC.replace(page_size=5))
    with refused(BatchError, "step: the pool holds {'k': (4, ", "this plan needs {'k': (5, "):
        wider.step(q, pool, batch)


def test_an_implementation_there_is_not(plan, pool, batch, q):
    for call in (lambda: plan.step(q, pool, batch, impl="cuda"), lambda: flowlib.dense(q, pool, batch, impl="cuda"),
                 lambda: plan.update(pool, torch.tensor([3]), impl="cuda")):  # fmt: skip
        with refused(OptionError, "impl is 'cuda', expected 'reference' or 'triton'"):
            call()


def test_a_dtype_for_triton(plan, pool, batch, q):
    with refused(OptionError, "step: dtype is for impl='reference'; impl='triton' accumulates in fp32"):
        plan.step(q, pool, batch, impl="triton", dtype=torch.float64)


# -- a batch

WRONG_BATCHES = [
    (torch.zeros(1, 6), ints([18]), None, "page_table is torch.float32 [1, 6], expected an int32 tensor of rank 2"),
    (ints([0, 1]), ints([18]), None, "page_table is torch.int32 [2], expected an int32 tensor of rank 2"),
    (ints([[0, 1]]), torch.tensor([8]), None, "seq_lens is torch.int64 [1], expected an int32 tensor of rank 1"),
    (ints([[0, 1]]), [8], None, "seq_lens is list, expected an int32 tensor of rank 1"),
    (ints([[0, 1]]), ints([8, 8]), None, "seq_lens has 2 values, expected 1, one per row of page_table"),
    (ints([[0, 1]]), ints([-8]), None, "seq_lens has -8, expected lengths of at least 0"),
    (ints([[0, 1]]), ints([8]), ints([1, 1]), "q_lens has 2 values, expected 1, one per request"),
    (ints([[0, 1]]), ints([8]), ints([9]), "q_lens is [9], expected from 0 to the request's seq_len [8]"),
    (ints([[0, 1]]), ints([8]), torch.tensor([1]), "q_lens is torch.int64 [1], expected an int32 tensor of rank 1"),
]


@pytest.mark.parametrize(("table", "lengths", "q_lens", "text"), WRONG_BATCHES, ids=[c[-1][:24] for c in WRONG_BATCHES])
def test_a_batch_that_is_none(table, lengths, q_lens, text):
    with refused(BatchError, f"Batch: {text}"):
        flowlib.Batch(table, lengths, q_lens)


# -- a write


def contents(pool) -> list[torch.Tensor]:
    return [x.clone().view(torch.int16) for x in (pool.k, pool.v, *pool.fields.values())]


WRONG_WRITES = [
    ((3, HEADS, DIM), (4, HEADS, 5), [0, 1, 2, 3], ShapeError, "write: 'k' is [3, 2, 8], expected [4, 2, 8]"),
    ((4, HEADS, DIM), (4, HEADS, DIM), [0, 1, 2, 3], ShapeError, "write: 'v' is [4, 2, 8], expected [4, 2, 5]"),
    ((1, HEADS, DIM), (1, HEADS, 5), [28], BatchError, "write: loc has 28, expected from 0 to 27"),
    ((2, HEADS, DIM), (2, HEADS, 5), [3, -1], BatchError, "write: loc has -1, expected from 0 to 27"),
    ((1, HEADS, DIM), (1, HEADS, 5), [3.0], BatchError, "write: loc is torch.float32 [1], expected int64 [T]"),
]


@pytest.mark.parametrize(("k", "v", "loc", "kind", "text"), WRONG_WRITES, ids=[c[-1][:26] for c in WRONG_WRITES])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_refused_write_stores_nothing(pool, k, v, loc, kind, text, impl):
    before = contents(pool)
    with refused(kind, text):
        pool.write(torch.ones(k), torch.ones(v), torch.tensor(loc), impl=impl)
    assert all(map(torch.equal, contents(pool), before))


def test_a_write_of_integers_or_by_an_unknown_implementation_stores_nothing(pool):
    before = contents(pool)
    k, v, loc = torch.ones(4, HEADS, DIM), torch.ones(4, HEADS, 5), torch.arange(4)
    with refused(FormatError, "write: 'v' is torch.int64, expected a floating dtype"):
        pool.write(k, v.long(), loc)
    with refused(OptionError, "impl is 'cuda', expected 'reference' or 'triton'"):
        pool.write(k, v, loc, impl="cuda")
    assert all(map(torch.equal, contents(pool), before))


def test_a_refresh_of_a_page_that_is_not_in_the_pool(pool):
    with refused(BatchError, "refresh: pages has 7, expected from 0 to 6"):
        pool.refresh(torch.tensor([0, 7]))


# -- a pool


def test_a_pool_without_pages(plan):
    with refused(BatchError, "PagedPool: num_pages is 0, expected at least 1"):
        flowlib.PagedPool(plan, num_pages=0)


@pytest.mark.parametrize(
    ("broken", "kind", "text"),
    [
        ({"k": torch.zeros(28, HEADS, 9)}, ShapeError, "KVStore: 'k' is [28, 2, 9], expected [28, 2, 8]"),
        ({"v": torch.zeros(24, HEADS, 5)}, ShapeError, "KVStore: 'v' is [24, 2, 5], expected [28, 2, 5]"),
        ({"k": torch.zeros(28, HEADS, DIM)}, FormatError, "KVStore: 'k' is torch.float32, expected torch.bfloat16"),
        ({"k": torch.zeros(28, DIM, HEADS, dtype=torch.bfloat16).transpose(1, 2)}, FormatError,
         "KVStore: the last axis of 'k' has stride 2, expected 1"),
        ({"fields": {}}, ShapeError, "KVStore: fields are [], expected ['k_max', 'k_min']"),
    ],
    ids=["shape", "length", "dtype", "stride", "fields"],
)  # fmt: skip
def test_storage_that_does_not_fit(plan, pool, broken, kind, text):
    with refused(kind, text):
        flowlib.KVStore(plan, **{"k": pool.k, "v": pool.v, "fields": pool.fields, **broken})


# -- a context


def test_a_context_without_a_batch(plan, pool):
    with refused(BatchError, "RunContext: batch is missing"):
        flowlib.RunContext(plan, pool)
    with refused(BatchError, "this context has no batch"):
        cache = flowlib.RunContext(plan, pool, side=Side.CACHE)
        flowlib.as_vtensor(torch.ones(1, 1, 1), flowlib.FORMAT.BATCHED, cache)


def test_a_context_of_another_flow(plan, pool, batch, q):
    flow, ctx = flowlib.build("quest_sparse_attention"), flowlib.RunContext(plan, pool, batch)
    with refused(FormatError, "QuestSparseAttention: this context runs the plan of GQAQuestSparseAttention"):
        flow.forward_indexer(q, flowlib.SelectionHandle(ctx), {}, ctx)
    with refused(FormatError, "QuestSparseAttention.forward_cache: ctx is NoneType, expected a flowlib context"):
        flow.forward_cache({}, torch.tensor([3]), None)


@pytest.mark.parametrize(
    ("length", "format", "text"),
    [
        (3, "BATCHED", "axis 0 is 3, expected 2 (rows * num_kv_heads) for BATCHED"),
        (2, "RAGGED", "axis 0 is 2, expected 12 (rows * num_kv_heads * table width) for RAGGED"),
        (7, "PAGED", "axis 0 is 7, expected 14 (num_pages * num_kv_heads) for PAGED"),
    ],
)
def test_a_tensor_with_the_wrong_number_of_entries(plan, pool, batch, length, format, text):
    with refused(ShapeError, f"as_vtensor: {text}"):
        flowlib.as_vtensor(torch.ones(length, 1, 4), flowlib.FORMAT[format], flowlib.RunContext(plan, pool, batch))


def test_what_is_no_vtensor(plan, pool, batch):
    ctx = flowlib.RunContext(plan, pool, batch)
    with refused(FormatError, "as_vtensor: 'tensor' is [2, 4], expected a tensor [L, r, c]"):
        flowlib.as_vtensor(torch.ones(2, 4), flowlib.FORMAT.BATCHED, ctx)
    with refused(FormatError, "as_vtensor: format is 'BATCHED', expected FORMAT.BATCHED, FORMAT.RAGGED"):
        flowlib.as_vtensor(torch.ones(2, 1, 4), "BATCHED", ctx)


def test_arguments_of_two_contexts(plan, pool, batch):
    one, other = (flowlib.RunContext(plan, pool, batch) for _ in range(2))
    x = flowlib.as_vtensor(torch.ones(2, 1, 4), flowlib.FORMAT.BATCHED, one)
    y = flowlib.as_vtensor(torch.ones(2, 1, 4), flowlib.FORMAT.BATCHED, other)
    with refused(FormatError, "Multiply: arguments of different contexts", "tests/cpu/test_errors_run.py:"):
        Multiply()(x, y)
    with refused(FormatError, "Multiply: arguments of different contexts"):
        Multiply()(x, x, ctx=other)
    with refused(FormatError, "Multiply: no context: pass ctx=ctx, or an argument that is a vTensor"):
        Multiply()(torch.ones(2, 1, 4), torch.ones(2, 1, 4))


def test_an_op_called_alone_with_wrong_arguments(plan, pool, batch):
    ctx, cache = flowlib.RunContext(plan, pool, batch), flowlib.RunContext(plan, pool, side=Side.CACHE)
    x = flowlib.as_vtensor(torch.ones(2, 3, 4), flowlib.FORMAT.BATCHED, ctx)
    page = flowlib.as_vtensor(torch.ones(14, PAGE, DIM), flowlib.FORMAT.PAGED, cache)
    with refused(ShapeError, "GeMV: axis 1 of 'x' is 3, expected 1", "tests/cpu/test_errors_run.py:"):
        GeMV()(x, x)
    with refused(FormatError, "topK: 'x' is vTensor [B, 1, 1], expected RAGGED or PAGED"):
        topK()(Mean(dim=2)(Mean(dim=1)(x)), flowlib.SelectionHandle(ctx))
    with refused(FormatError, "CMax: loc is NoneType, expected int64 token slots [T]"):
        CMax(dim=1)(page, None)
    with refused(ShapeError, "CMax: 'out' is vTensor [P, 4, 8], expected inner sizes [1, 8]"):
        CMax(dim=1)(page, page, loc=torch.tensor([3]))


# -- the machine

UNWRITABLE = """
import torch, flowlib
from flowlib.errors import BackendError
plan = flowlib.profile(flowlib.build("quest"), flowlib.Spec())
pool = flowlib.PagedPool(plan, num_pages=2)
before = pool.clone()
try:
    pool.write(torch.ones(16, 2, 128), torch.ones(16, 2, 128), torch.arange(16), impl="triton")
except BackendError as error:
    print(error, flush=True)
print(torch.equal(pool.k, before.k))
"""


def test_a_cache_directory_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = python("-c", UNWRITABLE, FLOWLIB_CACHE_DIR=str(tmp_path / "file"), TRITON_INTERPRET="1")
    assert f"generated kernels can't be written to {tmp_path / 'file' / 'kernels'}: " in said
    assert "set FLOWLIB_CACHE_DIR to a directory that can be written" in said
    assert said.splitlines()[-1] == "True", "a refused write stores nothing"


def test_generated_files_go_where_they_are_told(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWLIB_CACHE_DIR", str(tmp_path))
    assert source_path(plan.program.source).parent == tmp_path / "kernels"
    assert not (tmp_path / "kernels").exists(), "profiling writes nothing"
    monkeypatch.delenv("FLOWLIB_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source_path(plan.program.source).parent == tmp_path / "flowlib" / "kernels"


def test_triton_on_a_device_it_does_not_know(plan):
    pool = flowlib.PagedPool(plan, num_pages=2, device="meta")
    with refused(BackendError, "impl='triton' on meta tensors: expected cuda"):
        plan.update(pool, torch.tensor([3], device="meta"), impl="triton")
