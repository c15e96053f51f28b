"""Selection from rows that several programs share: against one program a row, with short rows among them."""

import pytest
import torch

from flowlib.kernels import select, select_wide
from flowlib.runtime import interpreter
from tests.suites.select_scratch import scratch

PAGE, HEADS, LANES = 4, 2, 2
WIDTH, CAPACITY = 300, 64


@pytest.fixture
def narrow(monkeypatch):
    """Rows of more than 64 pages are shared, in blocks that divide neither them nor the lists."""
    monkeypatch.setattr(select, "_REGISTER_WIDTH", 64)
    monkeypatch.setattr(select_wide, "_BLOCK", 64)


def problem(pages: list[int], seed: int, device: str):
    """Scores ``[rows * HEADS, LANES, WIDTH]``, NaN past rows, lengths in tokens and a reversed page table."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(pages) * HEADS, LANES, WIDTH, generator=generator)
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.3, scores.round(), scores)  # ties
    scores[::3] = torch.where(torch.rand(scores[::3].shape, generator=generator) < 0.9, -torch.inf, scores[::3])
    for row, n in enumerate(pages):
        scores[row * HEADS : (row + 1) * HEADS, :, n:] = torch.nan
    lengths = torch.tensor([n * PAGE - (n > 0) for n in pages], dtype=torch.int32)
    table = torch.arange(len(pages) * WIDTH, dtype=torch.int32).flip(0).view(len(pages), WIDTH)
    if device == "cpu":
        interpreter.install()
    return scores.to(device), lengths.to(device), table.to(device)


def selected(scores, lengths, table, top_k, bins, ratio_q16=0, dense_below=0, full_pages=0, pdl=False):
    """(pages, physical pages, lengths) of the lists."""
    lists = (len(lengths), HEADS * LANES)
    pages, physical = (torch.full((*lists, CAPACITY), 77, dtype=torch.int32, device=scores.device) for _ in range(2))
    told = torch.full(lists, 77, dtype=torch.int32, device=scores.device)
    select.launch_select(
        scores, lengths, pages, told, num_kv_heads=HEADS, lanes=LANES, page_size=PAGE, bos=2, eos=1, top_k=top_k,
        ratio_q16=ratio_q16, dense_below=dense_below, full_pages=full_pages, scored=True, page_table=table,
        physical=physical, pdl=pdl, **bins,
    )  # fmt: skip
    return pages, physical, told


MANY = [WIDTH, 97, 65, 64, 0, 257]


@pytest.mark.parametrize(
    ("top_k", "more"),
    [
        (20, {}), (0, {}), (1, {}), (250, {}), (3, {"ratio_q16": 6554}), (9, {"dense_below": 97 * PAGE}),
        (9, {"full_pages": 96}),
    ],
)  # fmt: skip
def test_lists_are_those_of_one_program(top_k, more, request, device):
    given = problem(MANY, top_k, device)
    wanted = selected(*given, top_k, {}, **more)
    request.getfixturevalue("narrow")
    bins = scratch(len(MANY), HEADS * LANES, WIDTH, top_k, device)
    for found, want in zip(selected(*given, top_k, bins, **more), wanted, strict=True):
        assert torch.equal(found, want)


def test_larger_blocks_where_there_are_many_rows(monkeypatch, narrow, device):
    given, bins = problem(MANY, 3, device), scratch(len(MANY), HEADS * LANES, WIDTH, 20, device)
    wanted = selected(*given, 20, bins)
    monkeypatch.setattr(select_wide, "_PROGRAMS", 4)
    monkeypatch.setattr(select_wide, "_LARGE_BLOCK", 256)
    for found, want in zip(selected(*given, 20, bins), wanted, strict=True):
        assert torch.equal(found, want)


def test_the_scratch_serves_call_after_call(narrow, device):
    """Other rows, other budgets, fewer rows: whatever was there, histograms are zero again."""
    bins = scratch(len(MANY), HEADS * LANES, WIDTH, 5, device)
    for seed, (pages, top_k) in enumerate([(MANY, 5), (MANY[::-1], 40), (MANY[:3], 0), (MANY, 5)]):
        given = problem(pages, seed, device)
        fresh = scratch(len(pages), HEADS * LANES, WIDTH, top_k, device)
        for found, want in zip(selected(*given, top_k, bins), selected(*given, top_k, fresh), strict=True):
            assert torch.equal(found, want)
        assert not bins["bins"][..., : select_wide._STATES.value].any()


def test_nothing_but_minus_infinity_leaves_the_reserved_pages(narrow, device):
    scores, lengths, table = problem([WIDTH], 1, device)
    scores[0], scores[1] = -torch.inf, torch.nan
    pages, _, told = selected(scores, lengths, table, 7, scratch(1, HEADS * LANES, WIDTH, 7, device))
    assert told.eq(3).all()
    assert pages[0, :, :4].tolist() == [[0, 1, WIDTH - 1, -1]] * HEADS * LANES


def test_without_scratch_it_says_what_is_missing(narrow, device):
    with pytest.raises(ValueError, match="rows of up to 300 pages need the scratch 'bins'"):
        selected(*problem([WIDTH], 1, device), 7, {})


def test_rows_of_a_real_size(device):
    """Against a stable sort, whose ties go to the lower page."""
    width, top_k = 40_001, 9000
    if device == "cpu":
        interpreter.install()
    scores = torch.randn(2, 1, width, generator=torch.Generator().manual_seed(1)).mul(64).round().to(device)
    pages = torch.empty(1, 2, top_k + 1, dtype=torch.int32, device=device)
    told = torch.empty(1, 2, dtype=torch.int32, device=device)
    select.launch_select(
        scores, torch.tensor([width], dtype=torch.int32, device=device), pages, told, num_kv_heads=2, lanes=1,
        page_size=1, bos=0, eos=1, top_k=top_k, ratio_q16=0, dense_below=0, scored=True,
        **scratch(1, 2, width, top_k, device),
    )  # fmt: skip
    best = scores[:, 0, :-1].sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(1).values
    assert torch.equal(pages[0, :, :-1].long(), best)
    assert pages[0, :, -1].tolist() == [width - 1] * 2
    assert told.tolist() == [[top_k + 1] * 2]


def test_calls_that_follow_each_other(narrow, device):
    """As dependent launches where there are such: each call reads the scores that were just written, in one scratch."""
    rounds, (scores, lengths, table) = (40 if device == "cuda" else 2), problem(MANY, 1, device)
    bins, given, found = scratch(len(MANY), HEADS * LANES, WIDTH, 20, device), [], []
    for _ in range(rounds):
        scores.copy_(scores.roll(7, 0))
        given.append(scores.clone())
        found.append(selected(scores, lengths, table, 20, bins, pdl=device == "cuda"))
    for own, got in zip(given, found, strict=True):
        fresh = scratch(len(MANY), HEADS * LANES, WIDTH, 20, device)
        for x, want in zip(got, selected(own, lengths, table, 20, fresh), strict=True):
            assert torch.equal(x, want)
