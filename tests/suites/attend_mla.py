"""Attention over page lists of latents against float64 loops over rows and heads."""

import math
import mmap
from dataclasses import dataclass, replace

import pytest
import torch

from flowlib.kernels.attend_mla import launch_attend_mla
from flowlib.testing.tolerance import gamma

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    heads: int = 16
    rank: int = 32
    rope: int = 16
    page: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    splits: int = 1
    per_head: bool = False
    physical: bool = False
    every: bool = False
    width: int = 6

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(changed).replace("torch.", "") or "default"


CASES = [
    Case(rank=512, rope=64, splits=2),
    Case(rank=512, rope=64, page=64, physical=True, width=3),
    Case(heads=128, splits=3, page=1, width=90),
    Case(heads=70, page=64, physical=True, width=3),
    Case(heads=20, rank=96, rope=32, page=5, splits=2),
    Case(heads=3, rank=24, rope=8, dtype=FP32, kv_dtype=FP32, splits=2),
    Case(heads=40, dtype=FP32, kv_dtype=FP32),
    Case(heads=1, rope=0, dtype=FP16, kv_dtype=FP16),
    Case(heads=40, kv_dtype=FP8, splits=2, physical=True),
    Case(heads=6, per_head=True, splits=2),
    Case(every=True, splits=2),
    Case(dtype=FP32, kv_dtype=BF16),
]


@dataclass
class Problem:
    q: torch.Tensor
    latent: torch.Tensor
    table: torch.Tensor
    seq_lens: list[int]
    lists: list[list[list[int]]]  # [bs][lane] logical pages


