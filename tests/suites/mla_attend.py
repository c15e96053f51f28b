"""Ragged attention of latent prefill, by every implementation; kernels compiled or interpreted."""

import pytest
import torch

from flowlib import mla
from flowlib.testing import tolerance
from tests.suites.mla_pieces import INF, cases, checks, far_memory, impls


def attended(q, k, v, query_lens, kv_lens, scale, causal):
    """float64 (o, lse, Σ p·|v|), a query at a time."""
    o, lse, spread = (torch.zeros(*q.shape[:2], n, dtype=torch.float64) for n in (v.shape[2], 1, v.shape[2]))
    lse = lse.fill_(-INF)[..., 0]
    q, k, v = tolerance.upcast(q, k, v)
    queries, keys = cases.offsets(query_lens), cases.offsets(kv_lens)
    for i, (m, n) in enumerate(zip(query_lens, kv_lens, strict=True)):
        for j in range(m):
            seen = max(0, n - m + j + 1) if causal else n
            if seen:
                rows = slice(keys[i], keys[i] + seen)
                scores = torch.einsum("hd,thd->ht", q[queries[i] + j], k[rows]) * scale
                lse[queries[i] + j] = scores.logsumexp(1)
                weights = scores.softmax(1)
                o[queries[i] + j] = torch.einsum("ht,thd->hd", weights, v[rows])
                spread[queries[i] + j] = torch.einsum("ht,thd->hd", weights, v[rows].abs())
    return o, lse, spread


def qkv(query_lens, kv_lens, heads=2, size=192, v_size=128, dtype=torch.bfloat16, device="cpu"):
    shapes = ((sum(query_lens), heads, size), (sum(kv_lens), heads, size), (sum(kv_lens), heads, v_size))
    return [cases.lcg(11 + i, *shape).to(device, dtype) for i, shape in enumerate(shapes)]


def check_attention(given, query_lens, kv_lens, causal, name, scale=0.1147, **options):
    q, k, v = given
    batch = mla.RaggedBatch.of(cases.offsets(query_lens), cases.offsets(kv_lens), q.device)
    got, lse = mla.varlen_attention(q, k, v, batch, scale=scale, causal=causal, attention=name, **options)
    o, sums, spread = attended(q, k, v, query_lens, kv_lens, scale, causal)
    u = max(torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps * q.shape[-1])
    assert tolerance.judge(got, o, u * (spread + o.abs()) + 1e-6).ok
    assert tolerance.judge(lse, sums, torch.full_like(sums, 1e-5)).ok
    keyless = sums == -INF
    assert (got[keyless] == 0).all()
    return got, lse


RAGGED = [
    ((5, 0, 20, 1), (5, 7, 20, 1)),
    ((3, 9, 2, 4), (70, 0, 129, 1)),
    ((6, 1, 17), (4, 3, 80)),  # causal: the first two queries of the first request see nothing
]


@impls
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("query_lens", "kv_lens"), RAGGED)
def test_attention_of_ragged_requests(impl, causal, query_lens, kv_lens, device):
    check_attention(qkv(query_lens, kv_lens, device=device), query_lens, kv_lens, causal, impl)


@impls
@pytest.mark.parametrize(
    ("size", "v_size", "dtype"),
    [(192, 128, torch.float32), (192, 128, torch.float16), (64, 64, torch.bfloat16), (40, 8, torch.float32),
     (96, 112, torch.bfloat16)],
)  # fmt: skip
def test_attention_of_other_sizes_and_dtypes(impl, size, v_size, dtype, device):
    lens = (3, 0, 35), (7, 4, 50)
    check_attention(qkv(*lens, size=size, v_size=v_size, dtype=dtype, device=device), *lens, True, impl)


@impls
def test_attention_over_many_query_tiles(impl, device):
    """More than one tile of 128 queries, and keys that only some of its rows see."""
    lens = (200, 3), (260, 90)
    check_attention(qkv(*lens, heads=1, device=device), *lens, True, impl)


@impls
def test_attention_takes_any_strides_and_writes_what_it_is_given(impl, device):
    """Keys and values side by side, values padded to the keys' 192, queries by head, an fp32 output with gaps."""
    lens = (4, 6), (30, 70)
    plain = qkv(*lens, device=device)
    q = torch.empty(2, 10, 192, dtype=torch.bfloat16, device=device).transpose(0, 1)
    both = torch.empty(100, 2, 192 + 192, dtype=torch.bfloat16, device=device)
    k, v = both[..., :192], both[..., 192 : 192 + 128]
    lanes = torch.empty(100, 4, 256, dtype=torch.bfloat16, device=device)[:, ::2, ::2]
    out = torch.empty(10, 3, 128, device=device)[:, :2]
    lse = torch.empty(2, 12, device=device)[:, :10].t()
    for values in (v, lanes):
        for view, value in zip((q, k, values), plain, strict=True):
            view.copy_(value)
        got = check_attention((q, k, values), *lens, False, impl, out=out, lse=lse)
        assert got[0] is out
        assert got[1] is lse


@impls
def test_attention_beyond_two_to_the_31_elements(impl, device):
    """Within a request, and where a request begins."""
    stride = 1 << 26
    lens = (2, 3), (34, 6)
    plain = qkv(*lens, heads=1, size=64, v_size=32, device=device)
    memory = far_memory(40 * stride, device)
    k = memory.as_strided((40, 1, 64), (stride, 64, 1))
    v = memory.as_strided((40, 1, 32), (stride, 64, 1), 128)
    k.copy_(plain[1]), v.copy_(plain[2])
    check_attention((plain[0], k, v), *lens, False, impl)


@impls
def test_the_log_sum_exp_of_one_key_is_its_score_with_the_whole_scale(impl, device):
    """YaRN's factor is in the scale, and so in the log-sum-exp."""
    scale = cases.DEEPSEEK.scale
    assert scale == pytest.approx(0.114721386792926, abs=1e-12)
    q, k, v = qkv((1,), (1,), heads=16, device=device)
    batch = mla.RaggedBatch.of((0, 1), (0, 1), device)
    o, lse = mla.varlen_attention(q, k, v, batch, scale=scale, causal=True, attention=impl)
    score = (q[0].double() * k[0].double()).sum(1).cpu() * scale
    assert (lse[0].cpu().double() - score).abs().max() <= 1e-6
    assert torch.equal(o, v)
    assert mla.check_lse_base(impl, device=device) == 1.0


@impls
def test_queries_of_a_request_without_keys(impl, device):
    """vLLM's masking test: queries [2, 131, 1] over keys [4, 0, 3]."""
    assert checks.check_keyless([impl], device).ok
