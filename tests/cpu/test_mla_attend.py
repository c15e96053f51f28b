"""Ragged attention of latent prefill, kernels interpreted; see tests/suites/mla_attend.py."""

from tests.suites.mla_attend import (  # noqa: F401
    test_attention_beyond_two_to_the_31_elements,
    test_attention_of_other_sizes_and_dtypes,
    test_attention_of_ragged_requests,
    test_attention_over_many_query_tiles,
    test_attention_takes_any_strides_and_writes_what_it_is_given,
    test_queries_of_a_request_without_keys,
    test_the_log_sum_exp_of_one_key_is_its_score_with_the_whole_scale,
)
