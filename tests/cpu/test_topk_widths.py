"""Selection at the widths where such kernels break: compared by the scores picked, and ties by the page."""

import pytest
import torch

import flowlib
from flowlib import FORMAT, ops
from flowlib.kernels import select
from flowlib.runtime import interpreter
from flowlib.testing import fill_nan
from tests.suites.select_scratch import scratch

interpreter.install()

WIDTHS = [1, 2, 1023, 1024, 1025, 8191, 8193, 65537]
BUDGETS = [1, 3, 192, 2051]
BOS, EOS = 1, 1
KINDS = ["all equal", "quantised", "all -inf", "NaN", "normal", "mostly -inf"]

widths = pytest.mark.parametrize("width", WIDTHS)
budgets = pytest.mark.parametrize("budget", BUDGETS)


def scores_of(kind: str, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    normal = torch.randn(width, generator=generator)
    if kind == "all equal":
        return torch.full((width,), 0.25)
    if kind == "quantised":
        return torch.randint(0, 4, (width,), generator=generator) / 100
    if kind == "all -inf":
        return torch.full((width,), float("-inf"))
    if kind == "NaN":
        return normal.masked_fill(torch.rand(width, generator=generator) < 0.5, float("nan"))
    if kind == "mostly -inf":
        return normal.masked_fill(torch.rand(width, generator=generator) < 0.999, float("-inf"))
    return normal


def strided(scores: torch.Tensor) -> torch.Tensor:
    """``[rows, lanes, W]`` of the same values whose rows are odd and whose pages are 3 elements apart; NaN between."""
    rows, width = scores.shape
    whole = torch.empty(rows, 3 * width + 5)
    fill_nan(whole)
    view = whole[:, 2 : 2 + 3 * width : 3]
    view.copy_(scores)
    return view[:, None]


def selected(scores: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists ``[rows, M]`` and lengths ``[rows]`` by the kernel, for full rows of pages of one token."""
    rows, _, width = scores.shape
    pages = torch.full((rows, 1, min(width, budget + BOS + EOS)), -99, dtype=torch.int32)
    lengths = torch.full((rows, 1), -99, dtype=torch.int32)
    seq_lens = torch.full((rows,), width, dtype=torch.int32)
    select.launch_select(
        scores, seq_lens, pages, lengths, num_kv_heads=1, lanes=1, page_size=1, bos=BOS, eos=EOS, top_k=budget,
        ratio_q16=0, dense_below=0, scored=True, **scratch(rows, 1, width, budget),
    )  # fmt: skip
    return pages[:, 0], lengths[:, 0]


def check(scores: torch.Tensor, pages: torch.Tensor, length: int, budget: int) -> None:
    """One row of scores ``[W]`` and its list: the best by a sort, ties to the lower page, nothing at -inf or NaN."""
    width = len(scores)
    listed = pages[:length].long()
    assert (listed[1:] > listed[:-1]).all(), "ascending, each page once"
    assert (pages[length:] == -1).all()
    reserved = torch.tensor(sorted({*range(min(BOS, width)), *range(max(width - EOS, 0), width)}))
    assert torch.isin(reserved, listed).all()
    if width <= BOS + EOS:
        assert listed.tolist() == list(range(width))
        return
    chosen = listed[(listed >= BOS) & (listed < width - EOS)]
    inner = scores[BOS : width - EOS]
    eligible = inner[inner > float("-inf")].sort(descending=True).values
    assert len(chosen) == min(budget, len(eligible))
    picked = scores[chosen]
    assert torch.equal(picked.sort(descending=True).values, eligible[: len(chosen)]), "by the scores picked"
    if len(chosen):
        tied = (inner == picked.min()).nonzero().flatten() + BOS
        taken = tied[torch.isin(tied, chosen)]
        assert torch.equal(taken, tied[: len(taken)]), "ties go to the lower page"


@widths
@budgets
def test_every_kind_of_scores(width, budget):
    scores = torch.stack([scores_of(kind, width) for kind in KINDS])
    pages, lengths = selected(scores[:, None], budget)
    for row, kind in enumerate(KINDS):
        check(scores[row], pages[row], int(lengths[row]), budget)
        if kind == "all -inf":
            assert int(lengths[row]) == min(width, BOS + EOS)
        if kind == "all equal":
            first = min(width, BOS + min(budget, max(width - BOS - EOS, 0)))
            assert pages[row, :first].tolist() == list(range(first))


@widths
def test_strided_rows_give_the_same_lists(width):
    scores = torch.stack([scores_of(kind, width) for kind in ("quantised", "NaN")])
    view = strided(scores)
    assert not view.is_contiguous() or width == 1
    pages, lengths = selected(view, 192)
    for row in range(len(scores)):
        check(scores[row], pages[row], int(lengths[row]), 192)


@pytest.mark.parametrize("width", [1025, 8193])
def test_runs_are_identical(width):
    scores = torch.stack([scores_of(kind, width) for kind in ("quantised", "all equal")])[:, None]
    first = selected(scores, 192)
    for _ in range(4):
        for one, other in zip(first, selected(scores, 192), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("width", [1, 2, 1023, 1025, 8193])
@pytest.mark.parametrize("budget", [1, 192])
def test_the_op_called_alone(width, budget):
    """topK by the reference and by the kernel, two kv heads, pages of one token."""
    spec = flowlib.Spec(
        page_size=1, head_dim=8, group_size=2, num_kv_heads=2, kv_dtype=torch.float32, top_k=budget, max_pages=width
    )
    plan = flowlib.profile(flowlib.build("streaming_attention"), spec)
    store = flowlib.PagedPool(plan, num_pages=1)
    table = torch.zeros(1, width, dtype=torch.int32)
    batch = flowlib.Batch(table, torch.tensor([width], dtype=torch.int32))
    scores = torch.stack([scores_of("quantised", width), scores_of("NaN", width)])
    for impl in ("reference", "triton"):
        ctx = flowlib.RunContext(plan, store, batch, impl=impl)
        handle = flowlib.SelectionHandle(ctx)
        ops.topK()(flowlib.as_vtensor(scores.reshape(2 * width, 1, 1), FORMAT.RAGGED, ctx), handle, ctx=ctx)
        for head in range(2):
            check(scores[head], handle.pages[0, head], int(handle.lengths[0, head]), budget)
