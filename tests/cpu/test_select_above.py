"""Selection of every page above -inf from rows too long for one program: against torch, on hostile memory.

Both ways of it: blocks counted by a kernel of their own, and by each program of a list.
"""

import math

import pytest
import torch

import flowlib
from flowlib import ops
from flowlib.core.formats import Mode
from flowlib.kernels import select_above
from flowlib.kernels.select import launch_select
from flowlib.runtime import interpreter
from flowlib.runtime.selection import select_alone
from flowlib.testing import scene

PAGE, BOS, EOS = 4, 2, 1
HEADS, GROUPS = 2, 2
GARBAGE = 0x7FC00000  # as int32 a huge count, as fp32 NaN

counted = pytest.mark.parametrize("counted", [True, False])


@pytest.fixture(autouse=True)
def interpreted():
    interpreter.install()


@pytest.fixture
def small_blocks(monkeypatch):
    """Both ways at sizes that make many blocks of few pages."""
    monkeypatch.setattr(select_above, "_BLOCK", 32)
    monkeypatch.setattr(select_above, "_SHORT_WIDTH", 32)
    monkeypatch.setattr(select_above, "_FEWEST_COUNTS", 2)
    monkeypatch.setattr(select_above, "_UNCOUNTED", ((100, 32, 1), (2**31, 64, 1)))


def scores_of(rows: int, lanes: int, width: int, share: float, seed: int = 0) -> torch.Tensor:
    """Scores ``[rows, lanes, width]`` of which a share is kept; NaN and -inf are not, -0.0 and huge ones are."""
    g = torch.Generator().manual_seed(seed)
    odd = torch.tensor([math.nan, -math.inf, -0.0, 3e38, -3e38, 1.0])
    drawn = odd[torch.randint(2, 6, (rows, lanes, width), generator=g)]
    dropped = odd[torch.randint(0, 2, (rows, lanes, width), generator=g)]
    return torch.where(torch.rand(rows, lanes, width, generator=g) < share, drawn, dropped)


def wanted(scores: torch.Tensor, n_pages: int, whole: bool, bos: int = BOS, eos: int = EOS) -> torch.Tensor:
    """The pages of one list, ascending, of its scores ``[width]``."""
    page = torch.arange(n_pages)
    reserved = (page < bos) | (page >= n_pages - eos)
    return torch.nonzero(reserved | (scores[:n_pages] > -math.inf) | whole)[:, 0]


def scratch(lists: tuple[int, int], width: int, room: int = 0) -> torch.Tensor:
    return torch.full((*lists, select_above.counted_blocks(width) + room), GARBAGE, dtype=torch.int32)


def check(scores, pages: list[int], capacity: int, counts: torch.Tensor | None, full_pages: int, dense: int):
    """Lists of rows of so many `pages`, of scores ``[rows * HEADS, lanes, width]``, against :func:`wanted`."""
    (_, lanes, width), rows = scores.shape, len(pages)
    lengths = [n * PAGE - (n % 3 if n > 1 else 0) for n in pages]
    table = torch.arange(rows * width, dtype=torch.int32).flip(0).view(rows, width)
    for row, n in enumerate(pages):
        own = scores[row * HEADS : (row + 1) * HEADS]
        own[:, :, n:] = 9.0  # past a row, and on its reserved pages, anything may stand
        own[:, :, :BOS], own[:, :, max(0, n - EOS) : n] = -math.inf, math.nan
        table[row, n:] = 2**30
    lists = (rows, HEADS * lanes)
    found, physical = (torch.full((*lists, capacity), 77, dtype=torch.int32) for _ in range(2))
    told = torch.full(lists, 77, dtype=torch.int32)
    select_above.launch_select_above(
        scores, torch.tensor(lengths, dtype=torch.int32), found, told, num_kv_heads=HEADS, lanes=lanes, page_size=PAGE,
        bos=BOS, eos=EOS, dense_below=dense, full_pages=full_pages, width=width, page_table=table, physical=physical,
        counts=counts,
    )  # fmt: skip
    for row, n in enumerate(pages):
        whole = lengths[row] <= dense or n <= full_pages
        for one, own in enumerate(scores[row * HEADS : (row + 1) * HEADS].flatten(0, 1)):
            best = wanted(own, n, whole)[:capacity]
            assert int(told[row, one]) == len(best), (row, one)
            assert found[row, one, : len(best)].tolist() == best.tolist(), (row, one)
            assert found[row, one, len(best) :].eq(-1).all()
            assert physical[row, one, : len(best)].tolist() == table[row, best].tolist()
            assert physical[row, one, len(best) :].eq(77).all()


@counted
@pytest.mark.parametrize(("width", "capacity", "share"), [(2050, 2050, 0.3), (5001, 700, 0.6), (4097, 6200, 0.0)])
def test_every_page_above_minus_infinity(width, capacity, share, counted):
    """Rows of several programs, of one, short and empty ones; lists cut at their capacity, or with room beyond rows."""
    pages = [width, 2049, 1024, 5, 1, 0]
    counts = scratch((len(pages), HEADS), width) if counted and select_above.counted_blocks(width) else None
    check(scores_of(len(pages) * HEADS, 1, width, share), pages, capacity, counts, 3, 1024 * PAGE)


