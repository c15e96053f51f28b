"""FlashInfer behind the attention of latent prefill, played by a stand-in with its interface and its habits."""

import gc
import math
import sys
import types

import pytest
import torch

from flowlib import mla
from flowlib.errors import BackendError, OptionError
from flowlib.mla import attention, flashinfer_ragged, lse_base
from flowlib.mla.attention import reference_attention
from flowlib.testing.tolerance import gamma
from tests.refusals import refused
from tests.suites.mla_loop import ALL, cases, mutations, name


class Wrapper:
    """Base-2 log-sum-exp, contiguous tensors only, garbage with a finite sum for queries without keys."""

    made = 0
    plans = 0
    given: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    base = 2.0
    scale_in_lse = True

    def __init__(self, workspace, layout):
        assert workspace.dtype is torch.uint8
        assert layout == "NHD"
        type(self).made += 1

    def plan(self, qo_indptr, kv_indptr, *, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, sm_scale,
             q_data_type, kv_data_type):  # fmt: skip
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "on a device it would be waited for"
        assert qo_indptr.dtype is kv_indptr.dtype is torch.int32
        assert num_qo_heads == num_kv_heads
        assert q_data_type is kv_data_type
        type(self).plans += 1
        self.batch = mla.RaggedBatch.of(qo_indptr, kv_indptr)
        self.heads, self.sizes, self.causal, self.scale = num_qo_heads, (head_dim_qk, head_dim_vo), causal, sm_scale

    def run(self, q, k, v, *, out=None, lse=None, return_lse):
        assert return_lse
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous(), "strides are not FlashInfer's"  # noqa: PT018
        assert (q.shape[1:], v.shape[1:]) == ((self.heads, self.sizes[0]), (self.heads, self.sizes[1]))
        type(self).given = out, lse
        out = torch.empty(len(q), *v.shape[1:], dtype=q.dtype) if out is None else out
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        assert out.is_contiguous() and lse.is_contiguous(), "strides are not FlashInfer's"  # noqa: PT018
        assert (out.shape, out.dtype) == ((len(q), *v.shape[1:]), q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
        reference_attention(q, k, v, self.batch, self.scale, self.causal, out, lse)
        lse /= math.log(self.base)
        if not self.scale_in_lse:
            lse /= self.scale
        for first, end in self.batch.unseeing(self.causal):
            out[first:end], lse[first:end] = math.nan, 7.0
        return out, lse


@pytest.fixture
def flashinfer(monkeypatch):
    """The stand-in installed, on the CPU."""
    fresh = type("Fresh", (Wrapper,), {"made": 0, "plans": 0})
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = fresh
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_ragged, "unavailable", lambda *_: "")
    monkeypatch.setattr(flashinfer_ragged, "_WORKSPACE_BYTES", 64)
    flashinfer_ragged._free.clear()
    monkeypatch.setattr(lse_base, "_factors", {})
    yield fresh
    gc.collect()
    flashinfer_ragged._free.clear()


CHOSEN = [case for case in ALL if case.name in ("edges", "ragged", "context-free middle", "context-free first")]


@pytest.mark.parametrize("schedule", ["packed", "even"])
@pytest.mark.parametrize("case", CHOSEN, ids=name)
def test_the_loop_with_a_base_2_kernel_that_writes_garbage_for_absent_requests(case, schedule, flashinfer):
    made = cases.problem(case)
    done = mutations.run(made, schedule, attention="flashinfer")
    assert done.attention == "flashinfer"
    assert made.error(done.o) <= cases.GATE
    assert (done.lse.double() - made.truth_lse).abs().max() <= 1e-5


def test_the_base_is_measured_not_assumed(flashinfer):
    assert mla.check_lse_base("flashinfer", device="cpu") == math.log(2.0)
    lse_base._factors.clear()
    flashinfer.base = math.e
    assert mla.check_lse_base("flashinfer", device="cpu") == 1.0
    lse_base._factors.clear()
    flashinfer.base = 10.0
    said = "attention='flashinfer'", "[0.7972,", "expected [1.8355, 2.5287, 0.0] (natural", "(base 2)"
    with refused(BackendError, *said):
        mla.check_lse_base("flashinfer", device="cpu")


def test_a_scale_missing_from_the_log_sum_exp_is_refused_before_the_first_chunk(flashinfer):
    flashinfer.scale_in_lse = False
    with refused(BackendError, "log-sum-exp of its kernel is", "one key of score 1.8355"):
        mutations.run(cases.problem(CHOSEN[0]), attention="flashinfer")


def test_a_base_2_kernel_taken_for_a_natural_one_would_be_seen(flashinfer, monkeypatch):
    made = cases.problem(CHOSEN[0])
    monkeypatch.setattr(attention, "lse_factor", lambda *_: 1.0)
    assert made.error(mutations.run(made, attention="flashinfer").o) > cases.GATE


def test_garbage_for_queries_without_keys_would_be_seen(flashinfer, monkeypatch):
    made = cases.problem(next(c for c in CHOSEN if c.name == "context-free middle"))
    monkeypatch.setattr(attention, "_FOREIGN", frozenset())
    assert made.error(mutations.run(made, attention="flashinfer").o) > cases.GATE


def test_a_batch_is_planned_once_for_all_layers_and_wrappers_are_used_again(flashinfer):
    case = CHOSEN[1]
    made = cases.problem(case)
    mla.check_lse_base("flashinfer", device="cpu")
    before = flashinfer.plans
    for _ in range(2):  # forward passes
        context = mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, 16)
        for _ in range(3):  # layers
            given = made.q, made.k, made.v, made.cache, made.block_table, context, made.up_project
            done = mla.chunked_prefill(*given, scale=case.sizes.scale, attention="flashinfer")
            assert made.error(done.o) <= cases.GATE
        assert flashinfer.plans == before + context.num_chunks + 1
        before = flashinfer.plans
        del context, given
        gc.collect()
    assert flashinfer.made == 4


