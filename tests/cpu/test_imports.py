"""What importing flowlib costs and brings in; each in a process of its own."""

import sys

import pytest

from tests.processes import python

REFERENCE_STEP = """
import sys
sys.modules["triton"] = None
import torch, flowlib
plan = flowlib.profile(flowlib.build({name!r}), flowlib.Spec(kv_dtype=torch.float32, page_size=4, head_dim=8, top_k=1))
pool = flowlib.PagedPool(plan, num_pages=6)
pool.write(torch.randn(24, 2, 8), torch.randn(24, 2, 8), torch.arange(24))
batch = flowlib.Batch(torch.arange(6, dtype=torch.int32)[None], torch.tensor([23], dtype=torch.int32))
out = plan.step(torch.randn(1, 8, 8), pool, batch)
assert out.o.isfinite().all() and out.lengths.max() <= plan.max_selected < 6
assert flowlib.dense(torch.randn(1, 8, 8), pool, batch).o.isfinite().all()
try:
    plan.step(torch.randn(1, 8, 8), pool, batch, impl="triton")
except flowlib.errors.BackendError as error:
    print(error)
"""


def test_import_brings_in_no_optional_or_heavy_package():
    imported = set(python("-c", "import sys, flowlib; print(*{m.split('.')[0] for m in sys.modules})").split())
    alone = set(python("-c", "import sys, torch; print(*{m.split('.')[0] for m in sys.modules})").split())
    assert not imported & {"triton", "sglang", "matplotlib", "typer", "rich", "transformers"}
    assert imported - alone - sys.stdlib_module_names == {"flowlib"}, "torch and the standard library only"


def test_import_costs_at_most_300_ms_more_than_torch():
    """Processor time of what comes on top of torch, which other processes on the machine don't change."""
    timed = "import time, torch; t = time.process_time(); import flowlib; print(time.process_time() - t)"
    assert min(float(python("-c", timed)) for _ in range(4)) <= 0.3


@pytest.mark.parametrize("name", ["gqa_block_sparse_attention", "gqa_quest_sparse_attention", "streaming_attention"])
def test_a_reference_step_needs_no_triton(name):
    said = python("-c", f"import flowlib.errors\n{REFERENCE_STEP.format(name=name)}", TRITON_INTERPRET="1")
    assert "needs the package triton, which cannot be imported" in said


def test_triton_on_cpu_tensors_needs_the_interpreter():
    code = (
        "import torch, flowlib, flowlib.errors\n"
        "plan = flowlib.profile(flowlib.build('quest'), flowlib.Spec())\n"
        "pool = flowlib.PagedPool(plan, num_pages=2)\n"
        "{}"
        "try: plan.update(pool, torch.tensor([15]), impl='triton')\n"
        "except flowlib.errors.BackendError as error: print(error)\n"
    )
    said = python("-c", code.format(""), TRITON_INTERPRET="0")
    assert "needs TRITON_INTERPRET=1 set before Triton is imported" in said
    late = "import triton.language, os\nos.environ['TRITON_INTERPRET'] = '1'\n"
    assert "Triton was imported before the variable was set" in python("-c", code.format(late), TRITON_INTERPRET="0")
    early = code.format("") + "print(pool.fields['k_max'].abs().sum().item())\n"
    assert python("-c", early, TRITON_INTERPRET="1").strip() == "0.0"
