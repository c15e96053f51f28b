"""Selection from rows that several programs share, on a GPU; see tests/suites/select_wide.py."""

from tests.suites.select_wide import (  # noqa: F401
    narrow,
    test_calls_that_follow_each_other,
    test_larger_blocks_where_there_are_many_rows,
    test_lists_are_those_of_one_program,
    test_nothing_but_minus_infinity_leaves_the_reserved_pages,
    test_rows_of_a_real_size,
    test_the_scratch_serves_call_after_call,
    test_without_scratch_it_says_what_is_missing,
)
