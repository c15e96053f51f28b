"""Public failures 22 to 33, batches, launches and selection; docs/pitfalls.md tells which."""

import inspect

import pytest
import torch

import flowlib
from flowlib.kernels import attend, pages, planning, segment, select, select_wide
from flowlib.runtime import execute, interpreter
from tests.processes import ROOT
from tests.suites.flow_cases import plan_for
from tests.suites.same import IMPLEMENTATIONS, bits, differing
from tests.suites.select_scratch import scratch
from tests.suites.worlds import int32, world

interpreter.install()  # some tests below launch kernels themselves
impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
SPEC = flowlib.Spec(page_size=4, head_dim=8, group_size=3, num_kv_heads=2, top_k=2, max_pages=32, max_batch=8)


@impls
@pytest.mark.parametrize("name", ["quest", "running_avg_block_sparse_attention"])
def test_pitfall_22_padded_rows(name, impl):
    """Rows 5 to 7 of a batch of 8 are empty: they give 0, and nothing in the pool is touched for them."""
    made = world(name, SPEC, [37, 20, 44, 9, 61, 30, 30, 30])
    table, lengths = made.batch.page_table.clone(), made.batch.seq_lens.clone()
    table[5:], lengths[5:] = 2**31 - 1, 0
    before = made.pool.clone()
    out = made.step(made.queries(), impl, flowlib.Batch(table, lengths))
    assert (out.o[5:] == 0).all()
    assert out.o[:5].isfinite().all()
    assert torch.equal(bits(made.pool.k), bits(before.k))
    for field, value in made.pool.fields.items():
        for own in made.pages[5:]:
            assert torch.equal(bits(value[list(own)]), bits(before.fields[field][list(own)]))


def test_pitfall_23_nothing_on_the_way_of_a_launch_reads_a_value_on_the_host():
    """What would break under capture is not in the text of any module that a launch runs through."""
    modules = [execute, attend, pages, planning, segment, select]
    source = "".join(inspect.getsource(module) for module in modules) + inspect.getsource(flowlib.Plan.launch)
    for word in (".item(", ".tolist(", ".cpu(", "synchronize", ".numpy("):
        assert word not in source, word
    for launcher in (m for m in modules if m is not execute):
        assert "@triton.jit" in inspect.getsource(launcher)


def test_pitfall_25_a_new_batch_or_length_generates_no_kernel(monkeypatch, tmp_path):
    """After the first step no source file is added; see tests/compile for the compiled variants."""
    monkeypatch.setenv("FLOWLIB_CACHE_DIR", str(tmp_path))
    made = world("quest", SPEC.replace(head_dim=9), [37, 20, 44, 9])  # no other test has these kernels
    made.step(impl="triton")
    first = sorted(p.name for p in tmp_path.rglob("*.py"))
    assert first
    for rows, length in ((1, 13), (3, 20), (4, 9)):
        batch = flowlib.Batch(made.batch.page_table[:rows], torch.minimum(made.batch.seq_lens[:rows], int32([length])))
        made.step(made.queries()[:rows], "triton", batch)
    assert sorted(p.name for p in tmp_path.rglob("*.py")) == first


@pytest.mark.parametrize("name", flowlib.list_flows(mla=False))
def test_pitfall_26_nothing_is_tuned_at_start(name):
    """No autotuning in hand-written or generated kernels, so a cold start compiles each of them once."""
    assert "autotune" not in plan_for(name, SPEC).program.source
    for path in (ROOT / "flowlib" / "kernels").glob("*.py"):
        assert "autotune" not in path.read_text(), path.name


@pytest.mark.parametrize("name", ["quest", "twilight", "block_sparse"])
def test_pitfall_27_the_page_table_changes_between_launches(name):
    """Launching again reads the table as it is then: same buffers, pages moved, the answer of a fresh step."""
    made = world(name, SPEC, [37, 61])
    q, out = made.queries(), made.plan.allocate(2, made.batch.width, "cpu")
    made.plan.launch(q, made.pool, made.batch, out)
    swapped = made.batch.page_table.flip(0).contiguous()
    made.batch.page_table.copy_(swapped)
    made.batch.seq_lens.copy_(made.batch.seq_lens.flip(0))
    made.plan.launch(q, made.pool, made.batch, out)
    fresh = made.step(q, "triton", flowlib.Batch(swapped, int32([61, 37])))
    assert not differing(out, fresh)


