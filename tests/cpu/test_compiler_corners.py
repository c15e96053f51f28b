"""Corners of the compiler that a review found: names, infinities, state in an envelope, NaN, large products."""

import math

import pytest
import torch

import flowlib
from flowlib import FORMAT, RunContext, SelectionHandle, as_vtensor, ops, vFlow
from flowlib.errors import OptionError, ShapeError
from flowlib.testing import Case, gamma, scene, verify_flow

SIZES = {"page_size": 4, "head_dim": 16, "group_size": 2, "num_kv_heads": 2, "max_pages": 12}


def spec_of(**changes):
    return flowlib.Spec(**{**SIZES, "top_k": 2, "kv_dtype": torch.float32, **changes})


def both(flow, steps=1, **changes):
    """Pages and o of the last of some steps, by the reference and by Triton, each with a pool of its own."""
    plan = flowlib.profile(flow, spec_of(**changes))
    made = scene(plan, [41, 26, 9], seed=0)
    done = []
    for impl in ("reference", "triton"):
        pool = made.pool_by(impl)
        for _ in range(steps):
            out = plan.step(made.q, pool, made.batch, impl=impl)
        done.append(out)
    return done


def agree(flow, **changes):
    reference, triton = both(flow, **changes)
    assert torch.equal(reference.pages, triton.pages)
    eps = torch.finfo(torch.float32).eps
    assert (reference.o - triton.o).abs().max() <= 64 * eps * reference.o.abs().max()


