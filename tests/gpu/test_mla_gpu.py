"""Latent prefill on a GPU: the suites of tests/cpu, every case of the loop, and tensors too large for a laptop."""

import gc

import pytest
import torch

from flowlib import mla
from flowlib.mla import flashinfer_ragged
from tests.gpu.waiting import waiting_is_an_error
from tests.suites.mla_attend import (  # noqa: F401
    test_attention_beyond_two_to_the_31_elements,
    test_attention_of_other_sizes_and_dtypes,
    test_attention_of_ragged_requests,
    test_attention_over_many_query_tiles,
    test_attention_takes_any_strides_and_writes_what_it_is_given,
    test_queries_of_a_request_without_keys,
    test_the_log_sum_exp_of_one_key_is_its_score_with_the_whole_scale,
)
from tests.suites.mla_loop import ALL, cases, check, checks, name, pairs
from tests.suites.mla_pieces import (  # noqa: F401
    test_an_empty_side_may_hold_anything,
    test_both_sides_empty_give_no_nan,
    test_every_tensor_of_a_merge_has_its_own_strides,
    test_gather_copies_every_bit,
    test_gather_from_any_position_of_any_page,
    test_gather_from_pages_beyond_two_to_the_31_elements,
    test_gather_leaves_other_rows_alone,
    test_gather_takes_any_strides,
    test_merge_beyond_two_to_the_31_elements,
    test_merge_in_place,
    test_merge_into_float8,
    test_merge_makes_an_output_and_needs_no_sum,
    test_merge_of_large_and_distant_sums,
    test_merge_shapes_and_dtypes,
    test_merge_with_every_infinity,
    test_tokens_without_context_are_copied_and_their_prefix_is_not_read,
)

LONG = [cases.backend_case(shape, *cases.BACKEND_SHAPES[shape], 16) for shape in cases.BACKEND_SHAPES]
MANY_HEADS = [cases.backend_case(f"{shape} 128 heads", *cases.BACKEND_SHAPES[shape], 128) for shape in ("mixed small",)]


@pytest.mark.parametrize(("case", "schedule"), pairs([*ALL, *cases.SMALL_CASES, *LONG, *MANY_HEADS]), ids=name)
def test_kernels(case, schedule, device):
    assert check(case, schedule, "triton", device, attention="triton").attention == "triton"


@pytest.mark.parametrize(("case", "schedule"), pairs(ALL), ids=name)
def test_reference(case, schedule, device):
    check(case, schedule, "reference", device)


@pytest.mark.parametrize(("case", "schedule"), pairs([*ALL, LONG[2], LONG[4]]), ids=name)
def test_flashinfer(case, schedule, device):
    reason = flashinfer_ragged.unavailable(torch.bfloat16, (192, 128), torch.device(device))
    if reason:
        pytest.skip(f"FlashInfer {reason}")
    assert check(case, schedule, "triton", device, attention="flashinfer").attention == "flashinfer"
    assert check(case, schedule, "triton", device).attention == "flashinfer", "what auto takes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_log_sum_exp_of_flashinfer_is_to_a_known_base(dtype, device):
    reason = flashinfer_ragged.unavailable(dtype, (192, 128), torch.device(device))
    if reason:
        pytest.skip(f"FlashInfer {reason}")
    assert mla.check_lse_base("flashinfer", dtype=dtype, device=device) in (1.0, pytest.approx(0.6931, abs=1e-4))


def test_the_whole_matrix_of_merges(device):
    wrong = [row.cells for row in checks.check_merge(["triton"], device, full=True).rows if not row.ok]
    assert not wrong


def test_a_merge_of_more_than_two_to_the_32_elements(device):
    """Tokens past 2^32 elements of 128 heads of 128; three tensors of 8.6 GB."""
    tokens, heads, size = 2**32 // (128 * 128) + 8, 128, 128
    if torch.cuda.mem_get_info()[0] < 4 * 2 * tokens * heads * size:
        pytest.skip("needs 35 GB of free GPU memory")
    parts = [torch.zeros(tokens, heads, size, dtype=torch.bfloat16, device=device) for _ in range(2)]
    sums = [torch.zeros(tokens, heads, device=device) for _ in range(2)]
    for i, part in enumerate(parts):
        part[-16:] = cases.lcg(3 + i, 16, heads, size).to(device, torch.bfloat16)
        sums[i][-16:] = cases.lcg(5 + i, 16, heads).to(device, torch.float32)
    out, lse = mla.merge_attn_states(parts[0], sums[0], parts[1], sums[1], out=parts[0], out_lse=sums[0], impl="triton")
    small = [cases.lcg(3 + i, 16, heads, size).to(torch.bfloat16) for i in range(2)]
    small_sums = [cases.lcg(5 + i, 16, heads).float() for i in range(2)]
    o, total = cases.merged(small[0], small_sums[0], small[1], small_sums[1], 16)
    assert checks.distance(out[-16:], o) <= 2 * torch.finfo(torch.bfloat16).eps
    assert checks.distance(lse[-16:], total) <= 1e-5
    assert not out[:-16].any()
    del parts, out
    gc.collect()
    torch.cuda.empty_cache()


def test_a_warm_loop_over_chunks_waits_for_nothing(device):
    """Everything the host needs is in the context: no copy from the device, no synchronisation."""
    case = ALL[4]
    made = cases.problem(case, device)
    weight = made.weight.to(torch.bfloat16)
    context = mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, 16, device=device)
    given = made.q, made.k, made.v, made.cache, made.block_table, context, mla.up_projection(weight, case.heads)
    run = {"scale": case.sizes.scale, "impl": "triton", "attention": "triton"}
    mla.chunked_prefill(*given, **run)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        done = mla.chunked_prefill(*given, **run)
        mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, 16, device=device)
    assert made.error(done.o) <= 5e-2, "the weight is rounded to bf16 here"
