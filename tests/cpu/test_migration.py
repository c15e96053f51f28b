"""What docs/migration.md says: names map, differences are as told, and what is refused is refused by name."""

import importlib
import re

import pytest
import torch

import flowlib
from flowlib import FORMAT, ops
from flowlib.errors import FlowDefinitionError, FlowlibError, FormatError, OptionError, ShapeError
from flowlib.ops import (
    CFill,
    CMean,
    Conv1d,
    GeMM,
    GeMV,
    L2Normalize,
    MaskSlice,
    Normalize,
    Relu,
    Reserved,
    Sigmoid,
    Silu,
    Softmax,
    Sum,
    TopK,
    Union,
    WhereGreater,
    topK,
)
from tests.processes import ROOT
from tests.refusals import refused
from tests.suites.v1_files import import_table

INDEXER = """
topK approxTopK TopK Union GeMM GeMV Max Mean Min L2Norm Sum Softmax Normalize Conv1d Transpose Maximum
Minimum Multiply Add WhereEqual WhereNotEqual WhereGreater WhereGreaterEqual WhereLess WhereLessEqual Relu Sigmoid
Silu Add_Mul Abs Log Exp Save Load MaskSlice Kron Reshape
"""
CACHE = """
Mean Max Min L2Norm Sum MeanInterleave MaxInterleave MinInterleave GeMM Relu Silu Sigmoid Abs Add_Mul
Maximum Minimum Multiply Add Fill MaskSlice Reshape Log Exp
"""
NAMES = {
    "vortex_torch.indexer": INDEXER.split(),
    "vortex_torch.cache": CACHE.split(),
    "vortex_torch.abs": ["ContextBase", "FORMAT", "as_vtensor", "vTensor"],
    "vortex_torch.flow": ["vFlow", "register"],
    "vortex_torch.flow.flow": ["vFlow"],
    "vortex_torch.flow.registry": ["register"],
}
SPEC = flowlib.Spec(page_size=8, head_dim=16, group_size=3, top_k=2, max_pages=12)


def test_the_table_of_imports_covers_every_module():
    assert import_table().keys() == NAMES.keys()


