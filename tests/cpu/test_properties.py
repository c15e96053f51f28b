"""Properties over random inputs: every op in every format, broadcasting, and small graphs fused against op by op."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import flowlib
from flowlib import FORMAT, ops
from flowlib.core.formats import Side
from flowlib.core.op import broadcast
from flowlib.errors import ShapeError
from flowlib.testing import ReferenceOracle, expect, scene
from flowlib.testing.selection import judge_selection
from flowlib.testing.stages import judge_scores, run_step
from tests.suites.op_run import HEADS, PAGE, bench, draw
from tests.suites.random_ops import LEAVES, WHERE, RandomFlow, dtypes, programs, tile_names, uses

FORMATS = st.sampled_from((FORMAT.BATCHED, FORMAT.RAGGED, FORMAT.PAGED))
SPEC = flowlib.Spec(page_size=8, head_dim=12, v_head_dim=4, group_size=3, num_kv_heads=2, top_k=2, max_pages=12)
LENGTHS = (75, 0, 26)

few = settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(few, max_examples=12, phases=[Phase.generate])  # a shrunk graph takes minutes
pair = settings(some, max_examples=2)
many = settings(few, max_examples=200)


@pytest.mark.parametrize("name", tile_names())
@given(data=st.data())
@few
def test_any_tile_op_in_any_format(name, data):
    """Reference in float64 and Triton in fp32 over random options, sizes, formats and dtypes."""
    use = data.draw(uses(name))
    dtype = data.draw(dtypes())
    formats = [data.draw(FORMATS) for _ in use.shapes]
    at = bench("cpu")
    inputs = [
        at.draw(shape, f, dtype, seed, use.domain)
        for seed, (shape, f) in enumerate(zip(use.shapes, formats, strict=True))
    ]
    batched = all(f is FORMAT.BATCHED for f in formats)
    lined_up = inputs if batched else [x[at.source(f)] for x, f in zip(inputs, formats, strict=True)]
    terms, op = sum(r * c for r, c in use.shapes) + 8, use.op.bound(at.plan.spec)
    for compute, impl in ((torch.float64, "reference"), (torch.float32, "triton")):
        ctx = at.context(impl, compute)
        given_values = [flowlib.as_vtensor(x, f, ctx) for x, f in zip(inputs, formats, strict=True)]
        out = use.op(*given_values, ctx=ctx)
        assert out.format is (FORMAT.BATCHED if batched else FORMAT.RAGGED)
        assert out.shape == use.op.infer(*use.shapes)
        result = out.data if batched else out.data[at.scored()]
        if name in WHERE:  # exact: a comparison of numbers both sides hold exactly
            assert torch.equal(result.double(), op.meaning(*(x.double() for x in lined_up)).expand_as(result))
            continue
        wanted = expect(
            lambda *xs: op.meaning(*xs).expand(len(xs[0]), *op.infer(*use.shapes)), lined_up,
            dtype=compute, compute=compute, terms=terms, independent=True,
        )  # fmt: skip
        verdict = wanted.judge(result)
        assert verdict.ok, f"{use} {[f.name for f in formats]} {dtype} by {impl}: {verdict}"


@pytest.mark.parametrize("name", [n for n in tile_names() if n not in WHERE and n != "Load"])
@given(data=st.data())
@few
def test_any_tile_op_into_a_field(name, data):
    """The cache side: pages that are finished, and no other, in the field's dtype."""
    use, dtype = data.draw(uses(name)), data.draw(dtypes())
    at = bench("cpu")
    op, finished = use.op.bound(at.plan.spec), [p for own in at.pages for p in own[:2]]
    loc = torch.tensor([p * PAGE + PAGE - 1 for p in finished] + [at.pages[0][4] * PAGE])
    entries = torch.tensor([p * HEADS + h for p in finished for h in range(HEADS)])
    inputs = [draw((at.entries[FORMAT.PAGED], *shape), dtype, i, use.domain) for i, shape in enumerate(use.shapes)]
    for compute, impl in ((torch.float64, "reference"), (torch.float32, "triton")):
        ctx = at.context(impl, compute, Side.CACHE)
        given_values = [flowlib.as_vtensor(x, FORMAT.PAGED, ctx) for x in inputs]
        shape = use.op.infer(*use.shapes)
        field = torch.full((at.entries[FORMAT.PAGED], *shape), -77.0, dtype=dtype)
        use.op(*given_values, flowlib.as_vtensor(field, FORMAT.PAGED, ctx), loc=loc, ctx=ctx)
        wanted = expect(
            lambda *xs: op.meaning(*xs).expand(len(xs[0]), *shape), [x[entries] for x in inputs],  # noqa: B023
            dtype=dtype, compute=compute, terms=sum(r * c for r, c in use.shapes) + 8, independent=True,
        )  # fmt: skip
        verdict = wanted.judge(field[entries])
        assert verdict.ok, f"{use} {dtype} by {impl}: {verdict}"
        others = torch.ones(len(field), dtype=torch.bool)
        others[entries] = False
        assert (field[others] == -77.0).all()


