"""How context is cut into chunks: known numbers, and what holds for any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowlib
from flowlib import mla
from flowlib.errors import OptionError
from tests.refusals import refused
from tests.suites.mla_pieces import cases, checks


def build(context, workspace=1024, page=16, schedule="packed", queries=None):
    queries = [4] * len(context) if queries is None else queries
    return mla.build_chunked_context(context, cases.offsets(queries), workspace, page, schedule)


@pytest.mark.parametrize(("given", "rows"), checks.WORKSPACE_CASES.items(), ids=str)
def test_workspace_rows(given, rows):
    assert flowlib.mla.workspace_rows(*given) == rows


@pytest.mark.parametrize(("context", "queries", "workspace", "page", "wanted"), checks.EVEN_CASES, ids=str)
def test_the_even_grid(context, queries, workspace, page, wanted):
    built = build(context, workspace, page, "even", queries)
    for name, value in wanted.items():
        got = getattr(built, name)
        assert (got.tolist() if isinstance(got, torch.Tensor) else got) == value, name


def test_the_owner_of_each_row_of_the_even_grid():
    built = build((700, 512, 256, 600), schedule="even")
    assert built.token_to_seq.shape == (3, 1024)
    assert built.token_to_seq[2].tolist() == [0] * 188 + [3] * 88 + [0] * (1024 - 276)
    assert built.chunk_total_token == built.seq_tot == (1024, 768, 276)
    tensors = (built.starts, built.lens, built.cu_seq_lens, built.token_to_seq, built.query_start_loc)
    assert {x.dtype for x in tensors} == {torch.int32}


def test_an_even_grid_needs_a_page_of_each_request_and_a_packed_one_a_single_page():
    with refused(OptionError, "workspace_rows is 32", "expected at least 256", "64 tokens for each of the 4 requests"):
        build((64,) * 4, 32, 64, "even")
    with refused(OptionError, "workspace_rows is 32", "expected at least one page of 64 tokens"):
        build((64,) * 4, 32, 64)
    assert build((64,) * 4, 64, 64).num_chunks == 4
    assert build((0, 0), 1, 64).num_chunks == build((0, 0), 1, 64, "even").num_chunks == 0


@pytest.mark.parametrize(("context", "workspace", "continues"), checks.PACKED_CASES, ids=str)
def test_the_packed_schedule(context, workspace, continues):
    built = build(context, workspace)
    assert built.continues == continues
    assert not checks.faults(built, context, workspace, 16)


def test_the_packed_schedule_fills_the_arrays_of_the_grid():
    built = build((2048, 32, 32), queries=(4, 2, 3))
    assert built.starts.tolist() == [[0, 0, 0], [1024, 0, 0], [0, 0, 0]]
    assert built.lens.tolist() == [[1024, 0, 0], [1024, 0, 0], [0, 32, 32]]
    assert built.cu_seq_lens.tolist() == [[0, 1024, 1024, 1024], [0, 1024, 1024, 1024], [0, 0, 32, 64]]
    assert built.token_to_seq[2].tolist() == [1] * 32 + [2] * 32 + [0] * 960
    assert (built.seq_tot, built.max_seq_lens) == ((1024, 1024, 64), (1024, 1024, 32))
    assert (built.max_context_chunk, built.max_token_num_over_chunk, built.num_prefills) == (1024, 1024, 3)
    last = built.chunks[2]
    assert (last.requests, last.rows, last.tokens) == ((1, 3), (4, 9), 64)
    assert (last.batch.query_offsets, last.batch.kv_offsets) == ((0, 2, 5), (0, 32, 64))
    assert (last.batch.query_start_loc.tolist(), last.batch.kv_start_loc.tolist()) == ([0, 2, 5], [0, 32, 64])


def test_requests_without_context_among_others():
    built = build((64, 0, 64, 0))
    assert (built.covered, built.prefill_tokens_with_context, built.gaps) == ((0, 2), 12, ((4, 8),))
    built = build((0, 0, 5, 0, 0, 7, 0), queries=(1, 2, 3, 4, 0, 5, 6))
    assert (built.covered, built.prefill_tokens_with_context, built.gaps) == ((2, 5), 15, ((0, 3), (6, 10)))
    assert build((0, 300), queries=(7, 11)).prefill_tokens_with_context == 18, "the public formula says 7"
    assert build(()).num_prefills == build(()).num_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    context=st.lists(st.integers(0, 700), max_size=9), page=st.sampled_from([1, 3, 16, 64]),
    pages=st.integers(1, 40), extra=st.integers(0, 63), schedule=st.sampled_from(["packed", "even"]),
)  # fmt: skip
def test_what_holds_for_any_batch(context, page, pages, extra, schedule):
    workspace, sharing = pages * page + extra, sum(n > 0 for n in context)
    if schedule == "even" and workspace // max(sharing, 1) < page:
        with pytest.raises(OptionError):
            build(context, workspace, page, schedule)
        return
    built = build(context, workspace, page, schedule)
    if schedule == "packed":
        assert not checks.faults(built, context, workspace, page)
        assert built.max_context_chunk == max(built.max_seq_lens, default=0)
    assert all(longest <= total <= workspace for longest, total in zip(built.max_seq_lens, built.seq_tot, strict=True))
    assert built.lens.sum(0).tolist() == context or not built.num_chunks
    if sharing * page <= workspace:
        assert built.num_chunks <= build(context, workspace, page, "even").num_chunks
    for i, chunk in enumerate(built.chunks):
        lens = built.lens[i]
        assert built.cu_seq_lens[i].tolist() == [0, *lens.cumsum(0).tolist()]
        assert built.token_to_seq[i, : chunk.tokens].tolist() == torch.repeat_interleave(lens).tolist()
        assert (built.starts[i][lens > 0] % page == 0).all()
        first, end = chunk.requests
        assert int(lens[first:end].sum()) == chunk.tokens == built.seq_tot[i]
        assert chunk.rows == (4 * first, 4 * end)


def test_lengths_may_be_tensors_and_index_tensors_begin_at_multiples_of_16_bytes():
    lens, loc = torch.tensor([37, 0, 80]), torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    built = mla.build_chunked_context(lens, loc, 64, 16)
    assert built.lens.tolist() == build((37, 0, 80), 64, queries=(3, 2, 4)).lens.tolist()
    for x in (built.starts, built.lens, built.cu_seq_lens, built.token_to_seq, built.chunks[0].batch.kv_start_loc):
        assert x.data_ptr() % 16 == built.starts.data_ptr() % 16
