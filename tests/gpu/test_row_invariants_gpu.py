"""The suite of what each row gets, on a GPU; see tests/suites/rows.py."""

from tests.suites.rows import (  # noqa: F401
    test_a_flow_called_with_a_context_runs_its_plan,
    test_a_row_within_the_budget_gets_dense_attention,
    test_a_row_without_tokens_gives_nothing,
    test_a_wider_table_changes_nothing,
    test_an_empty_batch,
    test_dense,
    test_launching_again_into_the_same_buffers_equals_fresh_steps,
    test_outputs_are_of_the_dtype_asked_for,
    test_rows_do_not_see_each_other,
    test_several_query_tokens_are_refused_with_state,
    test_several_query_tokens_equal_single_steps,
    test_short_rows_can_be_kept_dense,
    test_the_budget_of_a_row_follows_its_length,
    test_ties_go_to_the_lower_page_and_bad_scores_to_none,
)