def test_auto_takes_flashinfer_where_it_serves(flashinfer, monkeypatch):
    assert mla.resolve_attention("auto", "triton", torch.bfloat16, (192, 128), "cpu") == "flashinfer"
    assert mla.resolve_attention("auto", "reference", torch.bfloat16, (192, 128), "cpu") == "reference"
    monkeypatch.setattr(flashinfer_ragged, "unavailable", lambda *_: "is away")
    assert mla.resolve_attention("auto", "triton", torch.bfloat16, (192, 128), "cpu") == "triton"
    with refused(BackendError, "attention='flashinfer' is away"):
        mla.resolve_attention("flashinfer", "triton", torch.bfloat16, (192, 128), "cpu")


def test_what_flashinfer_does_not_serve_is_said(monkeypatch):
    monkeypatch.setattr(flashinfer_ragged, "_installed", lambda: True)
    cuda = torch.device("cuda")
    assert flashinfer_ragged.unavailable(torch.bfloat16, (192, 128), cuda) == ""
    for dtype, dims, device, said in (
        (torch.bfloat16, (192, 128), torch.device("cpu"), "needs tensors on cuda, these are on cpu"),
        (torch.float32, (192, 128), cuda, "these are torch.float32"),
        (torch.bfloat16, (40, 8), cuda, "these are (40, 8)"),
    ):
        assert said in flashinfer_ragged.unavailable(dtype, dims, device)
    monkeypatch.setattr(flashinfer_ragged, "_installed", lambda: False)
    with refused(BackendError, "attention='flashinfer' needs the package flashinfer, which is not installed"):
        mla.check_lse_base("flashinfer", device="cuda")
    with refused(OptionError, "attention is 'fa3', expected one of 'auto', 'flashinfer', 'triton', 'reference'"):
        mla.check_lse_base("fa3")


def test_strides_are_not_left_to_flashinfer(flashinfer):
    """Values that are a part of wider rows (of 192, or of nope and value together) broke other servers."""
    q, k, both = (cases.lcg(i, n, 2, d).to(torch.bfloat16) for i, n, d in ((1, 9, 192), (2, 5, 192), (3, 5, 256)))
    batch = mla.RaggedBatch.of((0, 3, 9), (0, 1, 5))
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    o, lse = mla.varlen_attention(q, k, both[..., 128:], batch, scale=0.1, causal=False, attention="flashinfer")
    wanted = mla.varlen_attention(q, k, both[..., 128:], batch, scale=0.1, causal=False, attention="reference")
    assert torch.equal(o, wanted[0])
    assert (lse - wanted[1]).abs().max() <= 1e-6


def _results(kind, dtype, *shape):
    """NaN of a shape: as FlashInfer writes it, or not."""
    if kind == "strided":
        return torch.full((*shape[:-1], 2 * shape[-1]), math.nan, dtype=dtype)[..., ::2]
    if kind == "unaligned":
        return torch.full((math.prod(shape) + 1,), math.nan, dtype=dtype)[1:].view(shape)
    return torch.full(shape, math.nan, dtype=torch.float64 if kind == "wide" else dtype)


@pytest.mark.parametrize("lse_kind", ["fitting", "strided", "unaligned"])
@pytest.mark.parametrize("kind", ["fitting", "strided", "unaligned", "wide"])
def test_flashinfer_writes_results_where_they_belong_if_it_can(kind, lse_kind, flashinfer):
    q, k, v = (cases.lcg(i, n, 2, d).to(torch.bfloat16) for i, n, d in ((1, 9, 192), (2, 5, 192), (3, 5, 128)))
    batch = mla.RaggedBatch.of((0, 3, 9), (0, 1, 5))
    mla.check_lse_base("flashinfer", device="cpu")
    out, lse = _results(kind, torch.bfloat16, 9, 2, 128), _results(lse_kind, torch.float32, 9, 2)
    mla.varlen_attention(q, k, v, batch, scale=0.1, causal=False, attention="flashinfer", out=out, lse=lse)
    wanted = mla.varlen_attention(q, k, v, batch, scale=0.1, causal=False, attention="reference")
    assert torch.equal(out.to(torch.bfloat16), wanted[0])
    assert (lse - wanted[1]).abs().max() <= gamma(4) * wanted[1].abs().max(), "to base 2 and back"
    assert [x is not None for x in flashinfer.given] == [kind == "fitting", lse_kind == "fitting"]


@pytest.mark.parametrize("habit", ["+inf", "garbage"])
def test_merging_a_foreign_kernels_empty_rows(habit, flashinfer):
    """FlashAttention 2 writes +inf for queries without keys; `varlen_attention` gives 0 and -inf for any kernel."""
    q, k, v = (cases.lcg(i, n, 2, d).to(torch.bfloat16) for i, n, d in ((1, 9, 192), (2, 5, 192), (3, 5, 128)))
    batch = mla.RaggedBatch.of((0, 3, 9), (0, 0, 5))
    o, lse = mla.varlen_attention(q, k, v, batch, scale=0.1, causal=False, attention="flashinfer")
    assert (o[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    if habit == "+inf":
        lse[:3] = math.inf
        merged, _ = mla.merge_attn_states(o, lse, o + 1, torch.zeros(9, 2))
        assert torch.equal(merged[:3], (o + 1)[:3])
