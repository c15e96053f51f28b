"""Kernels run in Triton's interpreter here, which Triton decides while it is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.suites.flow_cases import FLOWS

INVARIANTS = ("test_row_invariants.py", "test_memory_invariants.py")
LIKE_ANOTHER = {
    "centered_block_sparse_attention", "gqa_block_sparse_attention", "gqa_h2o_token_sparse_attention",
    "h2o_sparse_attention", "lserve_sparse_attention", "masked_quest_sparse_attention", "quest_sparse_attention",
}  # fmt: skip
"""Flows whose kernels are made of what other flows' kernels are made of."""


def pytest_collection_modifyitems(config, items):
    """Interpreted invariants take minutes: every kind of kernel here, every flow with FLOWLIB_ALL_FLOWS=1 and on a GPU.

    In reference mode, and against its oracle in every mode, each flow is tested.
    """
    assert set(FLOWS) >= LIKE_ANOTHER
    if os.environ.get("FLOWLIB_ALL_FLOWS"):
        return
    spared = [item for item in items if item.path.name in INVARIANTS and _is_like_another(item)]
    config.hook.pytest_deselected(items=spared)
    items[:] = [item for item in items if item not in set(spared)]


def _is_like_another(item):
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("name") in LIKE_ANOTHER and given.get("impl", "triton") == "triton"


@pytest.fixture
def device():
    """Where the shared suites run."""
    return "cpu"
