"""Entmax attention over page lists, against float64 loops over tokens that solve by bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowlib.kernels import entmax
from flowlib.runtime import interpreter
from flowlib.testing import gamma
from flowlib.testing.oracles.bisection import entmax_row

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Sizes of a problem; `pages` is the longest row in pages."""

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

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(changed).replace("torch.", "") or "default"

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def lanes(self) -> int:
        return self.group if self.per_head else 1


CASES = [
    Case(),
    Case(group=1, heads=3, page=1, splits=2, width=150, alpha=2.0, alibi=True),
    Case(group=3, dim=96, v_dim=80, alibi=True, splits=3, per_head=False),
    Case(heads=1, group=8, dim=128, dtype=BF16, page=64, splits=2, width=5, spread=3.0),
    Case(group=8, heads=1, dim=64, dtype=FP16, page=1, width=140, per_head=False, alpha=2.0, spread=4.0),
    Case(group=3, dtype=BF16, alibi=True, splits=2, alpha=1.25, physical=False),
    Case(group=20, heads=1, dim=32, v_dim=24, per_head=False, splits=2, alpha=1.75),
    Case(group=2, dim=40, v_dim=8, page=48, width=4, alpha=1.01),
    Case(group=1, heads=1, dim=192, v_dim=128, dtype=BF16, page=128, width=3, splits=2, alpha=2.0),
    Case(heads=1, group=2, dim=16, page=16, width=300, splits=4, alpha=1.5, spread=2.0),
    Case(heads=1, group=2, dim=16, page=64, width=80, splits=2, alpha=1.3, per_head=False, spread=0.1),
    Case(dtype=BF16, kv_dtype=FP8, splits=2),
    Case(group=3, dtype=FP32, kv_dtype=BF16, alpha=2.0),
]  # fmt: skip


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
    out = Result(
        nan(rows, heads, v_dim, dtype=case.dtype), nan(rows, heads), nan(rows, heads),
        torch.full((rows, heads), 77, dtype=torch.int8, device=device), pages.to(device), lengths,
    )  # fmt: skip
    lists = (out.pages, out.lengths) if listed else (None, None)
    arrived = torch.zeros(rows * heads, dtype=torch.int32, device=device)
    if case.splits > 1:
        scratch["partial_o"] = nan(rows, heads, case.splits, v_dim)
        scratch["partial_mass"] = nan(rows, heads, case.splits)
    given = {
        "alpha": case.alpha, "physical": physical.to(device) if case.physical and not options.get("every") else None,
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attends_to_exactly_the_listed_tokens(case, device):
    problem = make(case)
    check(problem, run(problem, device))


def test_splits_do_not_change_the_threshold(device):
    """Nor do repetitions change a bit."""
    case = Case(heads=1, group=2, page=8, width=20)
    whole = run(make(case, [157]), device)
    for splits in (2, 5, 16):
        problem = make(replace(case, splits=splits), [157])
        got = run(problem, device)
        check(problem, got)
        assert torch.equal(got.tau, whole.tau)
    assert torch.equal(run(problem, device).o, got.o)


@pytest.mark.parametrize("per_head", [True, False])
def test_whole_rows(per_head, device):
    """Without lists, which are written where there is room for them; nothing is left out."""
    case = Case(heads=2, group=2, per_head=per_head, splits=2, width=4, dim=40)
    problem = make(case, [57, 0, 1, 32], keep=1.0)
    bounds = torch.full((8, 2, 9), math.nan, device=device)
    for listed in (True, False):
        problem.lists = [[[0] for _ in row] for row in problem.lists]  # what run() fills in, and nobody reads
        got = run(problem, device, listed, every=True, bounds=bounds)
        problem.lists = [[list(range(-(-n // 16)))] * (2 * case.lanes) for n in problem.seq_lens]
        check(problem, got)
        assert got.certified.all()
    problem.lists = [[[0] for _ in row] for row in problem.lists]
    got = run(problem, device, every=True)
    for row, n in enumerate(problem.seq_lens):
        count, width = -(-n // 16), got.pages.shape[2]
        assert (got.lengths[row] == count).all()
        assert (got.pages[row] == torch.tensor([*range(count), *[-1] * width][:width])).all()


def of_scores(scores: torch.Tensor, alpha: float, **changes: object) -> Problem:
    """One row whose keys are numbers, so that the scores are those given."""
    case = Case(heads=1, group=1, dim=16, page=1, width=len(scores), alpha=alpha, **changes)
    problem = make(case, [len(scores)], keep=1.0)
    problem.q[:] = 0.0
    problem.q[..., 0] = 4.0  # the scale is 16 ** -0.5
    problem.k[problem.table[0].long(), 0] = 0.0
    problem.k[problem.table[0].long(), 0, 0] = scores
    return problem


ROWS = {
    "equal": torch.full((200,), -3.25),
    "one token": torch.tensor([7.5]),
    "two far apart": torch.tensor([0.0, 60.0]),
    "one, then equals": torch.cat([torch.zeros(1), torch.full((700,), -0.7)]),
    "one, then almost equals": torch.cat([torch.zeros(1), -0.7 - 1e-6 * torch.arange(300)]),
    "geometric": -(0.9 ** torch.arange(120.0)),
    "harmonic": -torch.cumsum(1.0 / (1.0 + torch.arange(300.0)), 0) / 5,
    "a power": -(torch.linspace(0, 1, 300) ** 8),
    "beyond registers": torch.sin(torch.arange(4300.0)) * 3,
    "beyond registers, few of them near": torch.cat([torch.arange(-8000.0, -2.0, 2.0), torch.linspace(-1, 1, 300)]),
    "large": 1000 * torch.cos(torch.arange(64.0)),
}


@pytest.mark.parametrize("alpha", [1.001, 1.5, 1.7, 2.0])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_hard_to_solve(name, alpha, device):
    if len(ROWS[name]) > 4096 and alpha not in (1.5, 1.7) and device == "cpu":
        pytest.skip("slow when interpreted")
    problem = of_scores(ROWS[name], alpha, splits=2 if len(ROWS[name]) > 64 else 1)
    check(problem, run(problem, device))


def test_each_head_has_its_own_alpha(device):
    case = Case(heads=2, group=3, alibi=True, width=3)
    alphas = [1.5, 2.0, 1.25, 1.05, 1.75, 1.5]
    for per_head in (True, False):
        problem = make(replace(case, per_head=per_head), [43, 1])
        a = torch.tensor(alphas, dtype=torch.float64).sub(1.0).float().to(device)
        check(problem, run(problem, device, a_of_head=a, alpha=math.nan), alphas)


@pytest.mark.parametrize(("alpha", "per_head"), [(1.3, True), (1.5, True), (1.5, False), (2.0, True)])
def test_an_estimate_is_corrected(alpha, per_head, device):
    """Step by step towards the threshold, whichever side it starts on; o is divided by the mass."""
    problem = make(Case(heads=1, group=2, alpha=alpha, per_head=per_head, width=3), [43])
    exact = run(problem, device)
    for away in (-0.3, 1e-3, 5.0):
        estimate = (exact.tau + away).to(device)
        check(problem, run(problem, device, mode="corrected", steps=10, estimate=estimate))
        errors = []
        for steps in (0, 1, 3):
            got = run(problem, device, mode="corrected", steps=steps, estimate=estimate)
            errors.append(float((got.tau - exact.tau).abs().max()))
            for head in range(2):
                o, mass = of_threshold(problem, 0, head, float(got.tau[0, head]))
                assert float(got.mass[0, head]) == pytest.approx(float(mass), rel=2e-4)
                torch.testing.assert_close(got.o[0, head].double(), o / mass, rtol=1e-3, atol=1e-4)
        assert errors[0] <= min(abs(away), 1.0) + 1e-6, "an estimate is taken into the bracket"
        assert errors[2] <= max(0.05 * errors[0], 1e-6), errors


def test_an_estimate_is_corrected_beyond_registers(device):
    """Tiles that cannot hold mass are left out, even where the estimate lies below what they hold."""
    problem = of_scores(torch.sin(torch.arange(4300.0)) * 3, 1.5, splits=2)
    estimate = torch.full((1, 1), truth(problem, 0, 0).tau - 0.4, device=device)
    check(problem, run(problem, device, mode="corrected", steps=10, estimate=estimate))


@pytest.mark.parametrize("low", [1000, 4000])
def test_one_step_beyond_registers_leaves_tiles_out(low, device):
    """With alpha 2 a step is linear: from top - 1, over all tokens, or the 320 that the tiles' maxima leave."""
    scores = torch.cat([torch.zeros(320), torch.full((low,), -63 / 64)])
    estimate = torch.full((1, 1), -1.0, device=device)
    got = run(of_scores(scores, 2.0), device, mode="corrected", steps=1, estimate=estimate)
    want = -1 / 320 if len(scores) > 4096 else -1 + (320 + low / 64 - 1) / (320 + low)
    assert float(got.tau) == pytest.approx(want, abs=gamma(16))


def of_threshold(p: Problem, row: int, head: int, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Undivided o and its mass for a threshold, in float64."""
    exact = truth(p, row, head)
    at = torch.tensor(tokens_of(p, row, head))
    slots = p.table[row, at // p.case.page].long() * p.case.page + at % p.case.page
    a = p.case.alpha - 1.0
    weights = (a * exact.scores - tau).clamp(min=0.0) ** (1.0 / a)
    return weights @ p.v[slots, head // p.case.group].double(), weights.sum()


def test_a_fixed_threshold_is_taken_as_it_is(device):
    problem = make(Case(heads=1, group=2, splits=2, width=3), [43, 0, 1])
    exact = run(problem, device).tau
    for away in (-0.4, 0.0, 9.0):
        estimate = (exact + away).nan_to_num(neginf=-7.0)
        got = run(problem, device, mode="fixed", estimate=estimate.to(device))
        assert (got.o[1] == 0).all()
        for row, head in ((0, 0), (0, 1), (2, 0), (2, 1)):
            assert float(got.tau[row, head]) == pytest.approx(float(estimate[row, head]), abs=1e-6)
            o, mass = of_threshold(problem, row, head, float(estimate[row, head]))
            torch.testing.assert_close(got.o[row, head].double(), o, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.mass[row, head].double(), mass, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("per_head", "planes"), [(True, 3), (False, 3), (False, 1)])
def test_certificates(per_head, planes, device):
    """Set where every scored page left out has a bound of at most tau; a NaN bound certifies nothing."""
    case = Case(
        heads=2, group=3, page=4, width=12, per_head=per_head
    )
    problem = make(case, [45, 0, 3, 8, 33])
    rows, bos, eos = len(problem.seq_lens), 1, 2
    tau = run(problem, device).tau
    g = torch.Generator().manual_seed(5)
    seen = set()
    for spread in (0.02, 0.3, 3.0):
        bounds = torch.full((rows * 2, planes, case.width + 5), math.nan)
        for row, seq_len in enumerate(problem.seq_lens):
            for plane in range(2 * planes):
                heads = slice(plane * 3 // planes, (plane + 1) * 3 // planes)
                scored = slice(bos, max(bos, -(-seq_len // 4) - eos))
                values = torch.randn(case.width, generator=g)[scored] * spread - spread
                top = tau[row, heads].max() if seq_len else 0.0
                bounds[row * 2 + plane // planes, plane % planes, scored] = 2.0 * (values + top)
        if spread == 0.3:
            bounds[0, 0, 4] = math.nan
        got = run(problem, device, bounds=bounds.to(device), bos=bos, eos=eos)
        for row, seq_len in enumerate(problem.seq_lens):
            for head in range(6):
                listed = problem.lists[row][head if per_head else head // 3]
                plane = bounds[row * 2 + head // 3, (head % 3) if planes == 3 else 0]
                left = [p for p in range(bos, -(-seq_len // 4) - eos) if p not in listed]
                wanted = all(float(0.5 * plane[p]) <= float(got.tau[row, head]) for p in left)
                assert got.certified[row, head] == wanted, (spread, row, head)
                seen.add((wanted, bool(left)))
    assert {(True, True), (False, True), (True, False)} <= seen


def test_a_page_of_nan_shows(device):
    """NaN in an attended key is no zero: the output says so."""
    problem = make(Case(heads=1, group=1, width=3), [43, 0, 17])
    page = problem.lists[0][0][1]
    problem.k[int(problem.table[0, page]) * 16 + 3] = math.nan
    got = run(problem, device)
    assert got.o[0, 0].isnan().all()
    assert got.mass[0, 0].isnan()
    assert got.o[1:].isfinite().all()


def test_strides_of_queries_and_pool_are_free(device):
    case = Case(group=3, dim=64, v_dim=32)
    problem = make(case)
    wide = torch.full((problem.k.shape[0], case.heads, 200), math.nan)  # K and V side by side
    wide[..., 4:68], wide[..., 100:132] = problem.k, problem.v
    q = torch.full((8, case.query_heads * 2, 64), math.nan)
    q[::2, ::2] = problem.q
    strided = replace(problem, k=wide[..., 4:68], v=wide[..., 100:132], q=q[::2, ::2])
    check(problem, run(strided, device))


def test_values_are_read_where_there_is_mass_only(device):
    """V of a token without mass may be anything."""
    problem = make(Case(heads=1, group=1, page=4, width=40, spread=4.0))
    truths = truth(problem, 0, 0)
    at = torch.tensor(tokens_of(problem, 0, 0))
    none = at[truths.p == 0]
    assert len(none) > 50
    clean = run(problem, device)
    problem.v[problem.table[0, none // 4].long() * 4 + none % 4] = math.nan
    assert torch.equal(run(problem, device).o, clean.o)