SEGMENTS = {
    "Softmax": lambda draw: ops.Softmax(scale=draw(st.floats(0.125, 3.0, width=32))),
    "Normalize": lambda draw: ops.Normalize(),
    "L2Normalize": lambda draw: ops.L2Normalize(),
    "Conv1d": lambda draw: ops.Conv1d(
        [draw(st.floats(-1, 1, width=32)) for _ in range(draw(st.sampled_from((1, 3, 5))))]
    ),
    **{n: lambda draw, n=n: getattr(ops, n)(dim=0) for n in ("Sum", "Mean", "Max", "Min", "L2Norm")},
}


@pytest.mark.parametrize("name", SEGMENTS)
@given(data=st.data())
@few
def test_any_segment_op_in_any_format(name, data):
    """Row by row: an op across pages sees the scored pages of its own row only."""
    op = SEGMENTS[name](data.draw)
    shape = data.draw(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 5))))
    format, dtype = data.draw(st.sampled_from((FORMAT.RAGGED, FORMAT.PAGED))), data.draw(dtypes())
    at = bench("cpu")
    x = at.draw(shape, format, dtype, 7, "positive" if name == "Normalize" else "real")
    rows, pages = at.scored() // at.batch.width, at.scored() % at.batch.width
    for compute, impl in ((torch.float64, "reference"), (torch.float32, "triton")):
        ctx = at.context(impl, compute)
        out = op(flowlib.as_vtensor(x, format, ctx), ctx=ctx)
        for row in rows.unique().tolist():
            own = x[at.source(format)[rows == row]]
            result = out.data[row][None] if out.format is FORMAT.BATCHED else out.data[at.scored()[rows == row]]
            wanted = expect(
                lambda v: op.meaning(v[None], scored=torch.ones(1, len(v), dtype=torch.bool))[0], [own],
                dtype=compute, compute=compute, terms=2 * len(own) + 8,
            )  # fmt: skip
            assert wanted.judge(result).ok, f"{op} row {row}, pages {pages[rows == row].tolist()} by {impl}"


@given(x=st.tuples(*[st.integers(1, 4)] * 2), y=st.tuples(*[st.integers(1, 4)] * 2))
@many
def test_axes_broadcast_where_torch_broadcasts(x, y):
    op = ops.Add()
    try:
        wanted = tuple(torch.broadcast_shapes(x, y))
    except RuntimeError:
        with pytest.raises(ShapeError, match=r"Add: axis [12] of 'y' is \d, expected \d or 1"):
            broadcast(op, x, y)
        return
    assert op.infer(x, y) == broadcast(op, x, y) == wanted


