"""Gather and merge of latent prefill, by every implementation; kernels compiled or interpreted."""

import importlib
import itertools
import math
import mmap
import sys
from pathlib import Path

import pytest
import torch

from flowlib import mla
from flowlib.testing import tolerance
from tests.suites.same import IMPLEMENTATIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
cases = importlib.import_module("mla_cases")
checks = importlib.import_module("mla_checks")

impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
INF = math.inf


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def table_of(requests: int, width: int) -> torch.Tensor:
    """Reverse-interleaved: later pages of a request lie before earlier ones, between those of the others."""
    return torch.tensor(
        [[requests * width - 1 - (p * requests + i) for p in range(width)] for i in range(requests)], dtype=torch.int32
    )


def gather(cache, table, lens, starts, impl, device, out=None):
    owner = torch.repeat_interleave(torch.tensor(lens)).to(device, torch.int32)
    if out is None:
        out = torch.empty(len(owner), cache.shape[2], dtype=cache.dtype, device=device)
    first = None if starts is None else int32(starts, device)
    ends = int32(cases.offsets(lens), device)
    return mla.gather_latent(cache, table.to(device), ends, owner, len(owner), out, first, impl)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).cpu()


# ---- gather


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("starts", [(32, 0, 16), None])
def test_gather_copies_every_bit(impl, dtype, starts, device):
    """Any bit pattern: quiet and signalling NaN, infinities, subnormals."""
    lens = (35, 0, 17)
    generator = torch.Generator().manual_seed(77)
    ints = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(ints)
    cache = torch.randint(limits.min, limits.max, (24, 16, 576), generator=generator, dtype=ints).view(dtype)
    wanted = cases.gathered(cache, table_of(3, 8), lens, starts or (0, 0, 0))
    got = gather(cache.to(device), table_of(3, 8), lens, starts, impl, device)
    assert torch.equal(bits(got), bits(wanted))
    swapped = table_of(3, 8)
    swapped[0, [2, 3]] = swapped[0, [3, 2]]
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    assert not torch.equal(bits(gather(cache.to(device), swapped, lens, starts, impl, device)), bits(wanted))


