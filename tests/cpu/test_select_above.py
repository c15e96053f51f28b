"""Selection of every page above -inf from rows too long for one program: against plain loops, on hostile memory."""

import math

import pytest
import torch

from flowlib.kernels.select import launch_select
from flowlib.runtime import interpreter

PAGE, BOS, EOS = 4, 2, 1
GROUPS, HEADS = 2, 1


def scores_of(rows: int, width: int, share: float, seed: int = 0) -> torch.Tensor:
    """Scores ``[rows, GROUPS, width]`` of which a share is kept; NaN and -inf are not, -0.0 and huge ones are."""
    g = torch.Generator().manual_seed(seed)
    odd = torch.tensor([math.nan, -math.inf, -0.0, 3e38, -3e38, 1.0])
    drawn = odd[torch.randint(2, 6, (rows, GROUPS, width), generator=g)]
    dropped = odd[torch.randint(0, 2, (rows, GROUPS, width), generator=g)]
    return torch.where(torch.rand(rows, GROUPS, width, generator=g) < share, drawn, dropped)


def wanted(scores: torch.Tensor, n_pages: int, whole: bool) -> list[int]:
    """The pages of one list, ascending."""
    return [p for p in range(n_pages) if whole or p < BOS or p >= n_pages - EOS or float(scores[p]) > -math.inf]


@pytest.mark.parametrize(("width", "capacity", "share"), [(2050, 2050, 0.3), (5001, 700, 0.6), (2049, 4200, 0.0)])
def test_every_page_above_minus_infinity(width, capacity, share):
    """Rows of several programs, of one, short and empty ones; lists cut at their capacity, or with room beyond rows."""
    interpreter.install()
    counts = [width, 2048, 2049, 5, 3, 1, 0]
    lengths = [n * PAGE - (n % 3 if n > 1 else 0) for n in counts]
    scores = scores_of(len(counts), width, share)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.arange(len(counts) * width, dtype=torch.int32).flip(0).view(len(counts), width)
    for row, n in enumerate(counts):
        scores[row, :, n:] = 9.0  # past a row, and on its reserved pages, anything may stand
        scores[row, :, :BOS], scores[row, :, max(0, n - EOS) : n] = -math.inf, math.nan
        table[row, n:] = 2**30
    lists = (len(counts), GROUPS, capacity)
    pages, physical = torch.full(lists, 77, dtype=torch.int32), torch.full(lists, 77, dtype=torch.int32)
    told = torch.full((len(counts), GROUPS), 77, dtype=torch.int32)
    launch_select(
        scores, seq_lens, pages, told, num_kv_heads=HEADS, lanes=GROUPS, page_size=PAGE, bos=BOS, eos=EOS,
        top_k=1 << 30, ratio_q16=0, dense_below=lengths[1], full_pages=3, scored=True, page_table=table,
        physical=physical,
    )  # fmt: skip
    for row, n in enumerate(counts):
        for lane in range(GROUPS):
            whole = lengths[row] <= lengths[1]
            own = wanted(scores[row, lane], n, whole)[:capacity]
            assert int(told[row, lane]) == len(own)
            assert pages[row, lane].tolist() == own + [-1] * (capacity - len(own))
            assert physical[row, lane, : len(own)].tolist() == table[row, own].tolist()
            assert physical[row, lane, len(own) :].eq(77).all()


def test_rows_too_long_for_the_smaller_block():
    """Past 16,384 pages a program takes 8,192: rows of three programs, the last of six pages, and of one."""
    interpreter.install()
    width, counts = 16390, [16390, 8192, 5]
    scores = scores_of(len(counts), width, 0.5)[:, :1].contiguous()
    seq_lens = torch.tensor([n * PAGE - 1 for n in counts], dtype=torch.int32)
    lists = (len(counts), 1, width)
    pages, told = torch.full(lists, 77, dtype=torch.int32), torch.full(lists[:2], 77, dtype=torch.int32)
    launch_select(
        scores, seq_lens, pages, told, num_kv_heads=1, lanes=1, page_size=PAGE, bos=BOS, eos=EOS, top_k=1 << 30,
        ratio_q16=0, dense_below=0, scored=True,
    )  # fmt: skip
    for row, n in enumerate(counts):
        own = wanted(scores[row, 0], n, whole=False)
        assert int(told[row, 0]) == len(own)
        assert pages[row, 0].tolist() == own + [-1] * (width - len(own))


def test_the_budget_decides_which_kernel_runs(monkeypatch):
    """A budget below the width still cuts."""
    interpreter.install()
    scores = torch.arange(2050.0)[None, None].clone()
    pages, told = torch.full((1, 1, 8), 77, dtype=torch.int32), torch.full((1, 1), 77, dtype=torch.int32)
    monkeypatch.setattr("flowlib.kernels.select.launch_select_above", None)
    launch_select(
        scores, torch.tensor([2050 * PAGE], dtype=torch.int32), pages, told, num_kv_heads=1, lanes=1, page_size=PAGE,
        bos=0, eos=1, top_k=3, ratio_q16=0, dense_below=0, scored=True,
    )  # fmt: skip
    assert pages[0, 0].tolist() == [2046, 2047, 2048, 2049, -1, -1, -1, -1]
