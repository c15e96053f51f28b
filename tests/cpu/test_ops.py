"""The suite of every op, kernels interpreted; see tests/suites/ops.py."""

from tests.suites.ops import (  # noqa: F401
    test_cache_op,
    test_every_exported_op_has_cases,
    test_indexer_op,
    test_reserved,
    test_softmax,
    test_top_k,
)