@impls
@pytest.mark.parametrize("page", [1, 3, 16, 48, 64])
def test_gather_from_any_position_of_any_page(impl, page, device):
    lens, starts = (7, 0, 70, 1), (page - 1, 5, 2 * page + 1, 0)
    width = -(-max(a + b for a, b in zip(lens, starts, strict=True)) // page)
    cache = cases.lcg(5, 4 * width, page, 40).to(torch.bfloat16)
    wanted = cases.gathered(cache, table_of(4, width), lens, starts)
    assert torch.equal(gather(cache.to(device), table_of(4, width), lens, starts, impl, device).cpu(), wanted)


@impls
def test_gather_takes_any_strides(impl, device):
    lens, starts = (20, 13), (3, 0)
    cache, table = cases.lcg(6, 8, 16, 72).to(torch.bfloat16), table_of(2, 4)
    wanted = cases.gathered(cache, table, lens, starts)
    padded = torch.empty(8, 32, 144, dtype=torch.bfloat16, device=device)[:, ::2, 1::2]
    padded.copy_(cache)
    wide = torch.empty(8, 9, dtype=torch.int32, device=device)[:2, :4]
    wide.copy_(table)
    out = torch.empty(72, 50, dtype=torch.bfloat16, device=device).t()[:33]
    assert gather(padded, wide, lens, starts, impl, device, out) is out
    assert torch.equal(out.cpu(), wanted)


@impls
def test_gather_leaves_other_rows_alone(impl, device):
    cache = cases.lcg(6, 4, 16, 576).to(device, torch.bfloat16)
    out = torch.full((30, 576), 7.0, dtype=torch.bfloat16, device=device)
    index = table_of(1, 4).to(device), int32((0, 21), device), torch.zeros(40, dtype=torch.int32, device=device)
    mla.gather_latent(cache, *index, 21, out, impl=impl)
    assert (out[21:] == 7.0).all()
    assert torch.equal(out[:21].cpu(), cases.gathered(cache.cpu(), table_of(1, 4), [21], [0]))
    mla.gather_latent(cache, *index, 0, out.fill_(7.0), impl=impl)
    assert (out == 7.0).all()


def far_memory(count: int, device) -> torch.Tensor:
    """bf16 elements; on the CPU untouched memory costs nothing."""
    if device == "cpu":
        return torch.frombuffer(mmap.mmap(-1, count * 2), dtype=torch.bfloat16)
    return torch.zeros(count, dtype=torch.bfloat16, device=device)


@impls
def test_gather_from_pages_beyond_two_to_the_31_elements(impl, device):
    """Slots past 3.7 million of a 576-wide pool; here a pool with a page stride of 2^22 elements."""
    stride, far = 1 << 22, 608
    pool = far_memory((far + 8) * stride, device).as_strided((far + 8, 16, 576), (stride, 576, 1))
    cache = cases.lcg(7, 8, 16, 576).to(torch.bfloat16)
    pool[far:] = cache.to(device)
    got = gather(pool, table_of(2, 4) + far, (40, 30), (5, 16), impl, device)
    assert torch.equal(got.cpu(), cases.gathered(cache, table_of(2, 4), (40, 30), (5, 16)))


# ---- merge


def merge(given, impl, limit=None, dtype=None, **options):
    """Into NaN, with a log-sum-exp."""
    p, p_lse, s, s_lse = given
    out = torch.empty(s.shape, dtype=dtype or s.dtype, device=s.device)
    lse = torch.empty(s.shape[:2], device=s.device)
    return mla.merge_attn_states(p, p_lse, s, s_lse, out, lse, limit, impl=impl, **options)


def states(tokens, heads, size, dtype=torch.float32, device="cpu", seed=0):
    """A tenth of each side's log-sum-exp is +inf, a tenth -inf; never both sides at once."""
    generator = torch.Generator().manual_seed(seed)
    p, s = (torch.randn(tokens, heads, size, generator=generator).to(dtype) for _ in range(2))
    p_lse, s_lse = (torch.randn(tokens, heads, generator=generator) for _ in range(2))
    draw = torch.rand(tokens, heads, generator=generator)
    p_lse[draw < 0.2], s_lse[draw > 0.8] = -INF, -INF
    p_lse[draw < 0.1], s_lse[draw > 0.9] = INF, INF
    return [x.to(device) for x in (p, p_lse, s, s_lse)]


def merged(given, limit=None):
    p, p_lse, s, s_lse = (x.cpu() for x in given)
    return cases.merged(p, p_lse, s, s_lse, len(p) if limit is None else limit)


def assert_merged(got, wanted, dtype=torch.float32):
    """One rounding to the output's dtype, and some fp32 roundings of weights and sums."""
    o, lse = wanted
    allowed = torch.finfo(dtype).eps * o.abs() + 16 * torch.finfo(torch.float32).eps * (1 + o.abs())
    assert tolerance.judge(got[0], o, allowed).ok
    assert tolerance.judge(got[1], lse, torch.full_like(lse, 1e-6)).ok


@impls
def test_merge_with_every_infinity(impl, device):
    given = [x.to(device) for x in checks.merge_case()]
    p, p_lse, s, s_lse = given
    wanted = cases.merged(p.cpu(), p_lse.t().cpu(), s.cpu(), s_lse.t().cpu(), 4)
    got = merge((p, p_lse.t(), s, s_lse.t()), impl, 4)
    by_token = merge((p, p_lse.t().contiguous(), s, s_lse.t().contiguous()), impl, 4)
    for o, lse in (got, by_token):
        assert checks.distance(o, wanted[0]) <= 1e-5
        assert checks.distance(lse, wanted[1]) <= 1e-5
    assert torch.equal(got[0][2, 1], p[2, 1]), "both sides empty: the prefix's output"
    assert got[1][2, 1] == -INF
    assert torch.equal(got[0][3, 2], s[3, 2]), "+inf means no keys"
    assert torch.equal(got[0][4:], s[4:])
    assert torch.equal(got[1][4:], s_lse.t()[4:])


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "limit"), [((61, 3, 32), None), ((40, 4, 48), 13), ((9, 5, 256), 8)])
def test_merge_shapes_and_dtypes(impl, dtype, shape, limit, device):
    given = states(*shape, dtype, device)
    assert_merged(merge(given, impl, limit), merged(given, limit), dtype)


@impls
@pytest.mark.parametrize("limit", [0, 1, 16, 17])
def test_tokens_without_context_are_copied_and_their_prefix_is_not_read(impl, limit, device):
    given = states(17, 2, 16, device=device)
    given[3][16] = INF  # copied as it is, too
    wanted = merged(given, limit)
    given[0][limit:], given[1][limit:] = math.nan, math.nan
    got = merge(given, impl, limit)
    assert_merged(got, wanted)
    assert torch.equal(got[0][limit:], given[2][limit:])
    assert torch.equal(got[1][limit:], given[3][limit:])


@impls
def test_an_empty_side_may_hold_anything(impl, device):
    given = states(40, 3, 24, device=device)
    wanted = merged(given)
    for part, lse, other in ((0, 1, 3), (2, 3, 1)):
        empty = given[lse].isinf() & given[other].isfinite()
        assert empty.any()
        given[part][empty] = math.nan
    assert_merged(merge(given, impl), wanted)


