"""What tests of `experiments/bench_mla.py` share: small shapes, stand-ins for a GPU's clock and for libraries."""

import dataclasses
import itertools
import math
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_decode
import bench_measure
import bench_mla
import bench_mla_peers as peers
import bench_mla_prefill as prefill
import bench_mla_tiles as tiles
import bench_pools
from bench_mla_shapes import MlaNumbers, MlaWorkload, PrefillShape
from bench_timing import Bandwidth, Timed
from mla_cases import Sizes

SIZES = Sizes(32, 16, 32, 32, 0.2)
RAGGED = PrefillShape((37, 0, 20), (3, 2, 1), 2, 16, 32, SIZES)
"""Two chunks packed, three even; a request without context between."""
PAIR = PrefillShape((37, 5), (2, 1), 1, 16, 32, SIZES)
ALONE = dataclasses.replace(RAGGED, context=(41,), new=(5,))
WORK = MlaWorkload(
    "2x45", (45, 45), MlaNumbers(3, 1, 48, 8, 2, kv_lora_rank=32, scale=0.2), standard=False
)  # fmt: skip


@pytest.fixture(name="stand_in_clock")
def clock_that_stands_in(monkeypatch):
    """Captures run eagerly, replays take as many microseconds as the capture has calls; three GB are free."""

    def capture(calls, pool, first=None):
        for call in (*([first] if first else []), *calls):
            call()
        return len(calls)

    for module in (bench_measure, prefill, tiles):
        monkeypatch.setattr(module, "capture", capture)
        monkeypatch.setattr(module, "replay", lambda graphs, units, *_: Timed(1.0 * units, units, units, 9))
    for module in (bench_measure, bench_decode):
        monkeypatch.setattr(module, "LAYERS", 2)
    monkeypatch.setattr(bench_measure, "_LAUNCHES", 1)
    for module in (bench_decode, bench_mla):
        monkeypatch.setattr(module, "measure_bandwidth", lambda memory, seconds: Bandwidth(4e12, 3e12))
    monkeypatch.setattr(bench_mla, "measure_matmul", lambda device, seconds: 8e14)
    monkeypatch.setattr(bench_mla, "_GIB", 64)
    for module in (bench_decode, bench_pools):
        monkeypatch.setattr(module, "MAX_POOLS", 2)
    monkeypatch.setattr(prefill, "_MAX_COPIES", 1)
    monkeypatch.setattr(bench_decode.Bench, "cuda", property(lambda _: True, lambda *_: None), raising=False)
    found = types.SimpleNamespace(L2_cache_size=512)
    for name, value in {
        "get_device_properties": lambda device: found,
        "graph_pool_handle": lambda: None, "mem_get_info": lambda: (3 << 30, 4 << 30), "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0, "empty_cache": lambda: None, "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


# -- libraries, with the signatures that are called


def _causal(q, k, v, queries, keys, scale, causal):
    """(o, natural lse ``[T, H]``) of ragged requests."""
    o, lse = q.new_zeros(*q.shape[:2], v.shape[2]), torch.full(q.shape[:2], -math.inf)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), k[k0:k1].float()) * scale
        if causal:
            seen = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            scores = scores.masked_fill(torch.arange(k1 - k0) > seen, -math.inf)
        if k1 > k0:
            o[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[k0:k1].float()).to(q.dtype)
            lse[q0:q1] = scores.logsumexp(-1).t()
    return o, lse


class _Ragged:
    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"

    def plan(self, starts, ends, *, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, sm_scale,
             q_data_type, kv_data_type):  # fmt: skip
        self.args = starts.tolist(), ends.tolist(), sm_scale, causal

    def run(self, q, k, v, return_lse):
        o, lse = _causal(q, k, v, *self.args)
        return o, lse / math.log(2.0)


class _Latent:
    def __init__(self, workspace, backend):
        pass

    def plan(self, starts, ends, pages, lengths, heads, rank, rope, page, causal, scale, q_type, kv_type):
        self.starts, self.ends, self.pages = starts.tolist(), ends.tolist(), pages.long()
        self.lengths, self.causal, self.scale = lengths.tolist(), causal, scale

    def run(self, q, q_rope, content, rope, out):
        whole = torch.cat((content, rope), -1)
        rows = [whole[self.pages[a:b]].flatten(0, 1)[:n] for a, b, n in zip(
            self.ends, self.ends[1:], self.lengths, strict=False)]  # fmt: skip
        k = torch.cat(rows)[:, None].expand(-1, q.shape[1], -1)
        keys = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        o, _ = _causal(torch.cat((q, q_rope), -1), k, k[..., : q.shape[2]], self.starts, keys, self.scale, self.causal)
        out.copy_(o)


def _fa3_varlen(*, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                return_softmax_lse):  # fmt: skip
    o, lse = _causal(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale, causal)
    return o, lse.t(), None


def fa3_cached(*, q, qv, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale,
                causal, window_size, softcap, num_splits):  # fmt: skip
    pages = [row[: -(-n // k_cache.shape[1])] for row, n in zip(page_table, cache_seqlens.tolist(), strict=True)]
    wrapper = _Latent(None, "auto")
    starts = torch.tensor([0, *torch.tensor([len(p) for p in pages]).cumsum(0).tolist()])
    wrapper.plan(cu_seqlens_q, starts, torch.cat(pages), cache_seqlens, 0, 0, 0, 0, causal, softmax_scale, None, None)
    out = torch.empty_like(qv)
    wrapper.run(qv, q, v_cache[:, :, 0], k_cache[:, :, 0], out)
    return out


def _merge(a, a_lse, b, b_lse, out, out_lse):
    total = torch.logaddexp(a_lse, b_lse)
    out.copy_((a_lse - total).exp()[..., None] * a.float() + (b_lse - total).exp()[..., None] * b.float())
    out_lse.copy_(total)


@pytest.fixture(name="libraries")
def libraries_that_stand_in(monkeypatch):
    flash = types.SimpleNamespace(flash_attn_varlen_func=_fa3_varlen, flash_attn_with_kvcache=fa3_cached)
    compiled = types.SimpleNamespace(is_compiled=True)
    attention = types.SimpleNamespace(
        gen_batch_prefill_module=lambda *a: compiled, gen_batch_mla_module=lambda *a: compiled
    )
    modules = {
        "flashinfer": types.SimpleNamespace(
            BatchPrefillWithRaggedKVCacheWrapper=_Ragged, BatchMLAPagedAttentionWrapper=_Latent
        ),
        "flashinfer.jit.attention": attention,
        "sgl_kernel": types.SimpleNamespace(merge_state_v2=_merge), "sgl_kernel.flash_attn": flash,
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("_WORKSPACE_BYTES", "_RAGGED_BYTES"):
        monkeypatch.setattr(peers, name, 16)
    monkeypatch.setattr(peers, "SGLANG_CAPACITY", 64)
    return types.SimpleNamespace(compiled=compiled, flash=flash)