def make(case: Case) -> Problem:
    """A ragged batch over a reverse-interleaved table; every slot no row owns, and every slot past a length, is NaN."""
    generator = torch.Generator().manual_seed(case.heads * case.rank + case.page)
    seq_lens = [case.width * case.page - 3 if case.page > 3 else case.width, 0, 1, 2 * case.page]
    rows, size = len(seq_lens), case.rank + case.rope
    total = rows * case.width + 2
    table = torch.arange(total - 1, 1, -1, dtype=torch.int32).view(case.width, rows).t().contiguous()
    latent = torch.full((total * case.page, 1, size), math.nan)
    for row, seq_len in enumerate(seq_lens):
        for pos in range(seq_len):
            slot = int(table[row, pos // case.page]) * case.page + pos % case.page
            latent[slot] = torch.randn(1, size, generator=generator)

    def some(n_pages: int) -> list[int]:
        """Some of a row's pages, its last among them; all of them where every page is attended."""
        kept = (torch.rand(n_pages, generator=generator) < (2.0 if case.every else 0.7)).nonzero().flatten().tolist()
        return sorted({*kept, n_pages - 1}) if n_pages else []

    lists = [[some(-(-n // case.page)) for _ in range(case.heads if case.per_head else 1)] for n in seq_lens]
    q = torch.randn(rows, case.heads, size, generator=generator).to(case.dtype)
    return Problem(q, latent.to(case.kv_dtype), table, seq_lens, lists)


def padded(lists: list[list[list[int]]], device: str) -> torch.Tensor:
    """int32 ``[bs, lanes, M]``; entries past a list's length would lead out of every buffer."""
    longest = max(len(pages) for row in lists for pages in row) + 2
    return torch.tensor(
        [[one + [2**30] * (longest - len(one)) for one in row] for row in lists], dtype=torch.int32, device=device
    )


def run(case: Case, p: Problem, device: str, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rows, lanes = len(p.seq_lens), case.heads if case.per_head else 1
    pages = padded(p.lists, device)
    physical = [[[int(p.table[i, page]) for page in one] for one in row] for i, row in enumerate(p.lists)]
    lengths = torch.tensor([[len(one) for one in row] for row in p.lists], dtype=torch.int32, device=device)
    table = torch.full((rows, case.width + 3), 2**30, dtype=torch.int32)
    for row, seq_len in enumerate(p.seq_lens):
        owned = -(-seq_len // case.page)
        table[row, :owned] = p.table[row, :owned]
    o = torch.full((rows, case.heads, case.rank), math.nan, dtype=case.dtype, device=device)
    lse = torch.full((rows, case.heads), math.nan, device=device)
    partial_o = torch.full((rows, case.heads, case.splits, case.rank), math.nan, device=device)
    partial_lse = torch.full((rows, case.heads, case.splits), math.nan, device=device)
    listed = pages.clone()
    if case.every:
        pages.fill_(-77)
        lengths.fill_(-77)
    latent = p.latent.to(device)
    launch_attend_mla(
        p.q.to(device), latent, latent[..., : case.rank], table.to(device),
        torch.tensor(p.seq_lens, dtype=torch.int32, device=device), pages, lengths, o, lse,
        partial_o if case.splits > 1 else None, partial_lse if case.splits > 1 else None,
        num_kv_heads=1, group_size=case.heads, lanes=lanes, page_size=case.page, scale=0.3, k_scale=scale,
        v_scale=scale, num_splits=case.splits, every=case.every,
        physical=padded(physical, device) if case.physical else None,
    )  # fmt: skip
    if case.every:
        assert torch.equal(pages, torch.where(listed == 2**30, -1, listed)), "the lists say what was attended"
        assert lengths.tolist() == [[len(one) for one in row] for row in p.lists]
    return o.cpu(), lse.cpu()


def evaluate(case: Case, p: Problem, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(o, lse, largest sum of magnitudes in a score) by loops over rows and heads, in `dtype` throughout."""
    o = torch.zeros(len(p.seq_lens), case.heads, case.rank, dtype=dtype)
    lse = torch.full(o.shape[:2], -math.inf, dtype=dtype)
    largest = 0.0
    for row, seq_len in enumerate(p.seq_lens):
        for head in range(case.heads):
            pages = p.lists[row][head if case.per_head else 0]
            positions = [page * case.page + slot for page in pages for slot in range(case.page)]
            slots = [
                int(p.table[row, pos // case.page]) * case.page + pos % case.page for pos in positions if pos < seq_len
            ]
            if slots:
                tokens = p.latent[slots, 0].to(dtype) * scale
                scores = (tokens @ p.q[row, head].to(dtype)) * 0.3
                o[row, head], lse[row, head] = scores.softmax(0) @ tokens[:, : case.rank], scores.logsumexp(0)
                largest = max(largest, 0.3 * float((tokens.abs() @ p.q[row, head].to(dtype).abs()).max()))
    return o, lse, largest


def assert_as_near_as(got: torch.Tensor, low: torch.Tensor, exact: torch.Tensor, rounding: float) -> None:
    """At most twice as far from float64 as a plain evaluation in low precision, plus one rounding step."""
    budget = 2 * (low.double() - exact).abs().max() + rounding
    worst = (got.double() - exact).abs().max()
    assert worst <= budget, f"off by {worst:.2e}, allowed {budget:.2e}"


def check(case: Case, p: Problem, device: str) -> torch.Tensor:
    scale = 0.5 if case.kv_dtype is FP8 else 1.0
    o, lse = run(case, p, device, scale)
    exact_o, exact_lse, largest = evaluate(case, p, torch.float64, scale)
    low_o, _, _ = evaluate(case, p, case.dtype, scale)
    _, low_lse, _ = evaluate(case, p, torch.float32, scale)
    assert_as_near_as(o, low_o, exact_o, float(torch.finfo(case.dtype).eps * exact_o.abs().max()))
    empty = torch.tensor([n == 0 for n in p.seq_lens])
    assert (lse[empty] == -math.inf).all()
    assert (o[empty] == 0).all()
    assert_as_near_as(lse[~empty], low_lse[~empty], exact_lse[~empty], gamma(case.rank + case.rope + 3) * largest)
    return o


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_listed_and_no_others_are_attended(case, device):
    check(case, make(case), device)


def test_splits_of_latents_do_not_change_the_answer(device):
    case = Case(heads=20, width=12)
    problem = make(case)
    whole = check(case, problem, device)
    for splits in (2, 5, 16):
        check(replace(case, splits=splits), problem, device)
    assert torch.equal(whole, run(case, problem, device)[0])


def test_strides_of_queries_and_latents_are_free(device):
    case = Case(heads=5)
    problem = make(case)
    wide = torch.full((len(problem.latent), 2, 80), math.nan, dtype=BF16)
    wide[:, :1, 8:56] = problem.latent
    q = torch.full((8, 10, 48), math.nan, dtype=BF16)
    q[::2, ::2] = problem.q
    check(case, replace(problem, latent=wide[:, :1, 8:56], q=q[::2, ::2]), device)


def test_latents_beyond_two_to_the_31_elements(device):
    """The offset of the slots is 2.5e9 elements; on a CPU, memory that is not touched costs nothing."""
    case = Case(heads=2, width=3)
    problem = make(case)
    stride, far = 1 << 22, 608
    count, size = far + len(problem.latent), case.rank + case.rope
    if device != "cpu" and torch.cuda.mem_get_info()[0] < 2 * count * stride:
        pytest.skip("needs 7 GB of free GPU memory")
    if device == "cpu":
        pool = torch.frombuffer(mmap.mmap(-1, count * stride * 2), dtype=BF16)
    else:
        pool = torch.zeros(count * stride, dtype=BF16, device=device)
    latent = pool.as_strided((count, 1, size), (stride, size, 1))
    latent[far:] = problem.latent.to(device)
    o, _ = run(case, replace(problem, latent=latent, table=problem.table + far // case.page), device)
    assert torch.equal(o, run(case, problem, device)[0])
