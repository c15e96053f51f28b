"""Entmax flows by their options: each against its oracle in both implementations; what is selected and certified."""

import pytest
import torch

import flowlib
from flowlib.attention import Entmax
from flowlib.errors import OptionError
from flowlib.testing import Case, scene, verify_flow
from flowlib.testing.oracles.bisection import entmax_request
from tests.refusals import refused

TOPK, GAUSSIAN = "entmax_topk_attention", "entmax_gaussian_attention"
SPEC = flowlib.Spec(
    page_size=4, head_dim=20, group_size=2, num_kv_heads=1, kv_dtype=torch.float32, top_k=2, bos=1, eos=1, max_pages=14,
    max_batch=4,
)  # fmt: skip
LENGTHS = (53, 0, 22, 3)
SLOPES = (0.25, -0.1)

OPTIONS = [
    (TOPK, {"alpha": 2.0, "topk_pages": 5}, None),
    (TOPK, {"alpha": 4 / 3, "topk_pages": 6, "min_context": 23}, SLOPES),
    (GAUSSIAN, {"tau_mode": "corrected", "niter": 8, "certify": True}, SLOPES),
    (GAUSSIAN, {"alpha": 2.0, "tau_mode": "Fixed", "stats_dtype": "float32"}, None),
    (GAUSSIAN, {"safety_margin_z": 0.3, "max_quantile": 0.9, "excess": 0.5, "max_pages": 4, "certify": True}, None),
    (GAUSSIAN, {"alpha": 1.25, "tau_mode": "corrected", "min_context": 23, "stats_dtype": torch.bfloat16}, SLOPES),
]


