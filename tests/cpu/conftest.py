"""Kernels run in Triton's interpreter here, which Triton decides while it is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest


@pytest.fixture
def device():
    """Where the shared suites run."""
    return "cpu"
