"""Options and inputs that an op can't take are refused, naming the op, the argument and both sizes."""

import pytest
import torch

import flowlib
from flowlib import ops
from flowlib.core.formats import Side
from flowlib.errors import FlowDefinitionError, FormatError, OptionError, ShapeError
from tests.refusals import refused
from tests.suites.op_run import bench

OPTIONS = [
    ("Sum", {"dim": 3}, "Sum: dim is 3, expected 1 or 2"),
    ("CStd", {"dim": 0}, "CStd: dim is 0, expected 1 or 2"),
    ("Normalize", {"dim": 1}, "Normalize: dim is 1, expected 0 (the pages of a row)"),
    ("Softmax", {"scale": 0.0}, "Softmax: scale is 0.0, expected a positive number, or None"),
    ("Conv1d", {"weight": (1.0, 2.0)}, "Conv1d: weight has 2 values, expected an odd number"),
    ("MeanInterleave", {"k": 0}, "MeanInterleave: k is 0, expected a positive integer"),
    ("MaskSlice", {"start": 4, "end": 2, "dim": 1}, "MaskSlice: start, end are 4, 2, expected 0 <= start <= end"),
    ("Reshape", {"first": 1, "r": 2, "c": 3}, "Reshape: sizes are (1, 2, 3), expected (-1, r, c)"),
    ("Kron", {"dim": 0}, "Kron: dim is 0, expected (1, 2), 1 or 2"),
    ("Clamp", {"lo": 1.0, "hi": 0.5}, "Clamp: lo is 1.0, expected at most hi, 0.5"),
    ("TopK", {"k": -1}, "TopK: k is -1, expected a number of pages of at least 0"),
    ("TopK", {"k": 2.0}, "TopK: k is 2.0, expected a number of pages of at least 0"),
    ("topP", {"p": 0.0}, "topP: p is 0.0, expected a number above 0 and at most 1"),
    ("topP", {"p": 0.5, "max_k": -1}, "topP: max_k is -1, expected a number of pages of at least 0"),
    ("topP", {"p": 0.5, "input": "scores"}, "topP: input is 'scores', expected 'logits' or 'mass'"),
    ("Threshold", {"max_k": 1.5}, "Threshold: max_k is 1.5, expected a number of pages of at least 0"),
    ("approxTopK", {"tolerate_ratio": -0.1}, "approxTopK: tolerate_ratio is -0.1, expected at least 0"),
]


@pytest.mark.parametrize(("name", "options", "text"), OPTIONS, ids=[f"{n}-{list(o)[-1]}" for n, o, _ in OPTIONS])
def test_an_option_out_of_range(name, options, text):
    with refused(OptionError, text):
        getattr(ops, name)(**options)


SHAPES = [
    ("GeMM", {}, [(3, 8), (5, 7)], "GeMM: axis 2 of 'y' is 7, expected 8 to match 'x' [., 3, 8]"),
    ("GeMV", {}, [(1, 8), (2, 8)], "GeMV: axis 1 of 'y' is 2, expected 1 (a vector per entry)"),
    ("Add", {}, [(3, 8), (3, 5)], "Add: axis 2 of 'y' is 5, expected 8 or 1 to match 'x' [3, 8]"),
    ("Divide", {}, [(3, 8), (2, 8)], "Divide: axis 1 of 'y' is 2, expected 3 or 1 to match 'x' [3, 8]"),
    ("WhereLess", {}, [(3, 8), (2, 1)], "WhereLess: axis 1 of 'y' is 2, expected 3 or 1"),
    ("Kron", {"dim": 1}, [(3, 8), (2, 5)], "Kron: axis 2 of 'y' is 5, expected 8 or 1 to match 'x' [3, 8]"),
    ("Reshape", {"first": -1, "r": 5, "c": 5}, [(3, 8)], "Reshape: 'x' [., 3, 8] has 24 elements per entry"),
    ("MaskSlice", {"start": 0, "end": 9, "dim": 2}, [(3, 8)], "MaskSlice: end is 9, expected at most 8, the size"),
    ("MaxInterleave", {"dim": 2, "k": 3}, [(3, 8)], "MaxInterleave: axis 2 of 'x' is 8, expected a multiple of k = 3"),
]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(("name", "options", "shapes", "text"), SHAPES, ids=[s[0] for s in SHAPES])
def test_sizes_that_do_not_fit(name, options, shapes, text, impl):
    at = bench("cpu")
    ctx = at.context(impl)
    entries = at.entries[flowlib.FORMAT.RAGGED]
    inputs = [flowlib.as_vtensor(torch.ones(entries, *shape), flowlib.FORMAT.RAGGED, ctx) for shape in shapes]
    with refused(ShapeError, text, "tests/cpu/test_errors_ops.py:"):
        getattr(ops, name)(**options)(*inputs)


