"""Problems for entmax attention over page lists, their truth by float64 loops that bisect, and what kernels give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flowlib.kernels import entmax
from flowlib.runtime import interpreter
from flowlib.testing import gamma
from flowlib.testing.oracles.bisection import entmax_row

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Sizes of a problem; `width`: pages of the longest row; `few`: few tokens are weighed where they are found."""

    heads: int = 2
    group: int = 3
    dim: int = 64
    v_dim: int | None = None
    page: int = 16
    dtype: torch.dtype = FP32
    kv_dtype: torch.dtype | None = None
    splits: int = 1
    per_head: bool = True
    alibi: bool = False
    alpha: float = 1.5
    width: int = 9
    physical: bool = True
    spread: float = 1.0
    few: bool = True

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(changed).replace("torch.", "") or "default"

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def lanes(self) -> int:
        return self.group if self.per_head else 1


@dataclass
class Problem:
    """Requests in a pool of reverse-interleaved pages; what no row owns is NaN.

    Attributes:
        lists: logical pages of each list, by row.
        scales: of K and V.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    seq_lens: list[int]
    lists: list[list[list[int]]]
    slopes: torch.Tensor | None
    scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Exact:
    """Float64 truth of one query head, and what rounding may do to it.

    Attributes:
        scores: of the list's tokens. p, tau, mass, o: entmax of them.
        off: how far a score may be off in fp32, and with it (alpha - 1) times tau.
        moved: how far that moves o, ``[Dv]``.
    """

    scores: torch.Tensor
    p: torch.Tensor
    tau: float
    o: torch.Tensor
    off: float
    moved: torch.Tensor


def make(case: Case, seq_lens: list[int] | None = None, keep: float = 0.7, seed: int = 0) -> Problem:
    """A ragged batch: a long row, an empty one, one of a single token, one that ends with its page."""
    g = torch.Generator().manual_seed(seed + case.group * case.dim + case.page)
    if seq_lens is None:
        seq_lens = [case.width * case.page - 3 if case.page > 3 else case.width, 0, 1, 2 * case.page]
    rows, kv_dtype = len(seq_lens), case.kv_dtype or case.dtype
    total = rows * case.width + 2
    table = torch.arange(total - 1, 1, -1, dtype=torch.int32).view(case.width, rows).t()
    k = torch.full((total * case.page, case.heads, case.dim), math.nan)
    v = torch.full((total * case.page, case.heads, case.v_dim or case.dim), math.nan)
    for row, seq_len in enumerate(seq_lens):
        pos = torch.arange(seq_len)
        slot = table[row, pos // case.page].long() * case.page + pos % case.page
        k[slot] = case.spread * torch.randn(seq_len, *k.shape[1:], generator=g)
        v[slot] = torch.randn(seq_len, *v.shape[1:], generator=g)
    lists = [
        [pages_of(-(-n // case.page), keep, g) for _ in range(case.heads * case.lanes)] for n in seq_lens
    ]
    slopes = torch.rand(case.query_heads, generator=g) * 0.3 if case.alibi else None
    q = torch.randn(rows, case.query_heads, case.dim, generator=g).to(case.dtype)
    scales = (0.03, 4.0) if case.kv_dtype == FP8 else (1.0, 1.0)
    return Problem(case, q, k.to(kv_dtype), v.to(kv_dtype), table, seq_lens, lists, slopes, scales)


def pages_of(n_pages: int, keep: float, g: torch.Generator) -> list[int]:
    """Some of a row's pages, its last among them."""
    kept = [page for page in range(n_pages) if torch.rand((), generator=g) < keep]
    return sorted({*kept, n_pages - 1}) if n_pages else []


@dataclass
class Result:
    o: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor
    certified: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    state: torch.Tensor


