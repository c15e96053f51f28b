"""Updates joined with scoring, on a GPU; see tests/suites/joined.py."""

from tests.suites.joined import (  # noqa: F401
    test_a_table_of_short_rows_is_attended_in_full_and_its_pages_are_updated,
    test_flows_with_state_are_updated_first,
    test_one_launch_is_update_and_step,
)
