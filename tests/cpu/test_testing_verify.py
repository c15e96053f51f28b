"""Tests of the test: what is wrong in one stage is found in that stage, and what is right is passed."""

import math
import textwrap

import pytest
import torch

import flowlib
from flowlib import ops
from flowlib.core import registry
from flowlib.errors import BackendError, OptionError, UnknownFlowError
from flowlib.runtime import reference
from flowlib.testing import Case, Oracle, default_cases, oracle_of, scene, verify_flow
from flowlib.testing.selection import judge_selection
from flowlib.testing.stages import judge_attention, judge_fields, judge_scores, judge_state, run_step

SPEC = flowlib.Spec(
    page_size=4, head_dim=24, v_head_dim=16, group_size=3, num_kv_heads=2, kv_dtype=torch.float32, top_k=2,
    max_pages=16, alibi_slopes=(0.5, 0.1, 0.0, 1.0, 0.3, 0.2),
)  # fmt: skip
CASE = Case("small", SPEC, (0, 1, 18, 41))
FP32_CASE = Case("fp32", SPEC.replace(alibi_slopes=None), (41,))


def failed(report) -> set[str]:
    assert not report.ok
    return {r.stage for r in report.failures}


def reference_only(name: str, **options: object):
    return verify_flow(name, cases=[CASE], impl=("reference",), options=options)


def test_what_is_right_passes_in_every_implementation():
    report = verify_flow("quest", cases=[CASE])
    assert report.ok, str(report)
    assert report.flow == "gqa_quest_sparse_attention"
    assert report.oracle == "independent"
    stages = ["field k_max", "field k_min", "scores", "selection", "attention o", "attention lse"]
    assert [(r.impl, r.stage) for r in report.results] == [(i, s) for i in ("reference", "triton") for s in stages]
    attended = 2 * (0 + 1 + min(5, 4) + 4)  # two kv heads; top_k + bos + eos pages at most
    assert report.attended == {"reference": attended, "triton": attended}
    assert report.cached["triton"] == 2 * (0 + 1 + 5 + 11)
    assert "gqa_quest_sparse_attention: ok" in str(report)
    assert f"{attended} of {report.cached['triton']} pages attended" in str(report)


@pytest.mark.parametrize("name", ["running_avg_block_sparse_attention", "twilight", "streaming"])
def test_state_top_p_and_no_scores_pass_in_the_reference(name):
    report = reference_only(name)
    assert report.ok, str(report)
    assert ("state running" in {r.stage for r in report.results}) is name.startswith("running")
    assert ("scores" in {r.stage for r in report.results}) is (name != "streaming")


# -- a flow that computes something else


def wrong_field(self, x):
    return x.amin(self.dim - 3, keepdim=True) * (1 + 1e-5)


def wrong_score(self, x, *, scored):
    return SOFTMAX(self, x * (1 + 1e-12), scored=scored)


def one_page_fewer(self, x, scored, budget):
    return ORIGINAL(self, x, scored, budget - 1)


def one_page_more(self, x, scored, budget):
    return ORIGINAL(self, x, scored, budget + 1)


def lowest_pages(self, x, scored, budget):
    return ORIGINAL(self, -x, scored, budget)


ORIGINAL, SOFTMAX = ops.topK.meaning, ops.Softmax.meaning


@pytest.mark.parametrize(
    ("name", "op", "meaning", "stage"),
    [
        ("quest", ops.CMin, wrong_field, "field k_min"),
        ("block_sparse", ops.Softmax, wrong_score, "scores"),
        ("quest", ops.topK, one_page_fewer, "selection"),
        ("quest", ops.topK, one_page_more, "selection"),
        ("quest", ops.topK, lowest_pages, "selection"),
    ],
    ids=["field", "score", "one fewer", "one more", "lowest"],
)
def test_a_wrong_op_is_found_in_its_stage(monkeypatch, name, op, meaning, stage):
    monkeypatch.setattr(op, "meaning", meaning)
    assert failed(reference_only(name)) == {stage}