def test_every_page_op_is_refused_for_rows_and_in_the_cache():
    at = bench("cpu")
    ctx, cache = at.context("reference"), at.context("reference", side=Side.CACHE)
    row = flowlib.as_vtensor(torch.ones(at.entries[flowlib.FORMAT.BATCHED], 1, 1), flowlib.FORMAT.BATCHED, ctx)
    page = flowlib.as_vtensor(torch.ones(at.entries[flowlib.FORMAT.PAGED], 1, 1), flowlib.FORMAT.PAGED, cache)
    for op in (ops.Softmax(), ops.Normalize(), ops.L2Normalize(), ops.Conv1d((1.0,)), ops.Sum(dim=0), ops.Max(dim=0)):
        with refused(FormatError, "expected RAGGED or PAGED"):
            op(row)
        with refused(FormatError, "works across the pages of a row, so it belongs into forward_indexer"):
            op(page, None, loc=torch.tensor([7]))


# -- state


class Running(flowlib.vFlow):
    """Keeps half of its last scores."""

    def __init__(self):
        self.fill, self.load, self.save, self.topk = ops.CFill(0.0), ops.Load(), ops.Save(), ops.topK()
        self.mean, self.add = ops.CMean(dim=1), ops.Add(alpha=0.5)

    def create_cache(self, page_size, head_dim):
        return {"centroid": (1, head_dim), "last": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        self.fill(cache["last"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = ops.GeMV()(q.mean(dim=1, keepdim=True), cache["centroid"])
        score = self.add(self.load(cache["last"]), score)
        self.save(score, cache["last"], ctx=ctx)
        self.topk(score, o, ctx=ctx)


def test_a_saved_field_is_state():
    plan = flowlib.profile(Running(), flowlib.Spec(page_size=16, head_dim=64))
    assert plan.state_fields == ("last",)
    assert {f.name: f.kind for f in plan.fields.values()} == {"centroid": "summary", "last": "state"}


def test_state_without_a_reset():
    class Unreset(Running):
        def forward_cache(self, cache, loc, ctx):
            self.mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    with refused(FlowDefinitionError, "Unreset: state field 'last' has no reset", "add Fill to forward_cache: "
                 "self.fill(cache['last'], loc=loc, ctx=ctx)"):  # fmt: skip
        flowlib.profile(Unreset(), flowlib.Spec())


def test_state_beside_dense_below():
    with refused(OptionError, "Running: dense_below is 64, expected 0 for a flow with state (last)"):
        flowlib.profile(Running(), flowlib.Spec(dense_below=64))


def test_saving_into_nothing_or_into_another_size():
    class Lost(Running):
        def forward_indexer(self, q, o, cache, ctx):
            self.save(self.load(cache["last"]), ctx=ctx)

    class Wide(Running):
        def forward_indexer(self, q, o, cache, ctx):
            self.save(self.load(cache["centroid"]), cache["last"], ctx=ctx)

    with refused(FormatError, "Save: 'out' is missing, expected a field such as cache['...']", "test_errors_ops.py:"):
        flowlib.profile(Lost(), flowlib.Spec())
    with refused(ShapeError, "Save: axis 2 of the result is 128, expected 1 to match field 'last' [1, 1]"):
        flowlib.profile(Wide(), flowlib.Spec())


def test_saving_in_the_cache():
    class Early(Running):
        def forward_cache(self, cache, loc, ctx):
            self.mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
            self.save(cache["centroid"], cache["last"], loc=loc, ctx=ctx)

    with refused(FormatError, "Save: belongs into forward_indexer; in forward_cache an op takes its field as output"):
        flowlib.profile(Early(), flowlib.Spec())


def test_a_union_of_what_is_no_selection():
    class Scores(Running):
        def forward_indexer(self, q, o, cache, ctx):
            score = ops.GeMV()(q.mean(dim=1, keepdim=True), cache["centroid"])
            ops.Union()(score, ops.TopK(2)(score), o, ctx=ctx)

    with refused(FormatError, "Union: 'a' is ", "expected a selection: TopK(k)(x), or topP or Threshold without 'o'"):
        flowlib.profile(Scores(), flowlib.Spec())
