"""Gather and merge of latent prefill, kernels interpreted; see tests/suites/mla_pieces.py."""

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