def patched_attention(monkeypatch, change):
    original = reference.attend
    monkeypatch.setattr(reference, "attend", lambda *args: change(*original(*args)))


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (lambda o, lse: (o, lse / math.log(2)), {"attention lse"}),
        (lambda o, lse: (o.flip(1), lse), {"attention o"}),
        (lambda o, lse: (o, lse.masked_fill(lse == -math.inf, 0.0)), {"attention lse"}),
        (lambda o, lse: (o.float().double(), lse), {"attention o"}),
    ],
    ids=["lse in base 2", "heads in another order", "lse of an empty row", "fp32 in float64"],
)
def test_wrong_attention_is_found(monkeypatch, change, stages):
    patched_attention(monkeypatch, change)
    assert failed(reference_only("quest")) == stages


@pytest.mark.parametrize(
    "wrong",
    [{"scale": 0.3}, {"alibi_slopes": None}, {"alibi_slopes": (0.1, 0.5, 0.0, 1.0, 0.3, 0.2)}, {"v_scale": 1.001}],
    ids=str,
)
def test_attention_with_another_number_is_found(monkeypatch, wrong):
    original = reference.attend

    def attend(q, store, batch, pages, spec, dtype):
        return original(q, store, batch, pages, spec.replace(**wrong), dtype)

    monkeypatch.setattr(reference, "attend", attend)
    assert "attention o" in failed(reference_only("quest"))


# -- an output that is damaged


@pytest.fixture(scope="module")
def oracle():
    return oracle_of("quest")


@pytest.fixture
def run(oracle):
    made = scene(flowlib.profile(flowlib.build("quest"), CASE.spec), CASE.lengths)
    done = run_step(made, "reference", made.pool_by("reference"), made.q)
    assert selection(done, oracle) == ""
    return done


def selection(run, oracle) -> str:
    scores, truths = judge_scores(run, oracle)
    verdict, why = judge_selection(run, oracle, truths, float(scores.tolerance(torch.float64).max()))
    assert verdict.ok or why
    return "" if verdict.ok else why


LONG = 3  # the row of 41 tokens: 11 pages, of which 4 are attended


def test_the_list_of_the_fixture(run):
    assert run.out.lengths[LONG].tolist() == [4, 4]
    assert run.out.pages.shape[2] == 4


def swapped(pages):
    pages[LONG, 0] = pages[LONG, 0].flip(0)


def doubled(pages):
    pages[LONG, 0, 1] = pages[LONG, 0, 0]


def without_the_first(pages):
    unlisted = next(p for p in range(1, 10) if p not in pages[LONG, 0].tolist())
    pages[LONG, 0] = torch.tensor(sorted([unlisted, *pages[LONG, 0, 1:].tolist()]))


def past_the_row(pages):
    pages[LONG, 0, 3] = 11


def unpadded(pages):
    pages[1, 0, 2] = 3


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swapped, "expected ascending pages below 11, each once"),
        (doubled, "expected ascending pages below 11, each once"),
        (without_the_first, "reserved pages [0] are not attended"),
        (past_the_row, "expected ascending pages below 11, each once"),
        (unpadded, "past the list's end, expected -1"),
    ],
)
def test_a_damaged_list_is_found(run, oracle, damage, said):
    damage(run.out.pages)
    assert said in selection(run, oracle)


@pytest.mark.parametrize(("length", "said"), [(-1, "length -1"), (5, "length 5, expected from 0 to 4")])
def test_a_damaged_length_is_found(run, oracle, length, said):
    run.out.lengths[LONG, 1] = length
    assert said in selection(run, oracle)


def test_the_second_best_page_is_found_by_its_score(run, oracle):
    row = run.out.scores[LONG, 0]
    order = row[1:10].argsort(descending=True) + 1
    run.out.pages[LONG, 0] = torch.tensor(sorted([0, 10, int(order[0]), int(order[2])]), dtype=torch.int32)
    assert "a page that scores" in selection(run, oracle)