@counted
@pytest.mark.parametrize("width", [33, 64, 97, 128, 129])
def test_bounds_of_blocks(width, counted, small_blocks):
    """Rows that end around the bounds of blocks, some kept whole; a list a query head; scratch with room for more."""
    pages = [min(n, width) for n in (width, width - 1, 64, 33, 32, 31, 2, 0)]
    lists = (len(pages), HEADS * GROUPS)
    for share, capacity, full_pages, dense in (
        (0.5, width, 0, 0), (0.0, width + 70, 32, 0), (0.02, width, 0, 33 * PAGE), (1.0, width // 3, 0, 0),
    ):  # fmt: skip
        scores = scores_of(len(pages) * HEADS, GROUPS, width, share, seed=width)
        check(scores, pages, capacity, scratch(lists, width, room=3) if counted else None, full_pages, dense)


@pytest.mark.parametrize("width", [90, 333])
def test_both_ways_give_the_same_bits(width, small_blocks):
    """Strided scores, and no page table."""
    whole = scores_of(4, GROUPS, 2 * width + 3, 0.4)
    scores, seq_lens = whole[:, :, 1 : 1 + 2 * width : 2], torch.tensor([width * PAGE, 40 * PAGE], dtype=torch.int32)
    found = []
    for counts in (scratch((2, 4), width), None):
        lists, told = torch.full((2, 4, width), 77, dtype=torch.int32), torch.full((2, 4), 77, dtype=torch.int32)
        select_above.launch_select_above(
            scores, seq_lens, lists, told, num_kv_heads=HEADS, lanes=GROUPS, page_size=PAGE, bos=0, eos=0,
            dense_below=0, full_pages=0, width=width, counts=counts,
        )  # fmt: skip
        found.append((lists, told))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    best = wanted(scores[3, 1], 40, False, bos=0, eos=0)
    assert found[0][0][1, 3, : len(best)].tolist() == best.tolist()


@counted
def test_rows_too_long_for_the_smaller_block(counted):
    """Past 16,384 pages a program that counts for itself takes 8,192: rows of three of them, and of one."""
    width, pages = 16390, [16390, 8192, 5]
    counts = scratch((len(pages), HEADS), width) if counted else None
    check(scores_of(len(pages) * HEADS, 1, width, 0.5), pages, width, counts, 0, 0)


@pytest.mark.parametrize(("width", "blocks"), [(2049, 0), (4096, 0), (4097, 5), (65536, 64), (65537, 65)])
def test_blocks_that_are_counted(width, blocks):
    assert select_above.counted_blocks(width) == blocks


class AboveMean(flowlib.vFlow):
    """Every page that scores above the mean of its row."""

    def create_cache(self, page_size, head_dim):
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        ops.CMean(dim=1)(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        scores = ops.GeMV()(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        ops.Threshold()(scores, ops.Mean(dim=0)(scores, ctx=ctx), o, ctx=ctx)


def test_a_plan_allocates_what_long_rows_are_counted_in(small_blocks, monkeypatch):
    """A step of fewer rows than were allocated for, over scratch that holds anything."""
    monkeypatch.setattr("flowlib.kernels.select._NARROW_WIDTH", 32)
    spec = flowlib.Spec(page_size=4, head_dim=8, group_size=2, num_kv_heads=2, kv_dtype=torch.float32, max_pages=75)
    plan = flowlib.profile(AboveMean(), spec)
    assert "counts" not in plan.allocate(3, 75, "cpu", scores=False).workspace
    assert "counts" not in plan.allocate(3, 32, "cpu").workspace
    assert "counts" not in flowlib.profile(flowlib.build("streaming"), spec).allocate(3, 75, "cpu").workspace
    whole = plan.allocate(3, 75, "cpu")
    counts = whole.workspace["counts"].fill_(GARBAGE)
    assert counts.shape == (3, 2, 3)
    made = scene(plan, [298, 130], seed=1)
    out = plan.narrowed(whole, 2)
    plan.launch(made.q, made.pool_by("triton"), made.batch, out)
    want = plan.step(made.q, made.pool_by("reference"), made.batch)
    assert torch.equal(out.lengths, want.lengths)
    assert torch.equal(out.pages[:, :, : want.pages.shape[2]], want.pages)
    assert counts[:2].sum(dim=2).equal(want.lengths)
    assert counts[2].eq(GARBAGE).all()


def test_the_op_called_alone(small_blocks, monkeypatch):
    monkeypatch.setattr("flowlib.kernels.select._NARROW_WIDTH", 32)
    spec = flowlib.Spec(page_size=1, head_dim=8, group_size=2, num_kv_heads=2, top_k=70, max_pages=70)
    batch = flowlib.Batch(torch.zeros(2, 70, dtype=torch.int32), torch.tensor([70, 41], dtype=torch.int32))
    scores = scores_of(4, 1, 70, 0.5)
    page, counts = torch.arange(70), torch.tensor([70, 70, 41, 41])[:, None]
    scored = (page >= spec.bos) & (page < counts - spec.eos)
    lists = [select_alone(ops.topK(), scores, scored, batch, spec, mode) for mode in (Mode.EXECUTE, Mode.REFERENCE)]
    for one, other in zip(*lists, strict=True):
        assert torch.equal(one, other)


def test_the_budget_decides_which_kernel_runs(monkeypatch):
    """A budget below the width still cuts."""
    scores = torch.arange(2050.0)[None, None].clone()
    pages, told = torch.full((1, 1, 8), 77, dtype=torch.int32), torch.full((1, 1), 77, dtype=torch.int32)
    monkeypatch.setattr("flowlib.kernels.select.launch_select_above", None)
    launch_select(
        scores, torch.tensor([2050 * PAGE], dtype=torch.int32), pages, told, num_kv_heads=1, lanes=1, page_size=PAGE,
        bos=0, eos=1, top_k=3, ratio_q16=0, dense_below=0, scored=True,
    )  # fmt: skip
    assert pages[0, 0].tolist() == [2046, 2047, 2048, 2049, -1, -1, -1, -1]
