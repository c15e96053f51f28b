"""Attention over page lists, interpreted, against float64 loops over tokens."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math
import mmap
from dataclasses import dataclass, replace

import pytest
import torch

from flowlib.kernels import attend
from flowlib.runtime import interpreter

interpreter.install()

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    heads: int = 2
    group: int = 4
    dim: int = 64
    v_dim: int | None = None
    page: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    splits: int = 1
    per_head: bool = False
    alibi: bool = False
    width: int = 9

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(changed).replace("torch.", "") or "default"


CASES = [
    Case(),
    Case(group=1, heads=3, page=1, splits=2, width=150),
    Case(group=3, dim=96, v_dim=80, alibi=True, splits=3),
    Case(group=7, dim=128, dtype=torch.bfloat16, page=1, width=140),
    Case(group=8, dim=128, dtype=torch.bfloat16, page=64, splits=2, width=5),
    Case(group=4, per_head=True, dtype=torch.bfloat16, alibi=True),
    Case(group=20, heads=1, dim=576, v_dim=512, width=6),
    Case(group=16, heads=1, dim=576, v_dim=512, dtype=torch.bfloat16, splits=2, width=6),
    Case(group=2, dim=40, v_dim=8, page=48, width=4),
    Case(page=128, width=3, dtype=torch.float16, splits=2),
    Case(dtype=torch.bfloat16, kv_dtype=FP8, splits=2),
    Case(dtype=torch.float32, kv_dtype=torch.bfloat16, group=3),
]


@dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: list[int]
    lists: list[list[list[int]]]  # [bs][kv head * lane] logical pages
    slopes: torch.Tensor | None


def make(case: Case) -> Problem:
    """A ragged batch over a reverse-interleaved table; every slot no row owns, and every slot past a length, is NaN."""
    torch.manual_seed(case.group * case.dim + case.page)
    seq_lens = [case.width * case.page - 3 if case.page > 3 else case.width, 0, 1, 2 * case.page]
    rows, kv_dtype = len(seq_lens), case.kv_dtype or case.dtype
    total = rows * case.width + 2
    table = torch.arange(total - 1, 1, -1, dtype=torch.int32).view(case.width, rows).t()
    k = torch.full((total * case.page, case.heads, case.dim), math.nan)
    v = torch.full((total * case.page, case.heads, case.v_dim or case.dim), math.nan)
    for row, seq_len in enumerate(seq_lens):
        for pos in range(seq_len):
            slot = int(table[row, pos // case.page]) * case.page + pos % case.page
            k[slot], v[slot] = torch.randn_like(k[slot]), torch.randn_like(v[slot])
    lists = [
        [pages_of(-(-seq_len // case.page)) for _ in range(case.heads * (case.group if case.per_head else 1))]
        for seq_len in seq_lens
    ]
    heads = case.heads * case.group
    slopes = torch.rand(heads) if case.alibi else None
    q = torch.randn(rows, heads, case.dim).to(case.dtype)
    return Problem(q, k.to(kv_dtype), v.to(kv_dtype), table, seq_lens, lists, slopes)


def pages_of(n_pages: int) -> list[int]:
    """Some of a row's pages, its last among them."""
    kept = [page for page in range(n_pages) if torch.rand(()) < 0.7]
    return sorted({*kept, n_pages - 1}) if n_pages else []