@pytest.mark.parametrize(("pages", "ok"), [((1, 2), True), ((2, 3), False)])
def test_ties_go_to_the_lower_page(run, oracle, pages, ok):
    run.out.raw_scores.fill_(1.0)
    run.out.pages[2:, :, 1:3] = torch.tensor(pages, dtype=torch.int32)
    verdict, why = judge_selection(run, oracle, {}, 0.0)
    assert verdict.ok is ok
    assert ok or "of tied pages [0, 1, 2] the list has [1, 2], expected the lowest" in why


def test_a_page_with_score_nan_is_found(run, oracle):
    chosen = int(run.out.pages[LONG, 0, 1])
    run.out.raw_scores.view(len(CASE.lengths), 2, -1)[LONG, 0, chosen] = math.nan
    scores, truths = judge_scores(run, oracle)
    verdict, why = judge_selection(run, oracle, truths, 1e-9)
    assert not verdict.ok
    assert "score -inf or NaN" in why
    assert not scores.judge(torch.float64)[0].ok


def test_scores_a_step_too_coarse_are_found(run, oracle):
    """What passes as fp32 is refused as float64, and bf16 is refused as fp32."""
    exact = run.out.raw_scores.clone()
    for stored, dtype, ok in ((torch.float32, torch.float32, True), (torch.float32, torch.float64, False),
                              (torch.bfloat16, torch.float32, False)):  # fmt: skip
        run.out.raw_scores.copy_(exact.to(stored))
        collected, _ = judge_scores(run, oracle)
        if dtype is torch.float32:
            collected.step = [s * 2.0**29 for s in collected.step]  # the step of float64 arithmetic, in fp32's
        assert collected.judge(dtype)[0].ok is ok, (stored, dtype)


def test_a_value_past_the_row_is_found(run):
    assert all(verdict.ok for verdict, _ in judge_attention(run).values())
    run.out.o[LONG, 0, 0] = math.nan
    verdict, where = judge_attention(run)["o"]
    assert verdict.error == math.inf
    assert where == "row 3 (41 tokens), list 0"


def test_a_stale_field_is_found(run, oracle):
    run.before["k_max"][run.scene.pages[LONG][2], 1] += 1e-3
    verdict, where = judge_fields(run, oracle)["k_max"]
    assert not verdict.ok
    assert where == "k_max, request 3, page 2, kv head 1"


def test_state_of_a_page_that_was_not_scored_must_stay():
    made = scene(flowlib.profile(flowlib.build("running_avg_block_sparse_attention"), SPEC), CASE.lengths)
    oracle = oracle_of("running_avg_block_sparse_attention")
    done = run_step(made, "reference", made.pool_by("reference"), made.q)
    assert judge_state(done, oracle)["running"][0].ok
    done.store.fields["running"][made.pages[LONG][0], 0] += 1.0
    verdict, why = judge_state(done, oracle)["running"]
    assert not verdict.ok
    assert why == "a page that was not scored changed"


def test_state_that_is_not_saved_is_found(monkeypatch):
    monkeypatch.setattr(reference._Rows, "save", lambda self, saved: None)
    assert failed(reference_only("running_avg_block_sparse_attention")) == {"state running"}


# -- Triton, damaged on its way out


def damaged(monkeypatch, change):
    plan_type = flowlib.Plan
    original = plan_type.launch

    def launch(self, q, store, batch, out):
        original(self, q, store, batch, out)
        change(out)

    monkeypatch.setattr(plan_type, "launch", launch)


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (lambda out: None, set()),
        (lambda out: out.o.copy_(out.o.bfloat16()), {"attention o"}),
        (lambda out: out.lse.copy_(out.lse.bfloat16()), {"attention lse"}),
        (lambda out: out.raw_scores.copy_(out.raw_scores.bfloat16()), {"scores"}),
    ],
    ids=["nothing", "o in bf16", "lse in bf16", "scores in bf16"],
)
def test_a_rounding_in_lower_precision_is_found(monkeypatch, change, stages):
    damaged(monkeypatch, change)
    report = verify_flow("block_sparse_attention", cases=[FP32_CASE], impl=("triton",))
    assert {r.stage for r in report.failures} - {"selection"} == stages, str(report)


# -- oracles given and own