@given(formats=st.lists(FORMATS, min_size=1, max_size=3))
@many
def test_a_result_is_one_per_row_only_if_all_inputs_are(formats):
    wanted = FORMAT.BATCHED if set(formats) == {FORMAT.BATCHED} else FORMAT.RAGGED
    assert ops.Multiply().result_format(formats, Side.INDEXER) is wanted
    assert ops.Multiply().result_format(formats, Side.CACHE) is FORMAT.PAGED


# -- graphs


def op_by_op(made, store, program, impl):
    """The program's scores ``[rows * heads, 1, W]``, every op a plan of its own."""
    spec = made.spec
    ctx = flowlib.RunContext(made.plan, store, made.batch, impl=impl)
    q = made.q.reshape(-1, spec.group_size, spec.head_dim)
    leaves = [flowlib.as_vtensor(q, FORMAT.BATCHED, ctx)]
    leaves += [flowlib.as_vtensor(store.fields[n].flatten(0, 1), FORMAT.PAGED, ctx) for n in LEAVES[1:]]
    kept = ops.Sum(dim=2)(ops.Maximum()(leaves[1], leaves[2], ctx=ctx), ctx=ctx)
    halves = ops.Max(dim=1)(ops.Sum(dim=2)(leaves[3], ctx=ctx), ctx=ctx)
    tiny = ops.Add(alpha=2.0**-20, beta=2.0**-20)(kept, halves, ctx=ctx)
    scores = ops.Add()(program.run(leaves, ctx), tiny, ctx=ctx)
    assert scores.format is FORMAT.RAGGED
    return scores.data.view(len(q), made.batch.width, 1).transpose(1, 2)


@given(program=programs(SPEC.group_size, SPEC.head_dim), dtype=dtypes(), seed=st.integers(0, 99))
@some
def test_a_graph_fused_and_op_by_op(program, dtype, seed):
    """The whole flow as its fused kernels, and every op alone, both within the tolerance of float64."""
    plan = flowlib.profile(RandomFlow(program), SPEC.replace(kv_dtype=dtype))
    made, oracle = scene(plan, LENGTHS, seed=seed), ReferenceOracle(plan)
    store = made.pool_by("triton")
    run = run_step(made, "triton", store, made.q)
    scores, truths = judge_scores(run, oracle)
    assert not scores.problems
    assert scores.got
    verdict, where = scores.judge(torch.float32)
    assert verdict.ok, f"fused: {program} {dtype}, {where}: {verdict}"
    slack = float(scores.tolerance(torch.float32).max())
    verdict, where = judge_selection(run, oracle, truths, slack)
    assert verdict.ok, f"selection: {program} {dtype}, {where}: {verdict}"
    for impl in ("triton", "reference"):
        alone = dataclasses.replace(run.out, raw_scores=op_by_op(made, store, program, impl))
        verdict, where = judge_scores(dataclasses.replace(run, out=alone), oracle)[0].judge(torch.float32)
        assert verdict.ok, f"op by op by {impl}: {program} {dtype}, {where}: {verdict}"


FINISHES = ("approxTopK", "TopK", "topP", "Threshold", "Union")


@pytest.mark.parametrize("finish", FINISHES)
@given(data=st.data(), dtype=dtypes(), seed=st.integers(0, 99))
@pair
def test_a_graph_that_ends_in_another_selection(finish, data, dtype, seed):
    """Lists by the scores that were selected from, in both implementations."""
    program = data.draw(programs(SPEC.group_size, SPEC.head_dim, (finish,)))
    plan = flowlib.profile(RandomFlow(program), SPEC.replace(kv_dtype=dtype))
    made, oracle = scene(plan, LENGTHS, seed=seed), ReferenceOracle(plan)
    for impl in ("reference", "triton"):
        run = run_step(made, impl, made.pool_by(impl), made.q)
        verdict, where = judge_selection(run, oracle, {}, 0.0)
        assert verdict.ok, f"{program} {dtype} by {impl}, {where}: {verdict}"
        assert int(run.out.lengths.sum()) > 0
