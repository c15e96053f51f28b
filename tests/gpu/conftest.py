"""The same suites as tests/cpu on a real GPU, kernels compiled: ``python -m pytest tests/gpu``."""

from pathlib import Path

import pytest
import torch

from flowlib.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def gpu(request):
    """Fails where this folder was asked for and there is no GPU; skips where it came along with others."""
    reason = ""
    if not torch.cuda.is_available():
        reason = "tests/gpu needs an NVIDIA GPU, and torch.cuda.is_available() is False"
    elif interpreter.requested() or interpreter.active():
        reason = "tests/gpu needs a process of its own, without TRITON_INTERPRET"
    if reason:
        asked = any("gpu" in Path(argument.partition("::")[0]).parts for argument in request.config.args)
        (pytest.fail if asked else pytest.skip)(reason)


@pytest.fixture
def device():
    """Where the shared suites run."""
    return "cuda"