def run(p: Problem, device: str, listed: bool = True, **options: object) -> Result:
    """The kernels, over scratch and outputs of NaN; a list and a table say nothing past their lengths."""
    if device == "cpu":
        interpreter.install()
    case, rows, heads, v_dim = p.case, len(p.seq_lens), p.case.query_heads, p.v.shape[-1]
    longest = max(len(pages) for row in p.lists for pages in row) + 2
    pages = torch.full((rows, case.heads * case.lanes, longest), 2**30, dtype=torch.int32)
    physical = torch.full_like(pages, 2**30)
    table = torch.full((rows, case.width + 3), 2**30, dtype=torch.int32)
    for row, seq_len in enumerate(p.seq_lens):
        table[row, : -(-seq_len // case.page)] = p.table[row, : -(-seq_len // case.page)]
        for i, own in enumerate(p.lists[row]):
            pages[row, i, : len(own)] = torch.tensor(own, dtype=torch.int32)
            physical[row, i, : len(own)] = p.table[row, own]
    lengths = torch.tensor([[len(one) for one in row] for row in p.lists], dtype=torch.int32, device=device)

    def nan(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.full(shape, math.nan, device=device).to(dtype)

    scratch = {
        name: torch.full((rows, *shape), -9, dtype=torch.int32, device=device)
        if dtype == "int32"
        else nan(rows, *shape)
        for name, (shape, dtype) in entmax.workspace(heads, longest, case.page).items()
    }
    if not case.few:
        scratch |= {name: scratch[name][..., :0] for name in ("support", "weights")}
    out = Result(
        nan(rows, heads, v_dim, dtype=case.dtype), nan(rows, heads), nan(rows, heads),
        torch.full((rows, heads), 77, dtype=torch.int8, device=device), pages.to(device), lengths, scratch["state"],
    )  # fmt: skip
    lists = (out.pages, out.lengths) if listed else (None, None)
    arrived = torch.zeros(rows * heads, dtype=torch.int32, device=device)
    if case.splits > 1:
        scratch["partial_o"] = nan(rows, heads, case.splits, v_dim)
        scratch["partial_mass"] = nan(rows, heads, case.splits)
    given = {
        "alpha": case.alpha, "physical": physical.to(device) if case.physical else None,
        "alibi_slopes": None if p.slopes is None else p.slopes.to(device), **options,
    }  # fmt: skip
    entmax.launch_entmax(
        p.q.to(device), p.k.to(device), p.v.to(device), table.to(device),
        torch.tensor(p.seq_lens, dtype=torch.int32, device=device), *lists, out.o, out.tau, out.mass,
        **scratch, arrived=arrived, num_kv_heads=case.heads, group_size=case.group, lanes=case.lanes,
        page_size=case.page, scale=case.dim**-0.5, k_scale=p.scales[0], v_scale=p.scales[1], num_splits=case.splits,
        certified=out.certified if "bounds" in given else None, **given,
    )  # fmt: skip
    assert not arrived.any(), "the count of arrived splits is zero again"
    return Result(*(x.cpu() for x in vars(out).values()))


def tokens_of(p: Problem, row: int, head: int) -> list[int]:
    """Positions of the tokens a query head attends to."""
    pages = p.lists[row][head if p.case.per_head else head // p.case.group]
    positions = [page * p.case.page + slot for page in pages for slot in range(p.case.page)]
    return [pos for pos in positions if pos < p.seq_lens[row]]


def truth(p: Problem, row: int, head: int, alpha: float | None = None) -> Exact | None:
    """By float64 loops; ``None`` for an empty list."""
    case, alpha = p.case, p.case.alpha if alpha is None else alpha
    positions = tokens_of(p, row, head)
    if not positions:
        return None
    at = torch.tensor(positions)
    slots = p.table[row, at // case.page].long() * case.page + at % case.page
    k, v = (x[slots, head // case.group].double() * s for x, s in zip((p.k, p.v), p.scales, strict=True))
    q = p.q[row, head].double()
    scores, size = (k @ q) * case.dim**-0.5, (k.abs() @ q.abs()) * case.dim**-0.5
    if p.slopes is not None:
        bias = p.slopes[head].double() * (at - (p.seq_lens[row] - 1))
        scores, size = scores + bias, size + bias.abs()
    p_exact, tau = entmax_row(scores, alpha)
    u = torch.where(p_exact > 0, p_exact ** (2.0 - alpha), 0.0)
    off = float(gamma(case.dim + 8) * size.max() + gamma(16) / (alpha - 1.0))
    moved = 2.0 * off * (u @ v.abs()) + gamma(len(at) + 8) * (p_exact @ v.abs())
    return Exact(scores, p_exact, tau, p_exact @ v, off, moved)


def rounded(p: Problem, row: int, head: int, exact: Exact) -> torch.Tensor:
    """What tensor cores do to o: probabilities are rounded to 16 bits, and o is."""
    if p.case.dtype is FP32:
        return torch.finfo(FP32).eps * exact.o.abs()
    at = torch.tensor(tokens_of(p, row, head))
    slots = p.table[row, at // p.case.page].long() * p.case.page + at % p.case.page
    v = p.v[slots, head // p.case.group].double() * p.scales[1]
    eps = torch.finfo(p.case.dtype).eps
    return eps * (exact.p @ v.abs() + exact.o.abs())


def check(p: Problem, got: Result, alphas: list[float] | None = None) -> None:
    """o, tau and mass of every head within what fp32 (and 16-bit operands) may do."""
    for row in range(len(p.seq_lens)):
        for head in range(p.case.query_heads):
            alpha = p.case.alpha if alphas is None else alphas[head]
            exact, where = truth(p, row, head, alpha), f"row {row}, head {head}"
            if exact is None:
                assert (got.o[row, head] == 0).all(), where
                assert (got.tau[row, head], got.mass[row, head]) == (-math.inf, 0.0), where
                continue
            allowed = exact.moved + rounded(p, row, head, exact)
            away = (got.o[row, head].double() - exact.o).abs()
            assert away.le(allowed).all(), f"{where}: o is off by {float((away / allowed).max()):.2f} of the tolerance"
            slack = (alpha - 1.0) * exact.off + gamma(2) * abs(exact.tau)
            assert abs(float(got.tau[row, head]) - exact.tau) <= slack, where
            assert abs(float(got.mass[row, head]) - 1.0) <= gamma(64) + gamma(8) / (alpha - 1.0), where


def of_scores(scores: torch.Tensor, alpha: float, **changes: object) -> Problem:
    """One row whose keys are numbers, so that the scores are those given."""
    case = Case(heads=1, group=1, dim=16, page=1, width=len(scores), alpha=alpha, **changes)
    problem = make(case, [len(scores)], keep=1.0)
    problem.q[:] = 0.0
    problem.q[..., 0] = 4.0  # the scale is 16 ** -0.5
    problem.k[problem.table[0].long(), 0] = 0.0
    problem.k[problem.table[0].long(), 0, 0] = scores
    return problem


def of_threshold(p: Problem, row: int, head: int, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Undivided o and its mass for a threshold, in float64."""
    exact = truth(p, row, head)
    at = torch.tensor(tokens_of(p, row, head))
    slots = p.table[row, at // p.case.page].long() * p.case.page + at % p.case.page
    a = p.case.alpha - 1.0
    weights = (a * exact.scores - tau).clamp(min=0.0) ** (1.0 / a)
    return weights @ p.v[slots, head // p.case.group].double(), weights.sum()