@impls
def test_both_sides_empty_give_no_nan(impl, device):
    given = states(5, 2, 8, device=device)
    given[1].fill_(-INF)
    given[3].fill_(-INF)
    given[1][1:3] = INF
    given[0].zero_()
    given[2].fill_(math.nan)
    o, lse = merge(given, impl)
    assert (o == 0).all()
    assert (lse == -INF).all()


@impls
def test_merge_of_large_and_distant_sums(impl, device):
    """exp of any of these overflows or underflows; their weights do not."""
    given = states(6, 1, 8, device=device)
    given[1][:, 0] = torch.tensor([3e4, -3e4, 500.0, 1e4, -1e30, 120.0])
    given[3][:, 0] = torch.tensor([3e4, -3e4, 498.0, 999.0, 1e30, -120.0])
    got = merge(given, impl)
    o, lse = merged(given)
    assert checks.distance(got[0], o) <= 1e-5
    assert ((got[1].cpu().double() - lse).abs() <= 1e-6 * lse.abs()).all()


@impls
def test_every_tensor_of_a_merge_has_its_own_strides(impl, device):
    """Padded values (192 for 128), by head, every other lane, reversed roles; log-sum-exp by head and by token."""
    tokens, heads, size = 11, 3, 128
    given = states(tokens, heads, size, torch.bfloat16, device)
    wanted = merged(given, 7)
    padded = torch.empty(tokens, heads, 192, dtype=torch.bfloat16, device=device)[..., :size]
    by_head = torch.empty(heads, tokens, size, dtype=torch.bfloat16, device=device).transpose(0, 1)
    sparse = torch.empty(tokens, 2 * heads, 2 * size, dtype=torch.bfloat16, device=device)[:, ::2, ::2]
    lse_by_head = torch.empty(heads, tokens + 5, device=device)[:, :tokens].t()
    for p, s, o in itertools.permutations((padded, by_head, sparse)):
        p.copy_(given[0]), s.copy_(given[2]), o.fill_(math.nan)
        lse_by_head.copy_(given[1])
        lse = torch.empty(tokens, heads + 2, device=device)[:, :heads]
        got = mla.merge_attn_states(p, lse_by_head, s, given[3], o, lse, 7, impl=impl)
        assert_merged(got, wanted, torch.bfloat16)


@impls
@pytest.mark.parametrize("side", [0, 2])
def test_merge_in_place(impl, side, device):
    given = states(21, 3, 40, torch.float32, device)
    apart = merge(given, impl, 12)
    mine = [x.clone() for x in given]
    into = {"out": mine[side], "out_lse": mine[side + 1], "prefill_tokens_with_context": 12}
    o, lse = mla.merge_attn_states(*mine, **into, impl=impl)
    assert o is mine[side]
    assert torch.equal(o, apart[0])
    assert torch.equal(lse, apart[1])


@impls
def test_merge_makes_an_output_and_needs_no_sum(impl, device):
    given = states(4, 2, 16, torch.float16, device)
    out, lse = mla.merge_attn_states(*given, impl=impl)
    assert (out.dtype, lse) == (torch.float16, None)
    assert_merged((out, merged(given)[1]), merged(given), torch.float16)
    none = [x[:0] for x in given]
    assert mla.merge_attn_states(*none, impl=impl)[0].shape == (0, 2, 16)


@impls
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_merge_into_float8(impl, dtype, device):
    """One rounding of float8, and saturation where a value is too large for it."""
    given = states(9, 2, 32, torch.float32, device)
    given[0][0], given[2][0] = 1e6, 1e6
    got, _ = merge(given, impl, dtype=dtype, output_scale=0.25)
    limit = torch.finfo(dtype).max
    o = (merged(given)[0] / 0.25).clamp(-limit, limit)
    off = (got.cpu().double() - o).abs()
    assert (off <= torch.finfo(dtype).eps * o.abs() + torch.finfo(dtype).smallest_normal).all()
    assert (got[0].cpu().double() == limit).all()


@impls
def test_merge_beyond_two_to_the_31_elements(impl, device):
    stride, tokens = 1 << 28, 10
    p, p_lse, s, s_lse = states(tokens, 2, 16, torch.bfloat16, device)
    far_p, far_s = (far_memory(tokens * stride, device).as_strided((tokens, 2, 16), (stride, 16, 1)) for _ in range(2))
    far_p.copy_(p), far_s.copy_(s)
    got = merge((far_p, p_lse, far_s, s_lse), impl)
    assert_merged(got, merged((p, p_lse, s, s_lse)), torch.bfloat16)
    mla.merge_attn_states(far_p, p_lse, far_s, s_lse, far_p, impl=impl)
    assert torch.equal(far_p, got[0])