class OneField(vFlow):
    """The mean key under any name."""

    def __init__(self, name):
        self.name = name
        self.cmean, self.gemm, self.max, self.topk = ops.CMean(dim=1), ops.GeMM(), ops.Max(dim=2), ops.topK()

    def create_cache(self, page_size, head_dim):
        return {self.name: (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cmean(cache["k"], cache[self.name], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        self.topk(self.max(self.gemm(q, cache[self.name], ctx=ctx), ctx=ctx), o, ctx=ctx)


NAMES = ["scores", "page_table", "seq_lens", "physical", "p", "r", "loc", "q", "width", "x0", "y", "softmax_in", "page"]


@pytest.mark.parametrize("name", NAMES)
def test_a_field_may_have_any_name(name):
    wanted, _ = both(OneField("centroid"))
    for out in both(OneField(name)):
        assert torch.equal(out.pages, wanted.pages)


class Scored(vFlow):
    """topK of an expression of the logits ``[S, 1, G]``."""

    def __init__(self, expression):
        self.expression, self.gemm, self.topk = expression, ops.GeMM(), ops.topK()

    def forward_indexer(self, q, o, cache, ctx):
        logits = self.gemm(q, cache["k"], ctx=ctx)
        self.topk(self.expression(logits, ctx), o, ctx=ctx)


def over_tokens(x, ctx):
    return ops.Max(dim=2)(ops.Max(dim=1)(x, ctx=ctx), ctx=ctx)


INFINITE = {
    "mask": lambda x, ctx: ops.Add()(over_tokens(x, ctx), ops.MaskSlice(0, 0, 1, 0.0, 0.5)(over_tokens(x, ctx))),
    "clamp": lambda x, ctx: ops.Clamp(-math.inf, 0.5)(over_tokens(x, ctx)),
    "relu": lambda x, ctx: ops.Relu(0.0, math.inf)(over_tokens(ops.Abs()(x), ctx)),
}


@pytest.mark.parametrize("name", INFINITE)
def test_infinite_parameters(name):
    agree(Scored(INFINITE[name]))


def test_a_state_that_starts_at_minus_infinity():
    class RunningMax(vFlow):
        def __init__(self):
            self.fill, self.load, self.save = ops.CFill(-math.inf), ops.Load(), ops.Save()
            self.gemm, self.maximum, self.topk = ops.GeMM(), ops.Maximum(), ops.topK()

        def create_cache(self, page_size, head_dim):
            return {"best": (1, 1)}

        def forward_cache(self, cache, loc, ctx):
            self.fill(cache["best"], loc=loc, ctx=ctx)

        def forward_indexer(self, q, o, cache, ctx):
            now = over_tokens(self.gemm(q, cache["k"], ctx=ctx), ctx)
            best = self.maximum(now, self.load(cache["best"], ctx=ctx), ctx=ctx)
            self.save(best, cache["best"], ctx=ctx)
            self.topk(best, o, ctx=ctx)

    agree(RunningMax(), steps=2)


class SavedEnvelope(vFlow):
    """Quest's expression over fields of which one is also state: no envelope after the first step."""

    def __init__(self):
        self.cmax, self.cmin, self.save = ops.CMax(dim=1), ops.CMin(dim=1), ops.Save()
        self.multiply, self.maximum, self.sum, self.topk = ops.Multiply(), ops.Maximum(), ops.Sum(dim=2), ops.topK()
        self.negate = ops.Add_Mul(beta=-1.0)

    def create_cache(self, page_size, head_dim):
        return {"hi": (1, head_dim), "lo": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cmax(cache["k"], cache["hi"], loc=loc, ctx=ctx)
        self.cmin(cache["k"], cache["lo"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        mean = q.mean(dim=1, keepdim=True)
        products = [self.multiply(mean, cache[name], ctx=ctx) for name in ("hi", "lo")]
        score = self.sum(self.maximum(*products, ctx=ctx), ctx=ctx)
        self.save(self.negate(cache["hi"], ctx=ctx), cache["hi"], ctx=ctx)
        self.topk(score, o, ctx=ctx)


def test_state_is_no_envelope():
    plan = flowlib.profile(SavedEnvelope(), spec_of())
    made = scene(plan, [41], seed=0)
    pool = made.pool_by("reference")
    plan.step(made.q, pool, made.batch)
    hi, lo = pool.fields["hi"].clone().double(), pool.fields["lo"].double()
    scores = plan.step(made.q, pool, made.batch, dtype=torch.float64).scores
    for head in range(2):
        mean = made.q[0, 2 * head : 2 * head + 2].double().mean(0)
        for logical in range(1, 10):
            page = int(made.batch.page_table[0, logical])
            wanted = torch.maximum(mean * hi[page, head, 0], mean * lo[page, head, 0]).sum()
            assert scores[0, head, logical].item() == pytest.approx(wanted.item(), rel=1e-6)


NAN = {
    "max": lambda x, ctx: over_tokens(ops.Log()(x), ctx),
    "min": lambda x, ctx: ops.Min(dim=2)(ops.Min(dim=1)(ops.Log()(x))),
    "clamp": lambda x, ctx: over_tokens(ops.Clamp(-3.0, 3.0)(ops.Log()(x)), ctx),
    "interleave": lambda x, ctx: over_tokens(ops.MaxInterleave(1, 2)(ops.Log()(x)), ctx),
    "row": lambda x, ctx: ops.Add()(over_tokens(x, ctx), ops.Max(dim=0)(ops.Log()(ops.Sum(dim=2)(ops.Sum(dim=1)(x))))),
}


@pytest.mark.parametrize("name", NAN)
def test_reductions_ignore_nan_in_every_mode(name):
    agree(Scored(NAN[name]))


def contexts():
    plan = flowlib.profile(flowlib.build("quest"), spec_of())
    made = scene(plan, [41, 26], seed=1)
    return made, [RunContext(plan, made.pool_by(impl), made.batch, impl=impl) for impl in ("reference", "triton")]


def test_top_p_with_infinite_logits_and_a_top_k_of_one():
    made, pair = contexts()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4 * made.batch.width, 1, 1, generator=g)
    x[5], x[7] = math.inf, math.nan
    lists = []
    for ctx in pair:
        o = SelectionHandle(ctx)
        scores = as_vtensor(x, FORMAT.RAGGED, ctx)
        ops.Union()(ops.TopK(1)(scores), ops.topP(0.5)(scores), o)
        lists.append(o.pages)
    assert torch.equal(*lists)


@pytest.mark.parametrize("sizes", [((1, 64), (1, 64)), ((2, 32), (4, 16)), ((3, 8), (2, 4))])
def test_kronecker_products_of_all_sizes(sizes):
    made, pair = contexts()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4 * made.batch.width, *sizes[0], generator=g)
    y = torch.randn(4, *sizes[1], generator=g)
    results = []
    for ctx in pair:
        pages = as_vtensor(x, FORMAT.RAGGED, ctx)
        results.append(ops.Kron()(pages, as_vtensor(y, FORMAT.BATCHED, ctx)).data.view(4, made.batch.width, -1))
    scored = slice(1, 5)
    torch.testing.assert_close(results[1][:, scored], results[0][:, scored], rtol=1e-6, atol=0)


def test_a_kronecker_product_that_no_gpu_can_gather():
    class Odd(Scored):
        def __init__(self):
            super().__init__(lambda x, ctx: None)

        def create_cache(self, page_size, head_dim):
            return {"c": (3, 8)}

        def forward_cache(self, cache, loc, ctx):
            ops.CReshape(-1, 3, 8)(ops.CMean(dim=1)(cache["k"], None, loc=loc), cache["c"], loc=loc)

        def forward_indexer(self, q, o, cache, ctx):
            wide = ops.Kron()(cache["c"], ops.Reshape(-1, 2, 12)(q.mean(dim=1, keepdim=True)))
            ops.topK()(ops.Max(dim=2)(ops.Max(dim=1)(wide)), o)

    with pytest.raises(ShapeError, match=r"Kron: 'y' \[2, 12\] is no power of two along axis \(1, 2\)"):
        flowlib.profile(Odd(), spec_of(head_dim=24))


def test_products_of_two_paged_matrices():
    class Gram(vFlow):
        def __init__(self):
            self.gram, self.norm, self.topk = ops.CGeMM(), ops.CL2Norm(dim=1), ops.topK()

        def create_cache(self, page_size, head_dim):
            return {"size": (1, page_size)}

        def forward_cache(self, cache, loc, ctx):
            self.norm(self.gram(cache["k"], cache["k"], None, loc=loc, ctx=ctx), cache["size"], loc=loc, ctx=ctx)

        def forward_indexer(self, q, o, cache, ctx):
            self.topk(ops.Max(dim=2)(cache["size"], ctx=ctx), o, ctx=ctx)

    agree(Gram())
    large = flowlib.profile(Gram(), spec_of(page_size=128, head_dim=128))
    assert "tl.dot" in large.program.source, "its rows and columns go through tensor cores, not through one huge block"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.topP(0.5, scale=0.0), "topP: scale is 0.0, expected a positive number"),
        (lambda: ops.topP(0.5, scale=-1), "topP: scale is -1, expected a positive number"),
        (lambda: ops.Add(alpha=None), "Add: alpha is None, expected a number"),
        (lambda: ops.Clamp("a", 1), "Clamp: lo is 'a', expected a number"),
        (lambda: ops.MaskSlice("a", 2, 1), "MaskSlice: start is 'a', expected a number"),
        (lambda: ops.Softmax(scale="x"), "Softmax: scale is 'x', expected a number"),
        (lambda: ops.Conv1d(3.0), "Conv1d: weight is 3.0, expected a list"),
        (lambda: ops.Reshape(-1, 1.0, 1), "Reshape: sizes are"),
    ],
)
def test_options_that_are_no_numbers(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("summary_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("page_size", "joined"), [(32, True), (64, True), (48, False)])
def test_rows_of_pages_are_one_axis_of_products(page_size, joined, summary_dtype):
    """Two and four rows per page lie on one axis of a block; three are padded to four, so they do not."""
    sizes = {**SIZES, "page_size": page_size, "top_k": 2, "bos": 2, "summary_dtype": summary_dtype}
    for name in ("lserve_sparse_attention", "lserve_centroid_sparse_attention"):
        spec = flowlib.Spec(**{**sizes, "kv_dtype": torch.bfloat16})
        source = flowlib.profile(flowlib.build(name), spec).program.source
        assert ("i_page_of_row" in source) is joined
        report = verify_flow(name, cases=[Case("rows", spec, (11 * page_size + 3, 5 * page_size, 7))])
        assert report.ok, str(report)
        assert not report.notes


class Variance(vFlow):
    """The largest variance of scores in a page were its keys' dimensions independent; q is either operand."""

    def __init__(self, first, squared):
        self.first, self.squared = first, squared
        self.cstd, self.gemm, self.multiply = ops.CStd(dim=1), ops.GeMM(), ops.Multiply()
        self.max, self.topk = ops.Max(dim=2 if first else 1), ops.topK()

    def create_cache(self, page_size, head_dim):
        return {"std": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cstd(cache["k"], cache["std"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        both = [self.multiply(q, q, ctx=ctx) if self.squared else q, self.multiply(cache["std"], cache["std"], ctx=ctx)]
        self.topk(self.max(self.gemm(*(both if self.first else both[::-1]), ctx=ctx), ctx=ctx), o, ctx=ctx)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "group_size", "first"), [(64, 4, True), (96, 3, True), (64, 4, False), (64, 1, True)]
)
def test_squares_of_16_bit_fields_lose_nothing_in_products(head_dim, group_size, first, dtype, squared):
    """Those of bfloat16 go to tensor cores in two parts, beside others' three; with one part it is off by 2^-9."""
    sizes = {"page_size": 16, "head_dim": head_dim, "group_size": group_size, "max_pages": 24, "kv_dtype": dtype}
    plan = flowlib.profile(Variance(first, squared), spec_of(**sizes))
    if dtype is torch.bfloat16 and group_size > 1:
        assert plan.program.source.split("def score_and")[0].count("tl.dot(") == (4 if squared else 2)
    made = scene(plan, [16 * 22 + 5, 16 * 9, 3], seed=1)
    pool = made.pool_by("triton")
    scores = plan.step(made.q, pool, made.batch, impl="triton").workspace["scores"]
    q, std = made.q.double().view(3, 2, group_size, head_dim), pool.fields["std"].double()
    for row, n_pages in enumerate((23, 9)):
        table = made.batch.page_table[row, 1 : n_pages - 1].long()
        weights, squares = q[row].square() if squared else q[row], std[table, :, 0].square().permute(1, 2, 0)
        want, size = (weights @ squares).amax(1), (weights.abs() @ squares).amax(1)
        got = scores.view(3, 2, -1)[row, :, 1 : n_pages - 1].double()
        assert ((got - want) / size).abs().max() <= gamma(head_dim + 12)