@pytest.mark.parametrize(("there", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_every_public_name_is_found_where_the_table_says(there, name):
    assert hasattr(importlib.import_module(import_table()[there]), name)


def test_both_spellings_of_create_cache():
    for first in ("page_size", "block_size", "tokens"):
        body: dict[str, object] = {}
        exec(f"def create_cache(self, {first}, head_dim):\n    return {{'summary': (1, head_dim)}}\n", body)

        class Mine(flowlib.vFlow):
            create_cache = body["create_cache"]

            def forward_cache(self, cache, loc, ctx):
                CMean(dim=1)(cache["k"], cache["summary"], loc=loc, ctx=ctx)

            def forward_indexer(self, q, o, cache, ctx):
                topK()(GeMV()(q.mean(dim=1, keepdim=True), cache["summary"], ctx=ctx), o, ctx=ctx)

        assert flowlib.profile(Mine(), SPEC).fields["summary"].shape == (1, 16)
        assert Mine().get_cache_meta_info(8, 16) == {"k": (8, 16), "v": (8, 16), "summary": (1, 16)}
        assert Mine().run_indexer_virtual(3, 8, 16) == 2 * 16


# -- differences


def value(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1)


@pytest.mark.parametrize(
    ("op", "x", "wanted"),
    [
        (Sigmoid(), 2.0, 1 / (1 + torch.tensor(-2.0, dtype=torch.float64).exp())),
        (Silu(), 2.0, 2 / (1 + torch.tensor(-2.0, dtype=torch.float64).exp())),
        (Sigmoid(alpha=0.0, beta=0.0), 2.0, 0.5),
        (Silu(alpha=0.0, beta=0.0), 2.0, 1.0),
        (Relu(), -2.0, 0.0),
        (Relu(alpha=1.0, beta=0.5), 0.5, 0.25),
        (Relu(alpha=1.0, beta=0.5), 3.0, 3.0),
    ],
    ids=str,
)
def test_unary_ops_and_their_defaults(op, x, wanted):
    assert float(op.meaning(value(x))) == pytest.approx(float(wanted), rel=1e-15)


def test_normalize_is_a_sum_and_l2normalize_a_norm():
    x, scored = value(3.0, 4.0).view(1, 2, 1, 1), torch.tensor([[True, True]])
    assert Normalize().meaning(x, scored=scored).flatten().tolist() == [3 / 7, 4 / 7]
    assert L2Normalize().meaning(x, scored=scored).flatten().tolist() == [3 / 5, 4 / 5]


def test_a_comparison_gives_minus_infinity():
    assert WhereGreater().meaning(value(1.0, 2.0), value(1.5, 1.5)).flatten().tolist() == [-float("inf"), 0.0]


def test_conv1d_is_centred():
    x = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64).view(1, 5, 1, 1)
    y = Conv1d([0.25, 0.5, 0.125]).meaning(x, scored=torch.ones(1, 5, dtype=torch.bool))
    assert y.flatten().tolist() == [0.0, 0.125, 0.5, 0.25, 0.0]


class Scored(flowlib.vFlow):
    """A flow around one line of the indexer."""

    def __init__(self, score=None, finish=None):
        self.score, self.finish = score, finish

    def forward_indexer(self, q, o, cache, ctx):
        x = GeMM()(q, Softmaxed.centroid(cache, ctx), ctx=ctx) if self.score is None else self.score(q, cache, ctx)
        topK()(x, o, ctx=ctx) if self.finish is None else self.finish(x, o, ctx)


class Softmaxed:
    @staticmethod
    def centroid(cache, ctx):
        return ops.Mean(dim=1)(cache["k"], ctx=ctx)


def stages_of(flow: flowlib.vFlow) -> str:
    return str(flowlib.profile(flow, SPEC))


def test_a_softmax_called_for_its_effect_is_the_softmax_whose_result_is_used():
    def effect(q, cache, ctx):
        x = GeMV()(q.mean(dim=1, keepdim=True), Softmaxed.centroid(cache, ctx), ctx=ctx)
        Softmax(dim=0, scale=0.5)(x, ctx=ctx)
        return x

    def result(q, cache, ctx):
        x = GeMV()(q.mean(dim=1, keepdim=True), Softmaxed.centroid(cache, ctx), ctx=ctx)
        return Softmax(dim=0, scale=0.5)(x, ctx=ctx)

    def plain(q, cache, ctx):
        return GeMV()(q.mean(dim=1, keepdim=True), Softmaxed.centroid(cache, ctx), ctx=ctx)

    assert stages_of(Scored(effect)) == stages_of(Scored(result)) != stages_of(Scored(plain))


def test_the_axis_of_scores_is_told():
    with refused(ShapeError, "topK: axis 2 of 'x' is 3, expected 1", "Transpose, or swap the arguments of GeMM"):
        flowlib.profile(Scored(), SPEC)


def test_a_slice_beyond_the_axis_is_refused():
    with refused(ShapeError, "MaskSlice: end is 1000, expected at most 16"):
        flowlib.profile(Scored(lambda q, cache, ctx: Sum(dim=2)(MaskSlice(0, 1000, 2)(q.mean(1, True), ctx=ctx))), SPEC)


def test_a_selection_is_one_value():
    def finish(x, o, ctx):
        Union()(TopK(1)(x, ctx=ctx), TopK(2)(x, ctx=ctx), o, ctx=ctx)

    score = lambda q, cache, ctx: GeMV()(q.mean(1, True), Softmaxed.centroid(cache, ctx), ctx=ctx)  # noqa: E731
    assert flowlib.profile(Scored(score, finish), SPEC).max_selected == SPEC.max_pages


def test_the_name_of_a_built_in_flow_is_taken():
    with refused(OptionError, "register('gqa_quest_sparse_attention')", "is taken by", "choose another name"):
        flowlib.register("gqa_quest_sparse_attention")(Scored)


def test_what_save_writes_needs_a_reset():
    class Kept(Scored):
        def create_cache(self, page_size, head_dim):
            return {"running": (1, 1)}

        def forward_indexer(self, q, o, cache, ctx):
            x = GeMV()(q.mean(1, True), Softmaxed.centroid(cache, ctx), ctx=ctx)
            ops.Save()(x, cache["running"], ctx=ctx)
            topK()(x, o, ctx=ctx)

    with pytest.raises(FlowDefinitionError, match=r"'running'.*Fill"):
        flowlib.profile(Kept(), SPEC)

    class Reset(Kept):
        def forward_cache(self, cache, loc, ctx):
            CFill(0.0)(cache["running"], loc=loc, ctx=ctx)

    assert flowlib.profile(Reset(), SPEC).state_fields == ("running",)


# -- refusals, and what is not yet one


def test_a_tensor_handed_to_an_op_is_refused():
    weight = torch.ones(1, 16)
    with refused(FormatError, "Multiply: 'y' is", "expected a vTensor"):
        flowlib.profile(Scored(lambda q, cache, ctx: ops.Multiply()(q, weight, ctx=ctx)), SPEC)


@pytest.mark.parametrize("name", ["Parameter", "LearnedQuery"])
@pytest.mark.parametrize("module", [flowlib, ops], ids=["flowlib", "flowlib.ops"])
def test_learned_parameters_are_refused_by_name(module, name):
    with pytest.raises(FlowlibError, match=f"{name}.*learned parameters are not supported"):
        getattr(module, name)(torch.ones(1, 16))


@pytest.mark.parametrize("name", ["SLOTTED", "PARAMETER"])
def test_formats_that_are_not_there_are_refused_by_name(name):
    with pytest.raises(FlowlibError, match=name):
        getattr(FORMAT, name)


def test_request_slotted_fields_are_refused_by_name():
    class Slotted(Scored):
        def create_request_cache(self, block_size, head_dim):
            return {"staging": (block_size, head_dim)}

        def forward_indexer(self, q, o, cache, ctx):
            Reserved()(o, ctx=ctx)

    with pytest.raises(FlowDefinitionError, match=r"create_request_cache.*not supported"):
        flowlib.profile(Slotted(), SPEC)


def test_weights_per_channel_as_nested_lists():
    assert Conv1d(weight=[[[0.25]], [[0.5]], [[0.25]]], dim=0).weight == (0.25, 0.5, 0.25)
    with pytest.raises(OptionError, match=r"Conv1d.*channel"):
        Conv1d(weight=[[[0.25, 0.5]], [[0.5, 1.0]], [[0.25, 0.5]]], dim=0)


def test_a_selection_unpacked_as_a_pair():
    def finish(x, o, ctx):
        pages_a, lengths_a = TopK(k=1)(x, ctx=ctx)
        pages_b, lengths_b = TopK(k=2)(x, ctx=ctx)
        Union()((pages_a, lengths_a), (pages_b, lengths_b), o, ctx=ctx)

    score = lambda q, cache, ctx: GeMV()(q.mean(1, True), Softmaxed.centroid(cache, ctx), ctx=ctx)  # noqa: E731
    assert flowlib.profile(Scored(score, finish), SPEC).max_selected == SPEC.max_pages


def test_the_page_names_what_it_refuses():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    refusals = page.split("## What is refused")[1]
    for name in ("Parameter", "LearnedQuery", "create_request_cache", "FORMAT.SLOTTED", "query tokens"):
        assert name in refusals
    assert len(re.findall(r"^\| ", page, re.M)) > 25
