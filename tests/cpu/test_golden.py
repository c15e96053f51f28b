"""The source the compiler generates, compared exactly.

After a wanted change: ``pytest tests/cpu/test_golden.py --update-golden``, then read the difference.
"""

from pathlib import Path

import pytest
import torch

import flowlib

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SPECS = {
    "block_sparse_attention": flowlib.Spec(page_size=16, head_dim=128, group_size=4, num_kv_heads=8),
    "gqa_block_sparse_attention": flowlib.Spec(page_size=16, head_dim=96, group_size=3, num_kv_heads=2),
    "gqa_quest_sparse_attention": flowlib.Spec(
        page_size=48, head_dim=64, group_size=7, num_kv_heads=1, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, bos=0, eos=2
    ),
    "gqa_h2o_token_sparse_attention": flowlib.Spec(page_size=1, head_dim=80, group_size=4, num_kv_heads=2),
    "quest_sparse_attention": flowlib.Spec(
        head_dim=96, group_size=4, num_kv_heads=2, summary_dtype=torch.float8_e4m3fn
    ),
    "twilight_attention": flowlib.Spec(head_dim=128, group_size=1, num_kv_heads=4, kv_dtype=torch.float16),
}


def generated(name: str) -> str:
    return flowlib.profile(flowlib.build(name), SPECS[name]).program.source


@pytest.mark.parametrize("name", SPECS)
def test_generated_source(name, request):
    path = GOLDEN / f"{name}.py"
    if request.config.getoption("--update-golden"):
        path.write_text(generated(name))
    assert generated(name) == path.read_text(), f"see the docstring of {Path(__file__).name}"


def test_every_golden_file_is_compared():
    assert {p.stem for p in GOLDEN.glob("*.py")} == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_generated_source_is_readable(name):
    lines = generated(name).splitlines()
    assert all(len(line) <= 160 for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert lines[0].startswith('"""')