@impls
def test_pitfall_29_ties_give_the_same_set_on_every_run(impl):
    """Scores of a few values, and all equal: the lower pages, every time."""
    spec = SPEC.replace(kv_dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 3, (30,), generator=generator) / 100
    k = levels.repeat_interleave(4)[:, None, None].expand(120, 2, 8).contiguous()
    made, flat = world("quest", spec, [120], k=[k]), world("quest", spec, [120], k=[torch.ones(120, 2, 8)])
    q = torch.ones(1, 6, 8)
    first, flat_first = made.step(q, impl), flat.step(q, impl)
    best = sorted(range(1, 29), key=lambda p: (-float(levels[p]), p))[:2]
    assert first.pages[0, 0].tolist() == sorted([0, *best, 29])
    assert flat_first.pages[0, 0].tolist() == [0, 1, 2, 29]
    for _ in range(5):
        assert not differing(first, made.step(q, impl))
        assert not differing(flat_first, flat.step(q, impl))


def lists(scores: torch.Tensor, top_k: int, seq_len: int) -> torch.Tensor:
    chosen = torch.full((len(scores), 1, top_k + 2), -99, dtype=torch.int32)
    lengths = torch.full((len(scores), 1), -99, dtype=torch.int32)
    select.launch_select(
        scores, int32([seq_len] * len(scores)), chosen, lengths, num_kv_heads=1, lanes=1, page_size=1, bos=1, eos=1,
        top_k=top_k, ratio_q16=0, dense_below=0, scored=True, **scratch(len(scores), 1, scores.shape[2], top_k),
    )  # fmt: skip
    return chosen


def test_pitfall_30_a_row_that_does_not_fit_on_chip(monkeypatch):
    """Where a row is wider than what is held at once several programs share it, and give the same list."""
    scores = (torch.randn(2, 1, 777, generator=torch.Generator().manual_seed(1)) * 3).round()
    held = lists(scores, 20, 777)
    monkeypatch.setattr(select, "_REGISTER_WIDTH", 64)
    monkeypatch.setattr(select_wide, "_BLOCK", 128)
    assert torch.equal(lists(scores, 20, 777), held)


@pytest.mark.parametrize("width", [1023, 1024, 1025])
def test_pitfall_31_more_than_1024_columns(width):
    """The wider ones, up to 65537, are in test_topk_widths.py."""
    scores = torch.arange(width, dtype=torch.float32).flip(0)[None, None]
    assert lists(scores, 3, width)[0, 0].tolist() == [0, 1, 2, 3, width - 1]


def test_pitfall_32_a_strided_row_of_256k_columns():
    width = 1 << 18
    whole = torch.full((2, width + 3), float("nan"))
    scores = whole[:, 1 : 1 + width]
    scores.copy_(torch.arange(width, dtype=torch.float32).expand(2, -1) % 1000)
    assert scores.stride(0) % 4 != 0
    wanted = [0, 999, 1999, 2999, width - 1]
    assert lists(scores[1:, None], 3, width)[0, 0].tolist() == wanted, "its row begins at no multiple of a vector"


def test_pitfall_33_options_of_launch_functions_are_keywords():
    """An argument that moved can't be taken for another one; the metadata says which Triton it is."""
    launchers = [
        f
        for m in (attend, pages, segment, select)
        for n, f in vars(m).items()
        if n.startswith("launch_") and callable(f)
    ]
    assert len(launchers) >= 6
    for function in launchers:
        if not inspect.isfunction(function):
            continue
        for name, parameter in inspect.signature(function).parameters.items():
            simple = str(parameter.annotation) in ("int", "float", "bool", "float | None", "int | None", "str")
            assert not simple or parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{function.__name__}: {name}"
    assert "triton>=" in (ROOT / "pyproject.toml").read_text()