def run(case: Case, p: Problem, k_scale: float = 1.0, v_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, v_dim = len(p.seq_lens), case.heads * case.group, p.v.shape[-1]
    longest = max(len(pages) for row in p.lists for pages in row) + 2
    # a page list says nothing past its length: entries there would lead out of every buffer
    pages = torch.tensor([[one + [2**30] * (longest - len(one)) for one in row] for row in p.lists], dtype=torch.int32)
    lengths = torch.tensor([[len(one) for one in row] for row in p.lists], dtype=torch.int32)
    table = torch.full((rows, case.width + 3), 2**30, dtype=torch.int32)
    for row, seq_len in enumerate(p.seq_lens):
        owned = -(-seq_len // case.page)
        table[row, :owned] = p.table[row, :owned]
    o = torch.full((rows, heads, v_dim), math.nan, dtype=case.dtype)
    lse = torch.full((rows, heads), math.nan)
    partial_o = torch.full((rows, heads, case.splits, v_dim), math.nan)
    partial_lse = torch.full((rows, heads, case.splits), math.nan)
    arrived = torch.zeros(rows * heads, dtype=torch.int32)
    attend.launch_attend(
        p.q, p.k, p.v, table, torch.tensor(p.seq_lens, dtype=torch.int32), pages, lengths, o, lse,
        partial_o if case.splits > 1 else None, partial_lse if case.splits > 1 else None, arrived,
        num_kv_heads=case.heads, group_size=case.group, lanes=case.group if case.per_head else 1, page_size=case.page,
        scale=case.dim**-0.5, k_scale=k_scale, v_scale=v_scale, alibi_slopes=p.slopes, num_splits=case.splits,
    )  # fmt: skip
    assert not arrived.any(), "the count of arrived splits is zero again"
    return o, lse


def evaluate(case: Case, p: Problem, dtype: torch.dtype, k_scale: float = 1.0, v_scale: float = 1.0):
    """(o, lse, largest score) by loops over rows and heads, in `dtype` throughout."""
    rows, heads = len(p.seq_lens), case.heads * case.group
    o = torch.zeros(rows, heads, p.v.shape[-1], dtype=dtype)
    lse = torch.full((rows, heads), -math.inf, dtype=dtype)
    largest = 0.0
    for row, seq_len in enumerate(p.seq_lens):
        for head in range(heads):
            pages = p.lists[row][head if case.per_head else head // case.group]
            positions = [page * case.page + slot for page in pages for slot in range(case.page)]
            positions = [pos for pos in positions if pos < seq_len]
            if not positions:
                continue
            slots = [int(p.table[row, pos // case.page]) * case.page + pos % case.page for pos in positions]
            k, v = (x[slots, head // case.group].to(dtype) * s for x, s in ((p.k, k_scale), (p.v, v_scale)))
            scores = (k @ p.q[row, head].to(dtype)) * case.dim**-0.5
            if p.slopes is not None:
                scores = scores + p.slopes[head].to(dtype) * (torch.tensor(positions) - (seq_len - 1)).to(dtype)
            o[row, head], lse[row, head] = scores.softmax(0) @ v, scores.logsumexp(0)
            largest = max(largest, float(scores.abs().max()))
    return o, lse, largest


def assert_as_near_as(got, low, exact, rounding):
    """At most twice as far from float64 as a plain evaluation in low precision, plus one rounding step."""
    budget = 2 * (low.double() - exact).abs().max() + rounding
    worst = (got.double() - exact).abs().max()
    assert worst <= budget, f"off by {worst:.2e}, allowed {budget:.2e}"


def check(case: Case, p: Problem, k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
    o, lse = run(case, p, k_scale, v_scale)
    exact_o, exact_lse, largest = evaluate(case, p, torch.float64, k_scale, v_scale)
    low_o, _, _ = evaluate(case, p, case.dtype, k_scale, v_scale)
    _, low_lse, _ = evaluate(case, p, torch.float32, k_scale, v_scale)
    assert_as_near_as(o, low_o, exact_o, torch.finfo(case.dtype).eps * exact_o.abs().max())
    empty = torch.tensor([not one for row in p.lists for one in row]).view(len(p.seq_lens), -1)
    empty = empty.repeat_interleave(1 if case.per_head else case.group, 1)
    assert (lse[empty] == -math.inf).all()
    assert (o[empty] == 0).all()
    assert_as_near_as(lse[~empty], low_lse[~empty], exact_lse[~empty], torch.finfo(torch.float32).eps * largest)
    return o


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attends_to_exactly_the_listed_tokens(case):
    problem = make(case)
    scales = (0.03, 4.0) if case.kv_dtype == FP8 else (1.0, 1.0)
    check(case, problem, *scales)


def test_strides_of_queries_and_pool_are_free():
    case = Case(group=3, dim=64, v_dim=32)
    problem = make(case)
    wide = torch.full((problem.k.shape[0], case.heads, 200), math.nan)  # K and V side by side
    wide[..., 4:68], wide[..., 100:132] = problem.k, problem.v
    q = torch.full((8, case.heads * case.group * 2, 64), math.nan)
    q[::2, ::2] = problem.q
    check(case, replace(problem, k=wide[..., 4:68], v=wide[..., 100:132], q=q[::2, ::2]))


def test_slots_beyond_two_to_the_31_elements():
    case = Case(heads=1, group=2, dtype=torch.bfloat16, width=3)
    problem = make(case)
    stride, far = 1 << 22, 608  # the far slots' offset is 2.5e9 elements; untouched memory costs nothing
    pool = torch.frombuffer(mmap.mmap(-1, (far + 256) * stride * 2), dtype=torch.bfloat16)
    k, v = (pool.as_strided((far + problem.k.shape[0], 1, 64), (stride, 64, 1), start) for start in (0, 64))
    k[far:], v[far:] = problem.k, problem.v
    check(case, replace(problem, k=k, v=v, table=problem.table + far // case.page))


def test_splits_do_not_change_the_answer():
    case = Case(group=3)
    problem = make(case)
    whole = check(case, problem)
    for splits in (2, 5, 16):
        check(replace(case, splits=splits), problem)
    again = run(case, problem)[0]
    assert torch.equal(whole, again)


def test_heads_read_their_own_kv_head():
    case = Case(heads=3, group=5)
    problem = make(case)
    for head in range(case.heads):
        problem.v[:, head] = problem.v[:, head] * 0 + head + 1
    o, _ = run(case, problem)
    want = torch.arange(1, case.heads + 1).repeat_interleave(case.group).float()
    torch.testing.assert_close(o[0], want[:, None].expand_as(o[0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("pages", "page", "rows", "want"), [(130, 16, 8, 17), (130, 16, 128, 4), (130, 16, 512, 1), (3, 16, 8, 1)]
)
def test_split_heuristic(pages, page, rows, want):
    assert attend.num_splits(pages, page, rows) == want


@pytest.mark.parametrize(
    ("size", "parts"),
    [(576, (512, 64)), (192, (128, 64)), (96, (64, 32)), (80, (64, 16)), (112, (64, 64)), (8, (16, 0))],
)
def test_head_dimensions_are_cut_in_two(size, parts):
    assert attend._cut(size) == parts
