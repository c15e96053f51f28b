"""The suite of every op, on a GPU; see tests/suites/ops.py and tests/suites/page_ops.py."""

from tests.suites.ops import (  # noqa: F401
    test_cache_op,
    test_every_exported_op_has_cases,
    test_indexer_op,
)
from tests.suites.page_ops import (  # noqa: F401
    test_a_selection_with_a_budget_of_its_own,
    test_along_the_pages,
    test_fill,
    test_page_position,
    test_reduction_over_the_pages,
    test_reserved,
    test_save,
    test_threshold,
    test_top_k,
    test_top_p,
    test_union,
)
