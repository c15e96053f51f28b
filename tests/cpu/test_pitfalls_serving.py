"""Public failures 43 to 57, query tokens, sharding, H2O, installing and proving; docs/pitfalls.md tells which."""

import re

import pytest
import torch

import flowlib
from flowlib.errors import BatchError, FlowLoadError
from flowlib.testing import Case, verify_flow
from tests.processes import ROOT
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS, differing
from tests.suites.worlds import World, int32, random_tokens, world

impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
FP32 = torch.float32
SPEC = flowlib.Spec(page_size=4, head_dim=8, group_size=3, num_kv_heads=2, top_k=2, max_pages=32, max_batch=8)


def queries_of(made: World, q_lens: list[int]) -> torch.Tensor:
    """Random queries, one a query token."""
    spec = made.plan.spec
    shape = (sum(q_lens), spec.num_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(spec.field_dtype)


def singles(made: World, q: torch.Tensor, q_lens: list[int], impl: str) -> list[object]:
    """The same query tokens as single steps, in order."""
    outputs, row = [], 0
    for request, count in enumerate(q_lens):
        length = int(made.batch.seq_lens[request])
        for j in range(count):
            batch = flowlib.Batch(made.batch.page_table[request : request + 1], int32([length - count + j + 1]))
            outputs.append(made.step(q[row : row + 1], impl, batch))
            row += 1
    return outputs


@impls
def test_pitfall_43_two_steps_in_flight_share_no_buffer(impl):
    """Two batches with buffers of their own, launched in turn, give what each gives alone."""
    made = world("quest", SPEC, [60, 33])
    q = made.queries()
    one, two = (flowlib.Batch(made.batch.page_table, made.batch.seq_lens - i) for i in (0, 9))
    alone = [made.step(q, "triton", batch) for batch in (one, two)]
    outs = [made.plan.allocate(2, made.batch.width, "cpu") for _ in range(2)]
    for _ in range(2):
        for batch, out in zip((one, two), outs, strict=True):
            made.plan.launch(q, made.pool, batch, out)
    assert not any(differing(out, wanted) for out, wanted in zip(outs, alone, strict=True))
    own = [{t.data_ptr() for t in (out.o, out.lse, out.pages, out.lengths, *out.workspace.values())} for out in outs]
    assert not own[0] & own[1]


def test_pitfall_44_lengths_of_another_number_of_rows_are_refused():
    made = world("quest", SPEC, [60, 33])
    with refused(BatchError, "Batch: seq_lens has 1 values, expected 2, one per row of page_table"):
        flowlib.Batch(made.batch.page_table, made.batch.seq_lens[:1])
    with refused(BatchError, "Batch: q_lens has 3 values, expected 2, one per request"):
        flowlib.Batch(made.batch.page_table, made.batch.seq_lens, int32([1, 1, 1]))


@impls
@pytest.mark.parametrize("name", ["quest", "twilight", "block_sparse"])
def test_pitfall_45_several_query_tokens_select_with_the_budget_of_single_steps(name, impl):
    """Each sees the keys up to its own position and has the budget of its own length."""
    spec = SPEC.replace(kv_dtype=FP32, top_k=1, top_k_ratio=0.3)
    made = world(name, spec, [60, 33])
    q_lens = [4, 2]
    q = queries_of(made, q_lens)
    together = made.step(q, impl, flowlib.Batch(made.batch.page_table, made.batch.seq_lens, int32(q_lens)))
    for row, one in enumerate(singles(made, q, q_lens, impl)):
        assert torch.equal(one.pages[0], together.pages[row])
        assert torch.equal(one.lengths[0], together.lengths[row])
    newest = made.pages[0][(60 - 1) // 4] * 4 + (60 - 1) % 4
    made.pool.v[newest] = 1000.0
    again = made.step(q, impl, flowlib.Batch(made.batch.page_table, made.batch.seq_lens, int32(q_lens)))
    changed = [bool((again.o[row] != together.o[row]).any()) for row in range(6)]
    assert changed == [False, False, False, True, False, False], "only the last query token sees the newest key"


@impls
def test_pitfall_46_query_tokens_and_budget_are_not_confused(impl):
    """Numbers that can't stand for each other: 7 query tokens, 5 pages."""
    spec = SPEC.replace(top_k=5, max_pages=40)
    made = world("quest", spec, [120, 90])
    q_lens = [7, 3]
    q = queries_of(made, q_lens)
    out = made.step(q, impl, flowlib.Batch(made.batch.page_table, made.batch.seq_lens, int32(q_lens)))
    assert out.pages.shape == (10, 2, 7)
    assert out.lengths.tolist() == [[7, 7]] * 10
    for row, one in enumerate(singles(made, q, q_lens, impl)):
        assert torch.equal(one.pages[0], out.pages[row])


@impls
@pytest.mark.parametrize("budget", [1, 3, 192, 2051])
def test_pitfall_47_budgets_that_no_table_lists(budget, impl):
    spec = SPEC.replace(page_size=1, top_k=budget, max_pages=2200, num_kv_heads=1, group_size=2)
    made = world("quest", spec, [2200])
    q = made.queries()
    out = made.step(q, impl)
    assert out.lengths.tolist() == [[budget + 2]]
    made.judged(out, q, impl)


@impls
@pytest.mark.parametrize("ways", [2, 4])
def test_pitfall_48_heads_split_over_devices(ways, impl):
    """Each shard's plan knows its own heads; together they give the unsplit answer, newest tokens included."""
    spec = SPEC.replace(num_kv_heads=4)
    k, v = random_tokens(spec, [61, 30])
    whole = world("quest", spec, [61, 30], k=k, v=v)
    q = whole.queries()
    out, width = whole.step(q, impl), 4 // ways
    for shard in range(ways):
        heads = slice(shard * width, (shard + 1) * width)
        part = world(
            "quest", spec.replace(num_kv_heads=width), [61, 30], k=[x[:, heads] for x in k], v=[x[:, heads] for x in v]
        )
        q_part = q[:, heads.start * 3 : heads.stop * 3].contiguous()
        mine = part.step(q_part, impl)
        assert torch.equal(mine.pages, out.pages[:, heads])
        assert bool((mine.pages == 15).any())
        part.judged(mine, q_part, impl)


def heavy(bos: int, **options: object) -> tuple[World, torch.Tensor]:
    """A token-level H2O world of 40 tokens whose key 0 holds more than 60 % of the mass of the query of ones."""
    spec = flowlib.Spec(
        page_size=1, head_dim=8, group_size=2, num_kv_heads=1, kv_dtype=FP32, top_k=6, bos=bos, eos=4, max_pages=64
    )
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(40, 1, 8, generator=generator) * 0.1
    k[0], k[17] = 1.8, torch.tensor([1.8, -1.8]).repeat(4)  # the late one: no query asks for it before
    return world("gqa_h2o_token_sparse_attention", spec, [40], k=[k], **options), torch.ones(1, 2, 8)


@impls
@pytest.mark.parametrize("bos", [0, 1])
def test_pitfall_49_the_sink_is_kept(bos, impl):
    """With its page reserved or not: a key of 60 % of the mass is attended in every step."""
    made, q = heavy(bos)
    dense = flowlib.dense(q, made.pool, made.batch, dtype=torch.float64)
    sink = (q[0].double() @ made.k[0][0, 0].double() * 8**-0.5 - dense.lse[0]).exp()
    assert float(sink.min()) > 0.6
    for _ in range(12):
        out = made.step(q, impl)
        assert int(out.pages[0, 0, 0]) == 0
        assert float((out.lse - dense.lse).exp().min()) > 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
def test_pitfall_50_a_token_that_gets_heavy_late_enters(dtype):
    """After 220 steps another token is what the queries ask for: it is in the kept set within 70 steps, one window."""
    made, early = heavy(0, state_dtype=dtype)
    late = made.k[0][17, 0].expand(1, 2, 8)
    for _ in range(220):
        out = made.step(early)
    assert 17 not in out.pages[0, 0].tolist()
    entered = next((step for step in range(70) if 17 in made.step(late).pages[0, 0].tolist()), None)
    assert entered is not None


def test_pitfall_51_a_step_says_how_many_pages_it_attended():
    """Sparse output is no claim but a count; a server's log has it too."""
    made = world("quest", SPEC, [125, 60])
    out = made.step()
    total = int(made.batch.seq_lens.add(3).div(4, rounding_mode="floor").sum()) * 2
    assert int(out.lengths.sum()) == 4 * 4 < total
    report = verify_flow("quest", impl=("reference",), cases=[Case("small", SPEC, (125, 60))])
    assert (report.attended["reference"], report.cached["reference"]) == (16, total)


def test_pitfall_52_a_file_that_is_not_there_is_named_in_one_line(tmp_path):
    path = tmp_path / "flow.py"
    with pytest.raises(FlowLoadError) as caught:
        flowlib.build("mine", module_path=path)
    assert str(caught.value).startswith(f"flow file '{path}' does not exist; module_path takes")
    assert "\n" not in str(caught.value)
    for name in flowlib.list_flows():
        flowlib.build(name)  # none needs a file made beforehand


def test_pitfall_53_outputs_have_the_shapes_the_documentation_says():
    made = world("quest", SPEC.replace(v_head_dim=12), [61, 30])
    for impl in IMPLEMENTATIONS:
        out = made.step(impl=impl)
        assert out.o.shape == (2, 6, 12)
        assert out.lse.shape == (2, 6)
        assert out.pages.shape == (2, 2, made.plan.max_selected)
        assert out.lengths.shape == (2, 2)
        assert out.scores.shape == (2, 2, made.batch.width)
        assert (out.pages.dtype, out.lengths.dtype) == (torch.int32, torch.int32)
    for name in flowlib.__all__:
        assert getattr(flowlib, name).__doc__, name


def test_pitfall_54_dependencies_are_ranges():
    """No version is pinned to one release, and none needs a compiler or a GPU to install."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.M | re.S)
    assert block is not None
    names = re.findall(r'"([\w-]+)([^"]*)"', block[1])
    assert {n for n, _ in names} == {"torch", "triton", "numpy", "typer", "rich"}
    assert not any("==" in versions.split(";")[0] for _, versions in names)


@impls
def test_pitfall_55_dense_attention_is_judged_in_the_same_run_by_an_independent_formula(impl):
    """No wrong against wrong: with a budget that covers all, the flow's answer is the oracle's dense one."""
    covering = verify_flow("quest", cases=[Case("covering", SPEC.replace(top_k=32), (125, 60))], impl=(impl,))
    assert covering.ok, str(covering)
    assert covering.oracle == "independent"
    assert covering.attended[impl] == covering.cached[impl]


@impls
def test_pitfall_56_short_rows_can_be_kept_dense(impl):
    made = world("quest", SPEC.replace(dense_below=48), [48, 49])
    q = made.queries()
    out = made.step(q, impl)
    assert out.lengths.tolist() == [[12, 12], [4, 4]]
    made.judged(out, q, impl)


@pytest.mark.parametrize("name", ["quest", "block_sparse", "gaussian", "running_avg_block_sparse_attention"])
def test_pitfall_57_every_stage_is_held_against_float64(name):
    """Summaries, scores, selection, attention and state are judged one by one, so no stage hides in another's error."""
    report = verify_flow(name, cases=[Case("small", SPEC, (125, 61, 0))])
    stages = {r.stage for r in report.results}
    assert report.ok, str(report)
    assert {"scores", "selection", "attention o", "attention lse"} < stages
    assert any(stage.startswith("field ") for stage in stages)
    assert any(stage.startswith("state ") for stage in stages) is (name == "running_avg_block_sparse_attention")
