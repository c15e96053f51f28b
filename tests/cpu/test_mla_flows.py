"""The suite of flows over MLA latents, kernels interpreted; see tests/suites/mla_flows.py."""

from tests.suites.mla_flows import (  # noqa: F401
    test_a_budget_that_covers_the_context_is_dense,
    test_a_freed_and_reused_page_shows_no_trace,
    test_a_step_reads_latents_that_somebody_else_owns,
    test_a_step_updates_the_pages_its_tokens_finish,
    test_a_users_flow_selects_per_query_head,
    test_every_mla_flow_has_an_independent_oracle,
    test_mla_flow_agrees_with_its_oracle,
    test_what_is_not_owned_or_not_written_changes_nothing,
)
