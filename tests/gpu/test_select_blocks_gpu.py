"""Selection by the best of each block, on a GPU; see tests/suites/select_blocks.py."""

from tests.suites.select_blocks import (  # noqa: F401
    short,
    test_calls_that_follow_each_other,
    test_lists_are_cut_at_their_room,
    test_lists_are_those_of_one_program,
    test_rows_of_a_real_size,
)
