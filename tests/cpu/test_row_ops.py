"""The suite of ops with an entry per row, kernels interpreted; see tests/suites/row_ops.py."""

from tests.suites.row_ops import (  # noqa: F401
    test_a_normal_per_page_where_there_is_a_slope,
    test_a_row_op_joins_page_ops,
    test_alibi_slopes,
    test_query_position,
    test_what_reads_a_steps_queries_is_not_called_alone,
)
