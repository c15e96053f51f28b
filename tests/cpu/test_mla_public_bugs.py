"""Public bug reports about chunked latent prefill: for each the test that would have caught it here, or a reason."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
FLASHINFER, PIECES, ATTEND = "cpu/test_mla_flashinfer.py", "suites/mla_pieces.py", "suites/mla_attend.py"
LOOP, ERRORS, SCHEDULE = "cpu/test_mla_loop.py", "cpu/test_mla_errors.py", "cpu/test_mla_schedule.py"
COMPILE, GPU, MUTATIONS = "compile/test_mla_compile.py", "gpu/test_mla_gpu.py", "cpu/test_mla_mutations.py"

BASE_2 = [
    (FLASHINFER, "test_the_loop_with_a_base_2_kernel_that_writes_garbage_for_absent_requests"),
    (FLASHINFER, "test_the_base_is_measured_not_assumed"), (MUTATIONS, "test_the_gate_sees"),
]  # fmt: skip
TWO_EMPTY_SIDES = [(PIECES, "test_both_sides_empty_give_no_nan"), (PIECES, "test_merge_with_every_infinity")]
EMPTY_ROWS = [
    (FLASHINFER, "test_garbage_for_queries_without_keys_would_be_seen"),
    (ATTEND, "test_queries_of_a_request_without_keys"), (MUTATIONS, "test_the_gate_sees"),
]  # fmt: skip
STRIDES = [
    (PIECES, "test_every_tensor_of_a_merge_has_its_own_strides"),
    (ATTEND, "test_attention_takes_any_strides_and_writes_what_it_is_given"),
    (LOOP, "test_strided_queries_keys_values_cache_table_and_output"),
]  # fmt: skip
PACKING = [(SCHEDULE, "test_the_packed_schedule"), (SCHEDULE, "test_what_holds_for_any_batch")]
FAR = [
    (PIECES, "test_gather_from_pages_beyond_two_to_the_31_elements"),
    (PIECES, "test_merge_beyond_two_to_the_31_elements"), (ATTEND, "test_attention_beyond_two_to_the_31_elements"),
]  # fmt: skip
NO_CONTEXT_OBJECT = [(ERRORS, "test_chunked_prefill")]

REPORTS: dict[str, list[tuple[str, str]] | str] = {
    "vLLM #26042": BASE_2,
    "vLLM #26049": BASE_2,
    "vLLM #52796": BASE_2,
    "SGLang #40903": BASE_2,
    "SGLang #35045": BASE_2,
    "flashinfer #4547": BASE_2,
    "vLLM #27491": TWO_EMPTY_SIDES,
    "vLLM #28181": TWO_EMPTY_SIDES,
    "vLLM #39148": TWO_EMPTY_SIDES,
    "ATOM #1152": TWO_EMPTY_SIDES,
    "vLLM #15492": [
        (PIECES, "test_merge_with_every_infinity"), (FLASHINFER, "test_merging_a_foreign_kernels_empty_rows"),
    ],
    "SGLang #22291": EMPTY_ROWS,
    "SGLang #22688": EMPTY_ROWS,
    "SGLang #10526": EMPTY_ROWS,
    "vLLM #49294": EMPTY_ROWS,
    "vLLM #49334": EMPTY_ROWS,
    "flashinfer #3047": EMPTY_ROWS,
    "local-inference-lab/vllm #15": STRIDES,
    "local-inference-lab/vllm #17": STRIDES,
    "vLLM #42642": STRIDES,
    "vLLM #57012": [(PIECES, "test_merge_with_every_infinity"), (ERRORS, "test_merge_attn_states")],
    "vLLM #46114": [(SCHEDULE, "test_what_holds_for_any_batch"), (PIECES, "test_gather_from_any_position_of_any_page")],
    "vLLM #50497": PACKING,
    "vLLM #50613": PACKING,
    "vLLM #48739": [(COMPILE, "test_lengths_are_no_reason_to_compile_again")],
    "ATOM #1938": "whether a request takes this path at all is a server's decision; the functional API always takes it",
    "vLLM #14069": NO_CONTEXT_OBJECT,
    "vLLM #14009": NO_CONTEXT_OBJECT,
    "SGLang #13658": [(LOOP, "test_layers_share_a_context_and_a_workspace")],
    "SGLang #29008": [(ERRORS, "test_chunked_prefill")],
    "SGLang #14224": [*FAR, (GPU, "test_a_merge_of_more_than_two_to_the_32_elements")],
    "tokenspeed #501": FAR,
    "flashinfer #3136": FAR,
    "aiter #4474": FAR,
    "TensorRT-LLM #19112": [
        (ATTEND, "test_the_log_sum_exp_of_one_key_is_its_score_with_the_whole_scale"),
        (FLASHINFER, "test_a_scale_missing_from_the_log_sum_exp_is_refused_before_the_first_chunk"),
    ],
    "fp8 packed latent rows": [(ERRORS, "test_gather_latent"), (ERRORS, "test_chunked_prefill")],
    "merge launched without num_warps (ATOM)": [(COMPILE, "test_merge")],
}


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_has_a_test_or_a_reason(report):
    answer = REPORTS[report]
    assert answer
    if isinstance(answer, str):
        return
    for file, name in answer:
        text = (HERE / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


def test_suites_run_on_the_cpu_and_on_a_gpu():
    """A test of a suite that no folder imports would never run."""
    for suite in (PIECES, ATTEND):
        names = re.findall(r"^def (test_\w+)\(", (HERE / suite).read_text(), re.MULTILINE)
        assert names
        for folder in (f"cpu/test_{Path(suite).stem}.py", GPU):
            imported = set(re.findall(r"^    (test_\w+),$", (HERE / folder).read_text(), re.MULTILINE))
            assert set(names) <= imported, folder
