"""A flow that is not well formed is refused when it is profiled, with the line of its file."""

import inspect

import pytest
import torch

import flowlib
from flowlib.errors import FlowDefinitionError, FlowlibError, FormatError, OptionError, ShapeError
from flowlib.ops import (
    CMax,
    CMean,
    Fill,
    GeMM,
    GeMV,
    Max,
    Maximum,
    Mean,
    Multiply,
    Reserved,
    Save,
    Softmax,
    Sum,
    topK,
)
from tests.refusals import refused

SPEC = flowlib.Spec(page_size=16, head_dim=64, group_size=3)
HERE = "tests/cpu/test_errors_flows.py"


class Centroid(flowlib.vFlow):
    """Well formed; every flow below breaks it in one place."""

    fields = {"centroid": (1, 64)}  # noqa: RUF012

    def create_cache(self, page_size, head_dim):
        return self.fields

    def forward_cache(self, cache, loc, ctx):
        CMean(dim=1)(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        topK()(self.score(q, cache, ctx), o, ctx=ctx)

    def score(self, q, cache, ctx):
        return GeMV()(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)


def profiled(flow, spec=SPEC):
    return flowlib.profile(flow, spec)


def line_of(function, text: str) -> str:
    """``file:line: text`` of a line of a function of this file."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"({HERE}:{first + offset}: {lines[offset].strip()})"


def test_the_flow_the_others_break_is_well_formed():
    assert set(profiled(Centroid()).fields) == {"centroid"}


# -- the indexer


class Short(Centroid):
    def score(self, q, cache, ctx):
        return GeMM()(Sum(dim=2)(q), cache["centroid"], ctx=ctx)


class OneGroupTooMany(Centroid):
    def score(self, q, cache, ctx):
        return Multiply()(q, cache["k"])


class Matrix(Centroid):
    def score(self, q, cache, ctx):
        return GeMV()(q, cache["centroid"])


class Sideways(Centroid):
    def score(self, q, cache, ctx):
        return GeMM()(q, cache["centroid"])


class NoPages(Centroid):
    def score(self, q, cache, ctx):
        Softmax(dim=0)(Max(dim=2)(q))


class NothingScored(Centroid):
    def score(self, q, cache, ctx):
        return Max(dim=2)(Max(dim=1)(q))


class Silent(Centroid):
    def forward_indexer(self, q, o, cache, ctx):
        self.score(q, cache, ctx)


class Twice(Centroid):
    def forward_indexer(self, q, o, cache, ctx):
        topK()(self.score(q, cache, ctx), o)
        Reserved()(o)


class ReadsSelection(Centroid):
    def score(self, q, cache, ctx):
        return Multiply()(o_of(ctx), q)


class NoHandle(Centroid):
    def forward_indexer(self, q, o, cache, ctx):
        topK()(self.score(q, cache, ctx), cache["centroid"])


class WritesField(Centroid):
    def score(self, q, cache, ctx):
        return Mean(dim=1)(q, cache["centroid"])


class Misspelt(Centroid):
    def score(self, q, cache, ctx):
        return GeMV()(q.mean(dim=1, keepdim=True), cache["centriod"])


class RawTensor(Centroid):
    def score(self, q, cache, ctx):
        return Multiply()(q, torch.ones(1, 3, 64))


class TooMany(Centroid):
    def score(self, q, cache, ctx):
        return Maximum()(q, q, q, q)


class FlatMean(Centroid):
    def score(self, q, cache, ctx):
        return q.mean(dim=1)


def o_of(ctx):
    return flowlib.SelectionHandle(ctx)


INDEXER = [
    (Short, ShapeError, "GeMM: axis 2 of 'y' is 64, expected 1 to match 'x' [., 3, 1]", "return GeMM()"),
    (OneGroupTooMany, ShapeError, "Multiply: axis 1 of 'y' is 16, expected 3 or 1 to match 'x' [3, 64]", "return"),
    (Matrix, ShapeError, "GeMV: axis 1 of 'x' is 3, expected 1 (a vector per entry); use GeMM for matrices", "return"),
    (NoPages, FormatError, "Softmax: 'x' is vTensor [B, 3, 1], expected RAGGED or PAGED", "Softmax(dim=0)("),
    (ReadsSelection, FormatError, "Multiply: 'x' is 'o', which is write-only, expected a vTensor", "return"),
    (WritesField, FormatError, "Mean: 'out' is centroid [P, 1, 64], but only Save writes a field", "return"),
    (Misspelt, FlowDefinitionError, "cache['centriod']: no such field, create_cache and the pool give 'k', 'v', "
     "'centroid'. Did you mean 'centroid'?", "return GeMV()"),
    (RawTensor, FormatError, "Multiply: 'y' is a Tensor (learned parameters are not supported)", "return"),
    (TooMany, FormatError, "Maximum: takes 2 inputs (x, y) and at most one output, got 4 positional", "return"),
]  # fmt: skip


@pytest.mark.parametrize(("flow", "kind", "text", "line"), INDEXER, ids=[case[0].__name__ for case in INDEXER])
def test_a_wrong_call_in_the_indexer_names_the_line(flow, kind, text, line):
    with refused(kind, text, line_of(flow.score, line)):
        profiled(flow())


def test_scores_along_the_wrong_axis():
    where = line_of(Centroid.forward_indexer, "topK()")
    with refused(ShapeError, "topK: axis 2 of 'x' is 3, expected 1: scores are [S, 1, 1]", "Transpose", where):
        profiled(Sideways())


def test_scores_that_are_the_same_for_every_page():
    with refused(FormatError, "topK: 'x' is vTensor [B, 1, 1], expected RAGGED or PAGED", "no pages to work across"):
        profiled(NothingScored())


def test_a_flow_that_selects_nothing():
    with refused(FlowDefinitionError, "forward_indexer: no selection: it must end in one op that writes 'o'"):
        profiled(Silent())


def test_a_flow_that_selects_twice_names_both_lines():
    first, second = (line_of(Twice.forward_indexer, text)[1:-1] for text in ("topK()", "Reserved()"))
    with refused(FlowDefinitionError, "'o' is written 2 times, expected once", first, second):
        profiled(Twice())


def test_an_op_that_selects_needs_the_handle():
    with refused(FormatError, "topK: the last argument is a vTensor, expected 'o', the selection handle", HERE):
        profiled(NoHandle())


def test_a_mean_that_drops_an_axis():
    with refused(ShapeError, "q [B, 3, 64].mean: keepdim must be True, vTensors always have rank 3"):
        profiled(FlatMean())


def test_a_flow_without_an_indexer():
    class Empty(flowlib.vFlow):
        pass

    with refused(FlowDefinitionError, "Empty defines no forward_indexer"):
        profiled(Empty())


# -- the cache


class Unread(Centroid):
    def forward_indexer(self, q, o, cache, ctx):
        Reserved()(o, ctx=ctx)


class Unwritten(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMean(dim=1)(cache["k"], None, loc=loc, ctx=ctx)


class ReadFirst(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["centroid"], cache["centroid"], loc=loc, ctx=ctx)


class WritesKeys(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["v"], cache["k"], loc=loc, ctx=ctx)


class WrongSize(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMean(dim=2)(cache["k"], cache["centroid"], loc=loc, ctx=ctx)


class WritesTemporary(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMean(dim=1)(cache["k"], CMax(dim=1)(cache["k"], None, loc=loc, ctx=ctx), loc=loc, ctx=ctx)


class KeepsValues(Centroid):
    def forward_cache(self, cache, loc, ctx):
        self.kept = cache["k"]
        super().forward_cache(cache, loc, ctx)

    def score(self, q, cache, ctx):
        return GeMV()(q.mean(dim=1, keepdim=True), self.kept)


class Unlocated(Centroid):
    def forward_cache(self, cache, loc, ctx):
        CMean(dim=1)(cache["k"], cache["centroid"], loc=loc, ctx="ctx")


CACHE = [
    (ReadFirst, FlowDefinitionError, "CMax: field 'centroid' is read before forward_cache wrote it"),
    (WritesKeys, FlowDefinitionError, "CMax: 'k' is read-only: K and V are written by the pool"),
    (WrongSize, ShapeError, "CMean: axis 1 of the result is 16, expected 1 to match field 'centroid' [1, 64]"),
    (WritesTemporary, FormatError, "CMean: 'out' is a computed value, expected a field such as cache['...']"),
    (Unlocated, FormatError, "CMean: ctx is str, expected the context the method was given"),
]


@pytest.mark.parametrize(("flow", "kind", "text"), CACHE, ids=[case[0].__name__ for case in CACHE])
def test_a_wrong_call_in_the_cache_names_the_line(flow, kind, text):
    with refused(kind, text, line_of(flow.forward_cache, "CM")):
        profiled(flow())


class Declares(Centroid):
    def create_cache(self, page_size, head_dim):
        return {
            "centroid": (1, head_dim),
            "spare": (1, head_dim),
        }  # fmt: skip


class Unreset(Centroid):
    def create_cache(self, page_size, head_dim):
        return {"centroid": (1, head_dim), "best": (1, 1)}

    def score(self, q, cache, ctx):
        score = super().score(q, cache, ctx)
        Save()(score, cache["best"], ctx=ctx)
        return score


class Keeps(Unreset):
    def forward_cache(self, cache, loc, ctx):
        super().forward_cache(cache, loc, ctx)
        Fill(0.0)(cache["best"], loc=loc, ctx=ctx)


DECLARED = line_of(Centroid.create_cache, "def create_cache")


def test_a_field_nobody_reads():
    text = "Unread: field 'centroid' is never read by forward_indexer: read it, or remove"
    with refused(FlowDefinitionError, text, DECLARED):
        profiled(Unread())


def test_a_field_nobody_writes_names_its_declaration():
    text = "Unwritten: field 'centroid' is never written: forward_cache must compute it"
    with refused(FlowDefinitionError, text, DECLARED):
        profiled(Unwritten())
    with refused(FlowDefinitionError, "Declares: field 'spare' is never", line_of(Declares.create_cache, '"spare"')):
        profiled(Declares())


def test_state_without_a_reset_names_the_save():
    with refused(FlowDefinitionError, "Unreset: state field 'best' has no reset", line_of(Unreset.score, "Save()")):
        profiled(Unreset())


def test_state_and_rows_attended_in_full_names_the_save():
    with refused(OptionError, "Keeps: dense_below is 5, expected 0", "(best)", line_of(Unreset.score, "Save()")):
        profiled(Keeps(), SPEC.replace(dense_below=5))
    assert profiled(Keeps()).state_fields == ("best",)


def test_a_flow_without_source_is_refused_without_a_line():
    source = "def create_cache(self, page_size, head_dim):\n    return {'centroid': (1, head_dim), 'spare': (1, 1)}\n"
    body: dict = {}
    exec(source, body)
    with pytest.raises(FlowDefinitionError, match=r"'spare' is never written: .* compute it from 'k' and 'v'$"):
        profiled(type("Typed", (Centroid,), {"create_cache": body["create_cache"]})())


def test_a_value_kept_from_the_other_method():
    where = line_of(KeepsValues.score, "GeMV()")
    with refused(FormatError, "GeMV: arguments of different contexts", "from one method or step to another", where):
        profiled(KeepsValues())


@pytest.mark.parametrize(
    ("declared", "kind", "text"),
    [
        ({"k": (1, 64)}, FlowDefinitionError, "field 'k' is given by the pool, choose another name"),
        ({"my field": (1, 64)}, FlowDefinitionError, "field name 'my field' is no identifier"),
        ({"centroid": (0, 64)}, FlowDefinitionError, "field 'centroid' is (0, 64), expected (r, c) or (r, c, dtype)"),
        ({"centroid": 64}, FlowDefinitionError, "field 'centroid' is 64, expected (r, c) or (r, c, dtype)"),
        ({"centroid": (1, 64, torch.int8)}, FormatError, "dtype of field 'centroid' is torch.int8, expected one"),
        ({"centroid": (1, 64, [1])}, FormatError, "dtype of field 'centroid' is [1], expected one"),
        ([("centroid", (1, 64))], FlowDefinitionError, " returned list, expected a dict"),
    ],
    ids=str,
)
def test_a_field_that_is_declared_wrongly(declared, kind, text):
    flow = Centroid()
    flow.fields = declared
    with refused(kind, "create_cache", text, DECLARED):
        profiled(flow)


class ForRequests(Centroid):
    def create_request_cache(self, head_dim):
        return {}


def test_fields_per_request_name_their_method():
    where = line_of(ForRequests.create_request_cache, "def create_request_cache")
    with refused(FlowDefinitionError, "ForRequests.create_request_cache: request-slotted fields are not", where):
        profiled(ForRequests())


def test_a_page_size_the_flow_does_not_fit():
    class SubBlocks(Centroid):
        def check_spec(self, spec):
            if spec.page_size % 16:
                raise OptionError(f"SubBlocks: page_size is {spec.page_size}, expected a multiple of 16")

    assert profiled(SubBlocks()).spec.page_size == 16
    with refused(OptionError, "SubBlocks: page_size is 24, expected a multiple of 16"):
        profiled(SubBlocks(), SPEC.replace(page_size=24))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sum(dim=3), "Sum: dim is 3, expected 1 or 2 (an axis inside an entry)"),
        (lambda: CMax(dim="1"), "CMax: dim is '1', expected 1 or 2"),
        (lambda: Softmax(dim=1), "Softmax: dim is 1, expected 0 (the pages of a row)"),
        (lambda: Softmax(scale=-1.0), "Softmax: scale is -1.0, expected a positive number, or None"),
    ],
)
def test_an_option_of_an_op_out_of_range(make, text):
    with refused(OptionError, text):
        make()


def test_every_error_can_be_caught_as_the_builtin_it_specialises():
    for kind, builtin in ((ShapeError, ValueError), (FormatError, TypeError), (OptionError, ValueError)):
        assert issubclass(kind, FlowlibError)
        assert issubclass(kind, builtin)