@pytest.mark.parametrize(("name", "options", "slopes"), OPTIONS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_options_against_the_oracle(name, options, slopes):
    case = Case("odd sizes", SPEC.replace(alibi_slopes=slopes), LENGTHS)
    report = verify_flow(name, options=options, cases=[case])
    assert report.ok, str(report)
    assert report.oracle == "independent"
    assert report.attended["triton"] == report.attended["reference"] <= report.cached["reference"]


def step(name, lengths=LENGTHS, seed=0, slopes=None, spread=1.0, **options):
    """A step by reference in float64, and the scene it was made in; keys of a page lie near each other."""
    plan = flowlib.profile(flowlib.build(name, **options), SPEC.replace(alibi_slopes=slopes))
    made = scene(plan, lengths, seed=seed)
    g = torch.Generator().manual_seed(seed)
    for pages, n in zip(made.pages, lengths, strict=True):
        for i, page in enumerate(pages):
            shift = spread * torch.randn(1, SPEC.head_dim, generator=g)
            made.pool.k[page * 4 : page * 4 + min(4, n - 4 * i)] += shift
    made.pool.refresh(torch.arange(made.pool.num_pages))
    return made, plan.step(made.q, made.pool, made.batch, dtype=torch.float64)


def truth(made, row, alpha, slopes=None):
    """o ``[H_q, D]`` and p ``[H_q, T]`` of dense entmax over a row."""
    own, n = torch.tensor(made.pages[row]), made.lengths[row]
    slots = (own[:, None] * 4 + torch.arange(4)).flatten()[:n]
    return entmax_request(made.q[row], made.pool.k[slots], made.pool.v[slots], alpha, slopes)


def kept(out, row, tokens):
    """Tokens of a row that each head attends to, bool ``[H_q, T]``."""
    return (torch.arange(tokens)[:, None] // 4 == out.pages[row][:, None, :]).any(-1)


def test_topk_pages_counts_every_attended_page():
    for topk_pages in (3, 5, 9):
        _, out = step(TOPK, topk_pages=topk_pages)
        assert out.lengths.tolist() == [[min(topk_pages, n)] * 2 for n in (14, 0, 6, 1)]
    _, budget = step(TOPK)
    assert budget.lengths[0].tolist() == [4, 4], "without it, the spec's budget and its reserved pages"


@pytest.mark.parametrize(("name", "options"), [(TOPK, {"topk_pages": 3}), (GAUSSIAN, {"excess": 0.0})])
def test_rows_below_min_context_are_attended_in_full(name, options):
    for least, full in ((0, (False, False)), (23, (False, True)), (54, (True, True))):
        made, out = step(name, seed=3, slopes=(2.0, 1.0), spread=3.0, min_context=least, **options)
        for row, whole in ((0, full[0]), (2, full[1])):
            pages = -(-LENGTHS[row] // 4)
            assert (out.lengths[row] == pages).all() if whole else (out.lengths[row] < pages).all()
            if whole:
                o, _ = truth(made, row, 1.5, (2.0, 1.0))
                assert (out.o[row] - o).abs().max() <= 1e-9
        assert out.certified is None or out.certified[3].all(), "one page is the whole row"


def selected(**options):
    """Pages that Gaussian selection keeps of four long rows, summed."""
    _, out = step(GAUSSIAN, (53, 56, 51, 49), seed=1, **options)
    return int(out.lengths.sum())


@pytest.mark.parametrize(
    "steps",
    [
        [{"alpha": a} for a in (2.0, 1.5, 1.25)],
        [{"safety_margin_z": z} for z in (0.0, 0.5, 2.0)],
        [{"max_quantile": q, "excess": 0.0} for q in (0.05, 0.5, 0.995)],
        [{"excess": e, "max_quantile": 0.3} for e in (0.0, 0.5, 1.0)],
        [{"max_pages": m, "max_quantile": 0.999} for m in (1, 4, None)],
    ],
    ids=lambda steps: next(iter(steps[0])),
)
def test_each_gaussian_option_widens_the_selection(steps):
    counts = [selected(**options) for options in steps]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_tau_modes_differ_in_the_threshold_alone(alpha):
    made, exact = step(GAUSSIAN, seed=2, alpha=alpha)
    _, corrected = step(GAUSSIAN, seed=2, alpha=alpha, tau_mode="corrected", niter=12)
    _, rough = step(GAUSSIAN, seed=2, alpha=alpha, tau_mode="corrected", niter=0)
    _, fixed = step(GAUSSIAN, seed=2, alpha=alpha, tau_mode="fixed")
    assert exact.pages.equal(corrected.pages)
    assert exact.pages.equal(fixed.pages)
    for row in (0, 2, 3):
        torch.testing.assert_close(corrected.tau[row], exact.tau[row], rtol=0, atol=1e-9)
        torch.testing.assert_close(corrected.o[row], exact.o[row], rtol=0, atol=1e-8)
    assert (rough.tau[0] - exact.tau[0]).abs().min() > 1e-6, "no step was taken"
    assert fixed.mass[0].sub(1.0).abs().min() > 1e-6, "an estimate is not solved for"
    o, _ = truth(made, 3, alpha)
    for out in (exact, corrected, rough, fixed):
        assert (out.o[3] - o).abs().max() <= 1e-9, "a row of one page is solved for in every mode"


@pytest.mark.parametrize(("name", "options"), [(TOPK, {"topk_pages": 6}), (GAUSSIAN, {"certify": True})])
def test_a_certified_head_gives_dense_entmax(name, options):
    """And whatever is dropped moves the output by at most twice its mass times the largest value."""
    flags, dropped = set(), []
    for seed in range(6):
        made, out = step(name, seed=seed, spread=2.0, **options)
        for row in (0, 2, 3):
            o, p = truth(made, row, 1.5)
            lost = torch.where(kept(out, row, made.lengths[row]), 0.0, p).sum(1)
            largest = made.pool.v.nan_to_num().double().norm(dim=-1).max()
            assert ((out.o[row] - o).norm(dim=-1) <= 2 * lost * largest + 1e-9).all()
            assert lost[out.certified[row]].eq(0).all()
            flags |= set(out.certified[row].tolist())
            dropped += lost.tolist()
    assert flags == {True, False}
    assert max(dropped) > 0.0 or name == GAUSSIAN


def test_without_bounds_there_is_no_certificate():
    _, out = step(GAUSSIAN)
    assert out.certified is None
    assert out.lse is None
    assert out.plan.attention == Entmax(1.5)


REFUSALS = [
    (TOPK, {"alpha": 1.0}, "Entmax: alpha is 1.0, expected a number above 1 and at most 2; Softmax() is alpha 1"),
    (TOPK, {"topk_pages": 1}, "topk_pages is 1, expected at least 2 pages, or None for the budget"),
    (TOPK, {"topk_pages": 2.5}, "topk_pages is 2.5, expected at least 2 pages"),
    (TOPK, {"min_context": -1}, "min_context is -1, expected a number of tokens of at least 0"),
    (GAUSSIAN, {"min_context": 1.5}, "min_context is 1.5, expected a number of tokens of at least 0"),
    (GAUSSIAN, {"tau_mode": "newton"}, "tau_mode is 'newton', expected one of 'exact', 'corrected', 'fixed'"),
    (GAUSSIAN, {"niter": -1}, "niter is -1, expected an integer of at least 0"),
    (GAUSSIAN, {"alpha": 2.5}, "alpha is 2.5, expected a number above 1 and at most 2"),
    (GAUSSIAN, {"safety_margin_z": -0.1}, "safety_margin_z is -0.1, expected at least 0"),
    (GAUSSIAN, {"excess": -1.0}, "excess is -1.0, expected at least 0"),
    (GAUSSIAN, {"max_quantile": 0.0}, "max_quantile is 0.0, expected a number above 0 and below 1"),
    (GAUSSIAN, {"max_quantile": 1.0}, "max_quantile is 1.0, expected a number above 0 and below 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS)
def test_options_out_of_range(name, options, message):
    with refused(OptionError, message):
        flowlib.build(name, **options)


def test_as_many_pages_as_are_reserved_are_no_selection():
    with refused(OptionError, "topk_pages is 2, expected more than the 2 reserved pages (bos 1, eos 1)"):
        flowlib.profile(flowlib.build(TOPK, topk_pages=2), SPEC)
