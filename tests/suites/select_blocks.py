"""Selection by the best of each block of a row, against one program a row."""

import pytest
import torch

from flowlib.kernels import select, select_blocks
from flowlib.runtime import interpreter
from tests.suites.select_scratch import scratch
from tests.suites.select_wide import HEADS, LANES, MANY, PAGE, WIDTH, problem, selected


@pytest.fixture
def short(monkeypatch):
    """Rows of more than 32 pages are shared, in blocks that divide neither them nor the lists."""
    monkeypatch.setattr(select_blocks, "_SHORTEST", 32)
    monkeypatch.setattr(select_blocks, "_BLOCKS", (64, 128))
    monkeypatch.setattr(select_blocks.Blocks, "pays", lambda *_, **__: True)


@pytest.mark.parametrize(
    ("top_k", "more", "block"),
    [
        (7, {}, 64), (16, {}, 64), (0, {}, 64), (1, {}, 64), (20, {}, 128), (32, {}, 128), (3, {"ratio_q16": 3277}, 64),
        (9, {"dense_below": 97 * PAGE}, 64), (9, {"full_pages": 96}, 64),
    ],
)  # fmt: skip
def test_lists_are_those_of_one_program(top_k, more, block, short, device):
    """Ties, -inf, NaN, rows of one block and of several, within the budget and empty; the scratch says nothing."""
    given, rows = problem(MANY, top_k, device), len(MANY)
    room = scratch(rows, HEADS * LANES, WIDTH, top_k, device, more.get("ratio_q16", 0))
    assert select_blocks.blocks_of(WIDTH, top_k, more.get("ratio_q16", 0)).block == block
    room["candidates"].fill_(-1)  # NaN, and no page
    wanted = selected(*given, top_k, {}, **more)
    for found, want in zip(selected(*given, top_k, room, **more), wanted, strict=True):
        assert torch.equal(found, want)


def test_lists_are_cut_at_their_room(short, device):
    """Lists of 64 entries for a budget of 32 pages and 40 reserved ones, or so many that they fill blocks."""
    scores, lengths, table = problem([WIDTH], 1, device)
    for bos, eos in ((40, 1), (2, 70), (70, 0), (140, 3), (0, 140)):
        lists = []
        for room in ({}, {"candidates": torch.full((1, HEADS * LANES, 777), -1, dtype=torch.int32, device=device)}):
            pages, physical = (torch.full((1, HEADS * LANES, 64), 77, device=device, dtype=torch.int32) for _ in "ab")
            told = torch.full((1, HEADS * LANES), 77, dtype=torch.int32, device=device)
            select.launch_select(
                scores, lengths, pages, told, num_kv_heads=HEADS, lanes=LANES, page_size=PAGE, bos=bos, eos=eos,
                top_k=32, ratio_q16=0, dense_below=0, scored=True, page_table=table, physical=physical, **room,
            )  # fmt: skip
            lists.append((pages, physical, told))
        assert all(torch.equal(one, other) for one, other in zip(*lists, strict=True))


@pytest.mark.parametrize("pdl", [False, True])
def test_calls_that_follow_each_other(pdl, short, device):
    """As dependent launches where there are such: each call reads the scores that were just written, in one scratch."""
    if pdl and device == "cpu":
        pytest.skip("the interpreter has no dependent launches")
    rounds, (scores, lengths, table) = (40 if device == "cuda" else 2), problem(MANY, 1, device)
    room, given, found = scratch(len(MANY), HEADS * LANES, WIDTH, 20, device), [], []
    for _ in range(rounds):
        scores.copy_(scores.roll(7, 0))
        given.append(scores.clone())
        found.append(selected(scores, lengths, table, 20, room, pdl=pdl))
    for own, got in zip(given, found, strict=True):
        for x, want in zip(got, selected(own, lengths, table, 20, {}), strict=True):
            assert torch.equal(x, want)


@pytest.mark.parametrize(("width", "top_k"), [(8192, 128), (16_384, 128), (40_001, 100), (131_072, 1000)])
def test_rows_of_a_real_size(width, top_k, device):
    """Against a stable sort, whose ties go to the lower page."""
    assert select_blocks.blocks_of(width, top_k, 0).pays(2, held=width <= 16_384)
    if device == "cpu":
        interpreter.install()
    scores = torch.randn(2, 1, width, generator=torch.Generator().manual_seed(1)).mul(64).round().to(device)
    pages = torch.empty(1, 2, top_k + 2, dtype=torch.int32, device=device)
    told = torch.empty(1, 2, dtype=torch.int32, device=device)
    room = scratch(1, 2, width, top_k, device)
    select.launch_select(
        scores, torch.tensor([width], dtype=torch.int32, device=device), pages, told, num_kv_heads=2, lanes=1,
        page_size=1, bos=1, eos=1, top_k=top_k, ratio_q16=0, dense_below=0, scored=True, **room,
    )  # fmt: skip
    best = scores[:, 0, 1:-1].sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(1).values + 1
    assert torch.equal(pages[0, :, 1:-1].long(), best)
    assert pages[0, :, (0, -1)].tolist() == [[0, width - 1]] * 2
    assert told.tolist() == [[top_k + 2] * 2]
    assert not room.get("bins", torch.zeros(1)).any(), "rows were not searched by all"


def test_what_is_shared():
    """As measured (128 x 65,536 was not): few long rows, and what one program cannot hold, but large parts of few."""
    cases = [
        (8, 8192, 128, True), (8, 16_384, 128, True), (8, 65_536, 128, True), (8, 131_072, 128, True),
        (128, 8192, 128, False), (128, 16_384, 128, False), (128, 32_768, 128, True), (128, 32_768, 2048, True),
        (128, 65_536, 2048, True),
        (8, 32_768, 2048, False), (8, 8192, 512, False),
    ]  # fmt: skip
    for lists, width, top_k, wanted in cases:
        assert select_blocks.blocks_of(width, top_k, 0).pays(lists, width <= 16_384) is wanted, (lists, width, top_k)
    assert select_blocks.blocks_of(4096, 16, 0) is None
    assert select_blocks.blocks_of(65_536, 16_384, 0) is None
    assert select_blocks.blocks_of(65_536, 16, 16_384) is None, "a fourth of a row"


def test_narrower_tables_fit_in_the_scratch_of_wider_ones():
    """A plan's scratch is for its widest table; what is launched over a narrower one needs no more."""
    for widest in (4097, 8192, 10_000, 16_384, 40_000, 65_536, 131_072):
        for top_k, ratio in ((128, 0), (1, 0), (2048, 0), (16, 655)):
            most = select.scratch_of(widest, top_k, ratio).get("candidates", 0)
            for width in (4097, 5000, 8192, 9001, 16_384, 30_000, 65_536, 131_072):
                shared = select_blocks.blocks_of(width, top_k, ratio) if width <= widest and most else None
                if shared is not None:
                    fitting = select_blocks.blocks_of(width, top_k, ratio, most)
                    assert fitting is not None, (widest, width, top_k)
                    assert fitting.words <= most
