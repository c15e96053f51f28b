"""The kernels along the pages of a row, and dependent launches, compiled for GPUs on a machine without one."""

import pytest
import torch

from flowlib.runtime import interpreter
from flowlib.testing.compile_only import SHARED_MEMORY_LIMIT, compile_only

pytestmark = pytest.mark.skipif(
    interpreter.requested() or interpreter.active(), reason="TRITON_INTERPRET is set: compile in a process of its own"
)
ROWS, LANES, WIDTH, HEADS = 16, 4, 2048, 8
ROW = {"num_kv_heads": HEADS, "page_size": 16, "bos": 1, "eos": 1}
TARGETS = ["sm_80", "sm_90", "sm_100"]
SPILLS = {("filter_kernel", "sm_80"): 64}
"""Bytes a thread may spill where it is not 0."""


def launches(pages):
    """name: call of a launch function over planes ``[R, n, W]``."""
    from flowlib.kernels import gaussian

    x, y, tau = torch.zeros(ROWS, LANES, WIDTH), torch.zeros(ROWS, LANES, WIDTH), torch.zeros(ROWS, LANES)
    lens = torch.zeros(ROWS // HEADS, dtype=torch.int32)
    margins = {"safety_margin_z": 0.0, "excess": 0.1}
    return {
        "mean": lambda **o: pages.launch_reduce(x, tau, lens, **ROW, reduction="Mean", **o),
        "max": lambda **o: pages.launch_reduce(x, tau, lens, **ROW, reduction="Max", **o),
        "normalize": lambda **o: pages.launch_normalize(x, x, lens, **ROW, squared=True, **o),
        "conv1d": lambda **o: pages.launch_conv1d(x, y, lens, **ROW, weight=(0.5, 1.0, 0.5), **o),
        "keep_top_1": lambda **o: pages.launch_keep_top(x, x, lens, **ROW, k=1, **o),
        "keep_top_192": lambda **o: pages.launch_keep_top(x, x, lens, **ROW, k=192, **o),
        "nucleus": lambda **o: pages.launch_keep_nucleus(x, x, lens, **ROW, p=0.9, softmax_scale=0.1, **o),
        "gaussian": lambda **o: gaussian.launch_gaussian_tau(
            x, y, tau, lens, **ROW, alpha=1.5, mixture=False, **margins, **o
        ),
        "gaussian_mixture": lambda **o: gaussian.launch_gaussian_tau(
            x, y, tau, lens, **ROW, alpha=1.7, mixture=True, **margins, **o
        ),
    }


NAMES = list(launches(None))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_pages_kernel(name, target):
    from flowlib.kernels import pages

    with compile_only(target) as kernels:
        launches(pages)[name]()
    assert len(kernels) == 1
    assert kernels[0].spills <= SPILLS.get((kernels[0].name, target), 0), kernels[0]
    assert kernels[0].shared_bytes <= SHARED_MEMORY_LIMIT[target]


@pytest.mark.parametrize("name", NAMES)
def test_dependent_launch(name):
    """The form that sm_90 and later get."""
    from flowlib.kernels import pages

    with compile_only("sm_90") as kernels:
        launches(pages)[name](pdl=True)
    assert len(kernels) == 1
