"""The suite of decoding over a PagedKVCache by kernels, interpreted; see tests/suites/entmax_decode.py."""

from tests.suites.entmax_decode import (  # noqa: F401
    test_a_cache_that_grows_drops_what_kernels_worked_in,
    test_a_tensor_alpha_is_checked_once_a_step,
    test_caches_of_16_bits,
    test_gaussian,
    test_refusals_of_kernels,
    test_statistics_of_8_bits,
    test_the_fixed_threshold_is_the_estimate,
    test_topk,
)