FLOW = textwrap.dedent("""
    import flowlib
    from flowlib.ops import CMean, GeMM, Max, Multiply, PagePosition, topK

    @flowlib.register("later_pages")
    class LaterPages(flowlib.vFlow):
        def __init__(self):
            self.cmean, self.gemm, self.max, self.topk = CMean(dim=1), GeMM(), Max(dim=2), topK()
            self.position, self.multiply = PagePosition(), Multiply()

        def create_cache(self, page_size, head_dim):
            return {"centroid": (1, head_dim)}

        def forward_cache(self, cache, loc, ctx):
            self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

        def forward_indexer(self, q, o, cache, ctx):
            score = self.max(self.gemm(q, cache["centroid"], ctx=ctx), ctx=ctx)
            self.topk(self.multiply(score, self.position(ctx=ctx), ctx=ctx), o, ctx=ctx)
""")


class LaterPages(Oracle):
    def fields(self, k, v, spec):
        return {"centroid": k.mean(1, keepdim=True)}

    def scores(self, q, pages, spec):
        return (torch.einsum("hd,nd->hn", q, pages["centroid"][:, 0]).amax(0) * pages["position"][:, 0, 0])[None]


class OffByOne(LaterPages):
    def scores(self, q, pages, spec):
        return super().scores(q, {**pages, "position": pages["position"] + 1}, spec)


class NoFields(Oracle):
    pass


@pytest.fixture
def flow_file(tmp_path, monkeypatch):
    flowlib.list_flows()  # loads the built-in flows
    monkeypatch.setattr(registry, "_FLOWS", dict(registry._FLOWS))
    path = tmp_path / "later.py"
    path.write_text(FLOW)
    return path


def test_a_users_flow_is_held_against_its_own_reference(flow_file):
    report = verify_flow("later_pages", cases=[CASE], module_path=flow_file)
    assert report.ok, str(report)
    assert report.oracle == "own reference"


@pytest.mark.parametrize(("oracle", "stages"), [(LaterPages(), set()), (OffByOne(), {"scores", "selection"})])
def test_or_against_an_oracle_that_is_given(flow_file, oracle, stages):
    report = verify_flow("later_pages", cases=[CASE], module_path=flow_file, oracle=oracle, impl=("reference",))
    assert report.oracle == "given"
    assert {r.stage for r in report.failures} <= stages
    assert ("scores" in {r.stage for r in report.failures}) is bool(stages)


def test_an_oracle_that_leaves_a_field_out(flow_file):
    with pytest.raises(OptionError, match=r"NoFields.fields gives \[\], expected 'centroid' of the flow too"):
        verify_flow("later_pages", cases=[CASE], module_path=flow_file, oracle=NoFields(), impl=("reference",))


# -- cases and options


def test_default_cases_cover_what_they_say():
    cases = default_cases(flowlib.build("quest"))
    assert {c.spec.group_size for c in cases} >= {1, 3, 4, 8}
    assert {c.spec.kv_dtype for c in cases} == {torch.float32, torch.bfloat16}
    assert len({c.spec.page_size for c in cases}) >= 4
    assert any(c.spec.alibi_slopes for c in cases)
    assert any(c.q_lens for c in cases)
    assert {c.spec.bos for c in cases} >= {0, 1, 2}
    only = default_cases(flowlib.build("quest"), {"kv_dtype": torch.float16, "group_size": 2})
    assert {(c.spec.kv_dtype, c.spec.group_size) for c in only} == {(torch.float16, 2)}


def test_a_flow_of_one_page_size_is_tried_at_that_and_says_so():
    report = verify_flow("h2o_token", impl=("reference",), cases=[CASE])
    assert report.ok, str(report)
    assert report.notes[0].startswith("page size 1 in place of 4: ")


def test_what_cannot_run_is_refused():
    with pytest.raises(UnknownFlowError, match="unknown flow 'qest'"):
        verify_flow("qest")
    with pytest.raises(OptionError, match="verify_flow: impl has 'cuda', expected 'reference' and 'triton'"):
        verify_flow("quest", impl=("cuda",))


def test_triton_needs_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="needs TRITON_INTERPRET=1 set before Triton is imported"):
        verify_flow("quest", cases=[CASE], impl=("triton",))
