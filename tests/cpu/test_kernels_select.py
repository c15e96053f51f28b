"""Page selection, interpreted, against a sort written in plain Python."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import pytest
import torch

from flowlib.kernels import select, select_wide
from flowlib.runtime import interpreter
from tests.suites.select_scratch import scratch

interpreter.install()

PAGE = 16
GUARD = -99


def expected(scores: list[float], n_pages: int, bos: int, eos: int, budget: int) -> list[int]:
    if n_pages <= bos + eos:
        return list(range(n_pages))
    scored = range(bos, n_pages - eos)
    best = sorted((-scores[page] + 0.0, page) for page in scored if scores[page] > -math.inf)  # NaN is not greater
    return sorted([*range(bos), *(page for _, page in best[:budget]), *range(n_pages - eos, n_pages)])


def guarded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An int32 buffer whose neighbours on both sides must stay as they are."""
    whole = torch.full((math.prod(shape) + 64,), GUARD, dtype=torch.int32)
    return whole, whole[32:-32].view(shape)


def check(
    scores,
    seq_lens,
    *,
    num_kv_heads=1,
    bos=1,
    eos=1,
    top_k=3,
    ratio=0.0,
    dense_below=0,
    scored=True,
    capacity=None,
    page=PAGE,
):
    rows, lanes, width = scores.shape
    ratio_q16 = round(ratio * 65536)
    capacity = capacity or max(top_k, (width * ratio_q16) >> 16) + bos + eos + 3
    whole, pages = guarded(len(seq_lens), num_kv_heads * lanes, capacity)
    lengths = torch.full(pages.shape[:2], GUARD, dtype=torch.int32)
    select.launch_select(
        scores if scored else None, torch.tensor(seq_lens, dtype=torch.int32), pages, lengths,
        num_kv_heads=num_kv_heads, lanes=lanes, page_size=page, bos=bos, eos=eos, top_k=top_k, ratio_q16=ratio_q16,
        dense_below=dense_below, scored=scored, width=width,
        **scratch(len(seq_lens), num_kv_heads * lanes, width, top_k),
    )  # fmt: skip
    assert (whole[:32] == GUARD).all()
    assert (whole[-32:] == GUARD).all()
    lists, counts = pages.view(rows, lanes, capacity).tolist(), lengths.view(rows, lanes).tolist()
    values = scores.tolist()
    for row in range(rows):
        seq_len = seq_lens[row // num_kv_heads]
        n_pages = min(-(-seq_len // page), width)
        budget = max(top_k, (n_pages * ratio_q16) >> 16) if scored else 0
        for lane in range(lanes):
            want = expected(values[row][lane], n_pages, bos, eos, budget)
            if seq_len <= dense_below:
                want = list(range(n_pages))
            want = want[:capacity]
            assert lists[row][lane] == want + [-1] * (capacity - len(want)), (row, lane)
            assert counts[row][lane] == len(want)


def planted(rows: int, lanes: int, seq_lens: list[int], width: int, bos: int, eos: int, heads: int = 1) -> torch.Tensor:
    """Random scores, NaN wherever a page is not scored."""
    scores = torch.full((rows, lanes, width), math.nan)
    for row in range(rows):
        last = min(-(-seq_lens[row // heads] // PAGE), width) - eos
        if last > bos:
            scores[row, :, bos:last] = torch.randn(lanes, last - bos)
    return scores


@pytest.mark.parametrize(("width", "top_k"), [(1, 3), (2, 0), (5, 1), (1023, 3), (1024, 192), (1025, 0), (8193, 2051)])
def test_takes_the_best_pages_of_ragged_rows(width, top_k):
    torch.manual_seed(width)
    seq_lens = [width * PAGE, 0, 1, max(1, width // 2 * PAGE - 3)]
    check(planted(8, 1, seq_lens, width, 1, 1, heads=2), seq_lens, num_kv_heads=2, top_k=top_k)


@pytest.mark.parametrize(("bos", "eos"), [(0, 1), (4, 2), (0, 3)])
def test_reserved_pages_are_taken_once_and_never_scored(bos, eos):
    torch.manual_seed(bos)
    seq_lens = [n * PAGE - 7 for n in (1, bos + eos, bos + eos + 1, 40)]
    check(planted(4, 1, seq_lens, 41, bos, eos), seq_lens, bos=bos, eos=eos, top_k=5)


def test_one_list_per_query_head_over_strided_scores():
    torch.manual_seed(1)
    seq_lens = [50 * PAGE, 33 * PAGE - 1]
    flat = torch.full((4, 67, 3), math.nan)  # page-major storage, an odd stride between rows
    scores = flat.transpose(1, 2)[:, :, :51]
    scores.copy_(planted(4, 3, seq_lens, 51, 1, 1, heads=2))
    check(scores, seq_lens, num_kv_heads=2, top_k=7)


@pytest.mark.parametrize("wide", [False, True], ids=["one program", "several"])
@pytest.mark.parametrize("width", [31, 1025])
def test_ties_go_to_the_lower_page(monkeypatch, wide, width):
    if wide:
        monkeypatch.setattr(select, "_REGISTER_WIDTH", 16)
        monkeypatch.setattr(select_wide, "_BLOCK", 16 if width < 100 else 512)
    torch.manual_seed(2)
    scores = torch.stack([
        torch.zeros(width),
        torch.where(torch.arange(width) % 2 == 0, 0.0, -0.0),
        torch.randint(-3, 4, (width,)).float(),
        torch.full((width,), -math.inf),
        torch.full((width,), math.nan),
        torch.where(torch.arange(width) % 5 == 0, torch.randn(width), -math.inf),
        torch.where(torch.arange(width) % 7 == 0, math.nan, torch.randn(width)),
        torch.where(torch.arange(width) % 3 == 0, math.inf, -3e38),
    ])[:, None, :]  # fmt: skip
    for top_k in (6, width - 3) if wide else (1, 6, width):
        check(scores, [width * PAGE] * 8, top_k=top_k)


def test_several_programs_share_a_wide_row():
    torch.manual_seed(3)
    check(torch.randn(1, 1, 70_000).mul(4).round(), [70_000], top_k=192, page=1)


def test_the_budget_grows_with_the_row():
    torch.manual_seed(4)
    seq_lens = [n * PAGE for n in (8, 64, 200)]
    check(planted(3, 1, seq_lens, 200, 1, 1), seq_lens, top_k=5, ratio=0.1)


def test_short_rows_are_dense_whatever_their_scores():
    seq_lens = [1, 96, 97, 640]
    check(torch.full((4, 1, 40), math.nan), seq_lens, top_k=2, dense_below=96, capacity=40)


def test_without_scores_only_reserved_pages_are_taken():
    check(torch.full((5, 2, 100), math.nan), [0, 1, 40, 97, 1600], bos=2, eos=4, top_k=9, scored=False, capacity=11)


def test_lists_are_cut_where_the_buffer_ends_and_lengths_where_the_table_ends():
    torch.manual_seed(5)
    check(torch.randn(2, 1, 20), [20 * PAGE, 9_000 * PAGE], top_k=10, capacity=7)
    check(torch.randn(1, 1, 20), [20 * PAGE], dense_below=1000, capacity=7)
