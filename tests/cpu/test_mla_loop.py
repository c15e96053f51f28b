"""Latent prefill in chunks is the same as one causal attention over everything; kernels interpreted."""

import dataclasses

import pytest
import torch

import flowlib
from flowlib import mla
from flowlib.mla import prefill
from tests.suites.mla_loop import ALL, cases, check, mutations, name, pairs

FEW = [dataclasses.replace(case, heads=2) for case in ALL if case.name != "128 heads"]
"""For interpreted kernels."""


@pytest.mark.parametrize(("case", "schedule"), pairs(ALL), ids=name)
def test_reference(case, schedule):
    assert check(case, schedule, "reference", "cpu").attention == "reference"


@pytest.mark.parametrize(("case", "schedule"), pairs(cases.SMALL_CASES), ids=name)
def test_reference_with_small_sizes(case, schedule):
    check(case, schedule, "reference", "cpu")


@pytest.mark.parametrize("shape", cases.BACKEND_SHAPES)
def test_reference_of_long_requests(shape):
    if shape != "large prefill":  # the experiment has it
        check(cases.backend_case(shape, *cases.BACKEND_SHAPES[shape], 2), "packed", "reference", "cpu")


@pytest.mark.parametrize(("case", "schedule"), pairs(FEW), ids=name)
def test_kernels(case, schedule):
    assert check(case, schedule, "triton", "cpu").attention == "triton"


@pytest.mark.parametrize("case", cases.SMALL_CASES[8:16], ids=name)
def test_kernels_with_small_sizes(case):
    check(case, "packed", "triton", "cpu")


def test_kernels_with_16_heads():
    check(ALL[0], "packed", "triton", "cpu")


@pytest.mark.parametrize("case", ALL, ids=name)
def test_the_algorithm_is_exact(case):
    """In float64 chunks, schedules and merges leave rounding alone."""
    made = cases.problem(case, dtype=torch.float64)
    for _, schedule in pairs([case]):
        assert made.error(mutations.run(made, schedule).o) <= 1e-14


def test_gather_and_merge_by_kernels_attention_by_the_reference():
    done = check(FEW[2], "packed", "triton", "cpu", attention="reference")
    assert done.attention == "reference"


def test_only_the_context_of_each_request_is_read_and_only_rows_in_need_are_projected():
    """Unowned slots are NaN and the table's tail no page, in every case; here the rows that the callback sees."""
    made = cases.problem(FEW[6])
    seen = []

    def up_project(latent):
        seen.append(len(latent))
        assert latent.isfinite().all()
        return made.up_project(latent)

    case = made.case
    context = mla.build_chunked_context(case.context, case.query_start_loc, 32, 16)
    given = made.q, made.k, made.v, made.cache, made.block_table, context, up_project
    done = mla.chunked_prefill(*given, scale=case.sizes.scale)
    assert made.error(done.o) <= cases.GATE
    assert tuple(seen) == context.seq_tot


def test_context_of_a_request_without_queries_costs_nothing():
    case = cases.Case("idle", (300, 20), (0, 3), 2, 64)
    made = cases.problem(case)
    context = mla.build_chunked_context(case.context, case.query_start_loc, 64, 16)
    assert context.num_chunks == 5
    seen = []

    def up_project(latent):
        seen.append(len(latent))
        return made.up_project(latent)

    given = made.q, made.k, made.v, made.cache, made.block_table, context, up_project
    assert made.error(mla.chunked_prefill(*given, scale=case.sizes.scale).o) <= cases.GATE
    assert len(seen) == 1


def test_no_tokens_at_all():
    q = torch.empty(0, 2, 192)
    cache, table = torch.empty(1, 16, 576), torch.empty(0, 1, dtype=torch.int32)
    for impl in ("reference", "triton"):
        context = mla.build_chunked_context([], [0], 64, 16)
        done = mla.chunked_prefill(q, q, q[..., :128], cache, table, context, lambda x: (x, x), scale=1.0, impl=impl)
        assert done.o.shape == (0, 2, 128)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_strided_queries_keys_values_cache_table_and_output(impl):
    case = dataclasses.replace(ALL[8 - 1], heads=2)
    made = cases.problem(case)

    def spread(x):
        wide = torch.empty(*(2 * n for n in x.shape[:-1]), x.shape[-1] + 64, dtype=x.dtype)
        if not x.is_floating_point():
            wide.fill_(-9)
        view = wide[tuple(slice(0, 2 * n, 2) for n in x.shape[:-1])][..., : x.shape[-1]]
        return view.copy_(x)

    def up_project(latent):
        k, v = made.up_project(latent)
        return spread(k), spread(v)

    context = mla.build_chunked_context(case.context, case.query_start_loc, 48, 16)
    given = [spread(x) for x in (made.q, made.k, made.v, made.cache, made.block_table)]
    out, workspace = spread(made.q[..., :128]), spread(torch.empty(48, 576, dtype=torch.bfloat16))
    done = mla.chunked_prefill(
        *given, context, up_project, scale=case.sizes.scale, out=out, workspace=workspace, impl=impl
    )
    assert done.o is out
    assert made.error(out) <= cases.GATE


def test_layers_share_a_context_and_a_workspace():
    """And two batches in turn: nothing is kept between calls but what belongs to the context."""
    pieces = []
    workspace = torch.empty(128, 576, dtype=torch.bfloat16)
    for case in (FEW[2], FEW[4]):
        made = cases.problem(case)
        context = mla.build_chunked_context(case.context, case.query_start_loc, 128, 16)
        pieces.append((made, context))
    for made, context in pieces * 2:
        given = made.q, made.k, made.v, made.cache, made.block_table, context, made.up_project
        done = mla.chunked_prefill(*given, scale=made.case.sizes.scale, workspace=workspace)
        assert made.error(done.o) <= cases.GATE


def test_the_up_projection_of_a_checkpoint():
    case = FEW[0]
    made = cases.problem(case, dtype=torch.float64)
    latent = cases.lcg(1, 7, 576)
    k, v = mla.up_projection(made.weight, 2)(latent)
    wanted_k, wanted_v = cases.projected(dataclasses.replace(case, dtype=torch.float64), made.weight, latent)
    assert torch.allclose(k, wanted_k, rtol=0, atol=1e-12)
    assert torch.allclose(v, wanted_v, rtol=0, atol=1e-12)
    assert [x.shape for x in mla.up_projection(made.weight, 2)(latent[:0])] == [(0, 2, 192), (0, 2, 128)]
    low = mla.up_projection(made.weight.float(), 2)(latent.to(torch.bfloat16))
    assert {x.dtype for x in low} == {torch.bfloat16}


def test_partial_results_are_merged_in_fp32():
    """The log-sum-exp and the accumulator; a bf16 accumulator would round once a chunk."""
    made = cases.problem(FEW[4])
    kept = []
    stock = prefill.merge_attn_states

    def spy(*args, **options):
        kept.append({x.dtype for x in args})
        return stock(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "merge_attn_states", spy)
        mutations.run(made)
    assert kept == [{torch.float32}] * 3


def test_the_package_is_reached_from_flowlib():
    assert flowlib.mla.chunked_prefill is mla.chunked_prefill
    assert set(mla.__all__) <= set(dir(mla))
