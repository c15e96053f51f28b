"""The suite of what memory must not change, on a GPU; see tests/suites/memory.py."""

from tests.suites.memory import (  # noqa: F401
    test_a_freed_and_reused_page_shows_no_trace,
    test_a_page_is_summarised_after_all_its_tokens_are_stored,
    test_a_step_reads_storage_that_somebody_else_owns,
    test_addresses_beyond_32_bits,
    test_an_unfinished_page_keeps_its_field,
    test_refresh_mends_a_rewrite_that_missed_the_last_slot,
    test_the_lengths_of_the_suite_reach_past_the_budget,
    test_what_is_not_owned_or_not_written_changes_nothing,
    test_where_the_pages_lie_changes_nothing,
)
