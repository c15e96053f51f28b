"""Float8 summaries: their directions, and what a pool, a plan and a step make of them."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flowlib
from flowlib import ops
from flowlib.cli import app
from flowlib.core import float8
from flowlib.errors import BatchError, FormatError, OptionError
from flowlib.testing import Case, fill_nan, gamma, scene, verify_flow
from tests.refusals import refused
from tests.suites.e4m3 import LARGEST, half_step, keys, searched
from tests.suites.same import IMPLEMENTATIONS, bits
from tests.suites.worlds import int32, table_of, world

F8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
SPEC = flowlib.Spec(page_size=5, head_dim=24, group_size=3, num_kv_heads=2, top_k=2, max_pages=24, summary_dtype=F8)
impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
some = settings(
    max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip

# -- directions


class Everything(flowlib.vFlow):
    """Fields of every kind: bounds, bounds of bounds, read back, to nearest, of a dtype of their own, and state."""

    def __init__(self):
        self.cmax, self.cmin, self.cmean, self.of_groups = ops.CMax(), ops.CMin(), ops.CMean(), ops.CMaxInterleave(1, 4)
        self.maximum, self.minimum, self.multiply = ops.CMaximum(), ops.CMinimum(), ops.CMultiply()
        self.cadd, self.fill, self.save = ops.CAdd(), ops.Fill(), ops.Save()
        self.gemm, self.max, self.of_rows, self.add = ops.GeMM(), ops.Max(dim=2), ops.Max(dim=1), ops.Add()
        self.topk = ops.topK()

    def create_cache(self, page_size, head_dim):
        own = {"own8": (1, head_dim, F8), "own32": (1, head_dim, FP32), "state": (1, 1)}
        return {name: (1, head_dim) for name in SUMMARIES} | {"groups": (page_size // 4, head_dim)} | own

    def forward_cache(self, cache, loc, ctx):
        at = {"loc": loc, "ctx": ctx}
        k, v = cache["k"], cache["v"]
        self.cmax(k, cache["top"], **at)
        self.cmin(k, cache["low"], **at)
        self.of_groups(k, cache["groups"], **at)
        values = self.cmax(v, None, **at)
        self.maximum(cache["top"], values, cache["both"], **at)
        self.minimum(cache["low"], self.cmin(v, None, **at), cache["least"], **at)
        self.maximum(cache["top"], self.multiply(values, values, None, **at), cache["mixed"], **at)
        self.multiply(values, values, cache["squared"], **at)
        self.minimum(values, cache["top"], cache["crossed"], **at)
        self.cadd(cache["squared"], cache["both"], cache["sum"], **at)
        self.cmax(k, cache["own8"], **at)
        self.cmean(k, cache["own32"], **at)
        self.fill(cache["state"], **at)

    def forward_indexer(self, q, o, cache, ctx):
        fields = [cache[name] for name in (*SUMMARIES, "own8", "own32")]
        scores = [self.max(self.gemm(q, x, ctx=ctx), ctx=ctx) for x in fields]
        scores.append(self.of_rows(self.max(self.gemm(q, cache["groups"], ctx=ctx), ctx=ctx), ctx=ctx))
        total = scores[0]
        for score in scores[1:]:
            total = self.add(total, score, ctx=ctx)
        self.save(total, cache["state"], ctx=ctx)
        self.topk(total, o, ctx=ctx)


SUMMARIES = {
    "top": "up", "low": "down", "both": "up", "least": "down", "mixed": "nearest", "squared": "nearest",
    "crossed": "nearest", "sum": "nearest",
}  # fmt: skip
EVERYTHING = SPEC.replace(page_size=8)


def test_the_graph_tells_how_a_field_is_rounded():
    fields = flowlib.profile(Everything(), EVERYTHING).fields
    assert {name: (fields[name].dtype, fields[name].rounding) for name in SUMMARIES} == {
        name: (F8, rounding) for name, rounding in SUMMARIES.items()
    }
    assert (fields["groups"].dtype, fields["groups"].rounding) == (F8, "up")
    rest = {name: (fields[name].dtype, fields[name].rounding, fields[name].kind) for name in ("own8", "own32", "state")}
    assert rest == {"own8": (F8, "", "summary"), "own32": (FP32, "", "summary"), "state": (BF16, "", "state")}


@pytest.mark.parametrize("dtype", [None, BF16, FP16, FP32])
def test_other_dtypes_are_stored_as_they_are(dtype):
    fields = flowlib.profile(Everything(), EVERYTHING.replace(summary_dtype=dtype)).fields
    assert {fields[name].dtype for name in SUMMARIES} == {dtype or BF16}
    assert all(not f.rounding for f in fields.values())
    assert fields["state"].dtype is BF16


def test_every_kind_of_field_has_the_same_codes_in_both_modes_and_the_same_scores():
    """Directions are those of the formula, computed anew from K and V; fields read back are read as stored."""
    scales = torch.tensor([0.25, 4.0])
    made = scene(flowlib.profile(Everything(), EVERYTHING), (43, 17))
    pools = {}
    for impl in IMPLEMENTATIONS:
        pool = flowlib.PagedPool(made.plan, made.pool.num_pages, field_scales=scales)
        pool.k.copy_(made.pool.k)
        pool.v.copy_(made.pool.v)
        for field in pool.fields.values():
            fill_nan(field)
        made.plan.update(pool, made.finished_slots(), impl=impl)
        pools[impl] = pool
    one, other = pools.values()
    for name in (*SUMMARIES, "groups", "own8"):
        assert torch.equal(bits(one.fields[name]), bits(other.fields[name])), name
    page = made.pages[0][3]
    at = slice(8 * page, 8 * page + 8)
    k, v = (x[at].double().transpose(0, 1) for x in (made.pool.k, made.pool.v))  # [H, 8, D]
    got = {name: one.values(name)[page].double() for name in SUMMARIES}
    value, unit = v.amax(1, keepdim=True), scales[:, None, None]
    assert torch.equal(got["top"], searched(k.amax(1, keepdim=True), unit, "up"))
    assert torch.equal(got["both"], searched(torch.maximum(got["top"], value), unit, "up"))
    assert torch.equal(got["least"], searched(torch.minimum(got["low"], v.amin(1, keepdim=True)), unit, "down"))
    squared = float8.encode((value * value).float(), unit, "nearest").double() * unit
    assert torch.equal(got["squared"], squared)
    total = float8.encode((got["squared"] + got["both"]).float(), unit, "nearest").double() * unit
    assert torch.equal(got["sum"], total)
    steps = [made.plan.step(made.q, one.clone(), made.batch, impl=impl) for impl in IMPLEMENTATIONS]
    scored = ~steps[0].scores.isnan()
    size = steps[0].scores[scored].abs().max()
    assert (steps[0].scores - steps[1].scores)[scored].abs().max() <= 16 * gamma(24 + 16) * size


# -- bounds


@given(data=st.data())
@some
def test_bounds_in_a_pool_are_the_nearest_codes_outside(data):
    dtype = data.draw(st.sampled_from((BF16, FP16, FP32)))
    scales = torch.tensor([2.0 ** data.draw(st.integers(-4, 4)) for _ in range(2)])
    spec = SPEC.replace(kv_dtype=dtype, page_size=3, head_dim=4)
    plan = flowlib.profile(flowlib.build("quest"), spec)
    k = torch.stack([data.draw(keys(12, dtype, float(s))).view(3, 4) for s in scales], 1)
    for impl in IMPLEMENTATIONS:
        pool = flowlib.PagedPool(plan, 2, field_scales=scales)
        pool.write(k, k, torch.arange(3, 6), impl=impl)
        high, low = k.double().amax(0), k.double().amin(0)  # [H, D]
        unit = scales.double()[:, None]
        found = {name: pool.values(name)[1, :, 0].double() for name in pool.fields}
        beyond = (high > LARGEST * unit).sum() + (low < -LARGEST * unit).sum()
        assert pool.saturated_bounds() == int(beyond)
        assert ((found["k_max"] >= high) | (high > LARGEST * unit)).all()
        assert ((found["k_min"] <= low) | (low < -LARGEST * unit)).all()
        assert torch.equal(found["k_max"], searched(high, unit.expand_as(high), "up"))
        assert torch.equal(found["k_min"], searched(low, unit.expand_as(low), "down"))


@impls
def test_the_quest_bound_is_at_least_the_largest_score_of_the_page(impl):
    spec = SPEC.replace(head_dim=64, page_size=16, top_k=1)
    made = world("gqa_quest_sparse_attention", spec, [135, 60], impl=impl)
    q = made.queries()
    scores = made.step(q, impl=impl).scores.double()
    compute = torch.float64 if impl == "reference" else torch.float32
    for row, own in enumerate(made.pages):
        for head in range(2):
            heads = q[row, 3 * head : 3 * head + 3].double()
            for page in range(1, -(-len(made.k[row]) // 16) - 1):
                k = made.k[row][16 * page : 16 * page + 16, head].double()
                exact = (heads @ k.T).max()
                entry = [made.pool.values(n)[own[page], head, 0].double().abs() for n in ("k_max", "k_min")]
                slack = gamma(2 * 64 + 8, compute) * (heads.abs() @ torch.maximum(*entry)).max()
                assert scores[row, head, page] >= exact - slack


@impls
def test_nan_stays_and_what_is_cut_is_counted(impl):
    spec = SPEC.replace(page_size=2, head_dim=3, summary_scale=0.5)
    plan = flowlib.profile(flowlib.build("quest"), spec)
    pool = flowlib.PagedPool(plan, 4)
    nan, inf = float("nan"), float("inf")
    k = torch.tensor([[nan, 1.0, 300.0], [nan, nan, -230.0], [inf, 224.0, 0.0], [-inf, -224.0, -0.0]])
    k = k[:, None].expand(-1, 2, -1).to(BF16)
    pool.write(k, k, torch.tensor([2, 3, 6, 7]), impl=impl)
    assert pool.values("k_max")[[1, 3], 1, 0].tolist() == [[-224.0, 1.0, 224.0], [224.0, 224.0, 0.0]]
    assert pool.values("k_min")[[1, 3], 1, 0].tolist() == [[224.0, 1.0, -224.0], [-224.0, -224.0, 0.0]]
    assert pool.saturated_bounds() == 2 * 4, "300, -230, inf and -inf, in two heads; a NaN is no key"
    pool.refresh(torch.tensor([1]), impl=impl)
    assert pool.saturated_bounds() == pool.clone().saturated_bounds() == 2 * 6
    means = flowlib.PagedPool(flowlib.profile(flowlib.build("block_sparse"), spec), 4)
    means.write(k, k, torch.tensor([2, 3, 6, 7]), impl=impl)
    assert means.fields["centroid"].view(torch.uint8)[1, 1, 0].tolist()[:2] == [0x7F, 0x7F]
    assert means.saturated_bounds() == 0, "a mean bounds nothing"


# -- attention


def intervals(q, centre, radius, scale):
    """Log-probability of each page ``[G, n]``, at least and at most, for mean keys known up to `radius` ``[n, D]``."""
    logits = scale * q @ centre.T
    off = scale * q.abs() @ radius.T
    logs, off = logits.log_softmax(-1), off + off.amax(-1, keepdim=True)
    return logs - off, logs + off


@impls
def test_pages_that_rounding_cannot_push_out_are_attended_and_so_is_their_mass(impl):
    """Mean keys in float8 beside bfloat16, and queries that each look for a page: a bound on how far rounding moves
    scores says which pages both must choose, and so what mass they keep at least."""
    spec = SPEC.replace(head_dim=32, page_size=8, top_k=4, summary_scale=0.25)
    generator = torch.Generator().manual_seed(3)
    topics = torch.randn(24, 1, 2, 32, generator=generator)
    k = [(topics + 0.3 * torch.randn(24, 8, 2, 32, generator=generator)).view(192, 2, 32)[:188].to(BF16)]
    q = topics[[5, 12, 19], 0].transpose(0, 1).reshape(1, 6, 32).to(BF16)
    made = [world("gqa_block_sparse_attention", spec.replace(summary_dtype=t, summary_scale=s), [188], k=k, impl=impl)
            for t, s in ((F8, 0.25), (None, 1.0))]  # fmt: skip
    chosen = [m.step(q, impl=impl).pages[0] for m in made]
    for head in range(2):
        heads, own = q[0, 3 * head : 3 * head + 3].double(), k[0][:, head].double()
        mean = own[8:184].view(22, 8, 32).mean(1)
        summed = gamma(9) * own[8:184].view(22, 8, 32).abs().mean(1)
        radius = summed + torch.maximum(half_step(mean.abs() + summed, F8, 0.25), half_step(mean.abs() + summed, BF16))
        for one in made:
            stored = one.pool.values("centroid")[list(one.pages[0][1:23]), head, 0].double()
            assert ((stored - mean).abs() <= radius).all()
        least, most = (x.amax(0) for x in intervals(heads, mean, radius, spec.softmax_scale))
        rivals = (most[None, :] >= least[:, None]).sum(1) - 1
        sure = {0, 23} | {1 + i for i in (rivals < 4).nonzero().flatten().tolist()}
        mass = torch.nn.functional.pad((spec.softmax_scale * heads @ own.T).softmax(-1).mean(0), (0, 4))  # [T]
        share = mass.view(24, 8).sum(1)
        attended = [set(pages[head].tolist()) - {-1} for pages in chosen]
        assert all(sure <= pages for pages in attended), f"{sure} are sure, {attended} attended"
        kept, full, bound = (float(share[list(pages)].sum()) for pages in (*attended, sure))
        assert kept / full >= bound / full > 0.5, "the bound says something"


@pytest.mark.parametrize("name", flowlib.list_flows(mla=False))
def test_every_flow_runs_with_float8_summaries(name):
    """Fields, scores, selection and attention of both modes against the oracle; bounds are on their side."""
    flow = flowlib.build(name)
    size = 16 if flow.default_page_size > 16 else min(flow.default_page_size, 8)
    case = Case("fp8", SPEC.replace(page_size=size, summary_scale=0.25), (5 * size + 1, 0, 2 * size))
    report = verify_flow(name, cases=[case])
    assert report.ok, str(report)


@pytest.mark.parametrize("kv_dtype", [FP32, FP16, F8])
@pytest.mark.parametrize("name", ["gqa_quest_sparse_attention", "block_sparse_attention"])
def test_beside_pools_of_other_dtypes(name, kv_dtype):
    spec = SPEC.replace(kv_dtype=kv_dtype, k_scale=0.5 if kv_dtype is F8 else 1.0, summary_scale=2.0)
    report = verify_flow(name, cases=[Case("fp8", spec, (41, 17))])
    assert report.ok, str(report)


def test_an_envelope_is_two_products_still_unless_its_halves_are_stored_differently():
    class Mixed(type(flowlib.build("quest"))):
        def create_cache(self, page_size, head_dim):
            return {"k_max": (1, head_dim, F8), "k_min": (1, head_dim)}

    source = flowlib.profile(flowlib.build("quest"), SPEC).program.source
    assert source.partition("def score(")[2].partition("\ndef ")[0].count("tl.dot(") == 2
    assert "tl.dot(" not in flowlib.profile(Mixed(), SPEC).program.source


# -- what a plan and a pool say


def test_bytes_are_those_of_float8():
    half, whole = (flowlib.profile(flowlib.build("quest"), SPEC.replace(summary_dtype=t)) for t in (F8, None))
    assert 2 * half.field_bytes_per_page == whole.field_bytes_per_page == 2 * 2 * 24 * 2
    assert (half.storage["k_max"], whole.storage["k_max"]) == ((1, 24, F8, "scaled"), (1, 24, BF16))
    assert half.scaled_fields == ("k_max", "k_min")
    assert whole.scaled_fields == ()
    read = [flowlib.build("quest").run_indexer_virtual(4, 16, 128, *dtype) for dtype in ((), (F8,))]
    assert read == [2 * 128 * 2, 2 * 128]
    text = str(half)
    assert "k_max                summary  [1, 24]      float8_e4m3fn times a scale, rounded up" in text
    assert "score                      48        4" in text
    assert "times a scale" not in str(whole)
    assert ", to nearest" in str(flowlib.profile(flowlib.build("block_sparse"), SPEC))


def test_the_command_line_takes_it():
    shown = CliRunner().invoke(app, ["profile", "quest", "--summary-dtype", "fp8", "--summary-scale", "0.5"])
    assert shown.exit_code == 0
    assert "float8_e4m3fn times a scale, rounded down" in shown.output
    kernels = CliRunner().invoke(app, ["kernels", "quest", "--summary-dtype", "float8_e4m3fn"])
    assert "import count_saturated, encode, unscaled" in kernels.output
    wrong = CliRunner().invoke(app, ["kernels", "quest", "--summary-dtype", "fp9"])
    assert wrong.exit_code == 2
    assert "--summary-dtype is 'fp9', expected one of bfloat16, float16" in wrong.output


def test_a_pool_keeps_one_scale_per_head():
    plan = flowlib.profile(flowlib.build("quest"), SPEC.replace(summary_scale=0.5))
    assert flowlib.PagedPool(plan, 2).field_scales.tolist() == [0.5, 0.5]
    given = torch.tensor([0.25, 8.0])
    pool = flowlib.PagedPool(plan, 2, field_scales=given)
    twin = pool.clone()
    assert twin.field_scales.tolist() == [0.25, 8.0]
    assert twin.field_scales.data_ptr() != pool.field_scales.data_ptr()
    view = flowlib.KVStore(plan, pool.k, pool.v, pool.fields, field_scales=given)
    assert view.operands["k_max"].data_ptr() == pool.fields["k_max"].data_ptr()
    plain = flowlib.PagedPool(flowlib.profile(flowlib.build("quest"), SPEC.replace(summary_dtype=None)), 2)
    assert (plain.field_scales, plain.saturated, plain.saturated_bounds()) == (None, None, 0)
    assert plain.values("k_max") is plain.fields["k_max"]


WRONG_SCALES = [
    ([1.0, 1.0], FormatError, "KVStore: field_scales is list, expected torch.float32 [2], one per kv head"),
    (torch.ones(3), FormatError, "KVStore: field_scales is torch.float32 [3], expected torch.float32 [2]"),
    (torch.ones(2).double(), FormatError, "KVStore: field_scales is torch.float64 [2], expected torch.float32 [2]"),
    (torch.ones(2, device="meta"), BatchError, "KVStore: 'field_scales' is on meta, expected cpu"),
    (torch.tensor([1.0, 0.3]), OptionError, "KVStore: field_scales has 0.3", "expected powers of two from 2**-64"),
    (torch.tensor([0.0, 1.0]), OptionError, "KVStore: field_scales has 0.0, expected powers of two"),
    (torch.tensor([1.0, -2.0]), OptionError, "KVStore: field_scales has -2.0, expected powers of two"),
    (torch.tensor([1.0, float("inf")]), OptionError, "KVStore: field_scales has inf, expected powers of two"),
    (torch.tensor([1.0, float("nan")]), OptionError, "KVStore: field_scales has nan, expected powers of two"),
    (torch.tensor([1.0, 2.0**65]), OptionError, "KVStore: field_scales has", "expected powers of two from 2**-64"),
]


@pytest.mark.parametrize(("scales", "kind", "message"), [(s, k, m) for s, k, *m in WRONG_SCALES])
def test_wrong_scales(scales, kind, message):
    plan = flowlib.profile(flowlib.build("quest"), SPEC)
    with refused(kind, *message):
        flowlib.PagedPool(plan, 2, field_scales=scales)


def test_wrong_pools():
    scaled, half = (flowlib.profile(flowlib.build("quest"), SPEC.replace(summary_dtype=t)) for t in (F8, None))
    with refused(FormatError, "KVStore: field_scales is given, but no field of the plan is a float8 summary"):
        flowlib.PagedPool(half, 2, field_scales=torch.ones(2))
    pool = flowlib.PagedPool(half, 2)
    with refused(FormatError, "KVStore: no field of the plan is a float8 summary, so there are no scales"):
        pool.scales_of(FP32)
    with refused(FormatError, "KVStore: 'k_max' is torch.bfloat16, expected torch.float8_e4m3fn"):
        flowlib.KVStore(scaled, pool.k, pool.v, pool.fields)
    with refused(BatchError, "update: the pool holds", "this plan needs", "make it with PagedPool(plan, ...)"):
        scaled.update(pool, torch.tensor([4]))

    class Own(type(flowlib.build("quest"))):
        def create_cache(self, page_size, head_dim):
            return {"k_max": (1, head_dim, F8), "k_min": (1, head_dim, F8)}

    batch = flowlib.Batch(table_of([[0]]), int32([3]))
    q = torch.zeros(1, 6, 24, dtype=BF16)
    with refused(BatchError, "step: the pool holds", "this plan needs"):
        scaled.step(q, flowlib.PagedPool(flowlib.profile(Own(), SPEC), 2), batch)
