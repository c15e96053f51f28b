"""Flows over MLA latents: against their oracles, against dense attention, and in pools that are hostile around them."""

import pytest
import torch

import flowlib
from flowlib.ops import CMax, GeMM, topK
from flowlib.testing import Case, fill_nan, has_oracle, scene, verify_flow
from flowlib.testing.own_reference import ReferenceOracle
from flowlib.testing.selection import judge_selection
from flowlib.testing.stages import judge_attention, judge_scores, run_step
from tests.suites.same import IMPLEMENTATIONS, bits, differing, int32

FLOWS = flowlib.list_flows(mla=True)
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SMALL = {"num_kv_heads": 1, "scale": 0.2, "max_pages": 24, "max_batch": 8}
SPEC = flowlib.Spec(**SMALL, kv_lora_rank=24, head_dim=40, group_size=5, page_size=8, top_k=2)  # odd sizes, bf16
LENGTHS = (93, 41, 0, 25)
flows = pytest.mark.parametrize("name", FLOWS)
impls = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def case(label: str, lengths: tuple[int, ...], q_lens: tuple[int, ...] | None = None, **sizes: object) -> Case:
    return Case(label, flowlib.Spec(**{**SMALL, **sizes}), lengths, q_lens)


CASES = [
    case("bf16-h16-512+64-p16", (115, 64, 1), kv_lora_rank=512, head_dim=576, group_size=16, page_size=16, top_k=3),
    case("bf16-h100-32+16-p64", (577, 0, 321), kv_lora_rank=32, head_dim=48, group_size=100, page_size=64, top_k=1,
         bos=0),
    case("fp32-h3-24+16-p5", (64, 119, 0), kv_dtype=FP32, kv_lora_rank=24, head_dim=40, group_size=3, page_size=5,
         top_k=1, top_k_ratio=0.3, bos=2, eos=3),
    case("bf16-h20-96+32-p1", (19, 3, 24), kv_lora_rank=96, head_dim=128, group_size=20, page_size=1, top_k=5),
    case("fp16-h1-32+0-p16", (165, 140), kv_dtype=FP16, kv_lora_rank=32, head_dim=32, group_size=1, page_size=16,
         top_k=2),
    case("fp8-h16-64+16-p16", (165, 100), kv_dtype=FP8, kv_lora_rank=64, head_dim=80, group_size=16, page_size=16,
         top_k=2, k_scale=0.5, v_scale=0.5),
    case("bf16-h5-24+16-p8-queries", (80, 30, 7), (3, 0, 2), kv_lora_rank=24, head_dim=40, group_size=5, page_size=8,
         top_k=2),
    case("bf16-h5-24+16-p8-dense-below", (48, 49, 90), kv_lora_rank=24, head_dim=40, group_size=5, page_size=8,
         top_k=1, dense_below=48),
    case("bf16-h5-24+16-p8-fp8-summaries", (93, 41), kv_lora_rank=24, head_dim=40, group_size=5, page_size=8, top_k=2,
         summary_dtype=FP8, summary_scale=0.25),
]  # fmt: skip


@flows
def test_every_mla_flow_has_an_independent_oracle(name):
    assert has_oracle(name), "write it in flowlib/testing/oracles"


@flows
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_mla_flow_agrees_with_its_oracle(name, case, device):
    """Fields, scores, the selection by the scores it picked, o and lse."""
    report = verify_flow(name, cases=[case], device=device)
    assert report.ok, str(report)
    assert report.oracle == "independent"
    assert not report.notes, "no case was changed"
    assert report.attended["triton"] == report.attended["reference"]
    assert report.cached["triton"] > report.attended["triton"] or case.spec.dense_below


def made_of(name: str, device: str, spec: flowlib.Spec = SPEC):
    return scene(flowlib.profile(flowlib.build(name), spec), LENGTHS, device=device)


@impls
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["quest_mla", "rope_aware_block_sparse_mla"])
def test_a_budget_that_covers_the_context_is_dense(name, page_size, impl, device):
    spec = SPEC.replace(page_size=page_size, top_k=128, max_pages=128)
    made = made_of(name, device, spec)
    store = made.pool_by(impl)
    out = made.plan.step(made.q, store, made.batch, impl=impl)
    dense = flowlib.dense(made.q, store, made.batch, impl=impl)
    assert (out.lengths.flatten() == -(-made.batch.seq_lens // page_size)).all()
    exact = flowlib.dense(made.q, store, made.batch, dtype=torch.float64)
    low = flowlib.dense(made.q, store, made.batch)
    for got in (out, dense):
        step = torch.finfo(BF16).eps * exact.o.abs().max()
        assert (got.o.double() - exact.o).abs().max() <= 2 * (low.o.double() - exact.o).abs().max() + step
        assert (got.o[2] == 0).all()
        assert (got.lse[2] == -torch.inf).all()


@flows
@impls
def test_what_is_not_owned_or_not_written_changes_nothing(name, impl, device):
    """A scene is NaN in every unowned page, unwritten slot and unfinished field, and its table's tail is no page."""
    made = made_of(name, device)
    hostile = made.pool_by(impl)
    clean = hostile.clone()
    assert clean.latent.isnan().any(), "the scene is hostile"
    for value in (clean.latent, *clean.fields.values()):
        value.nan_to_num_(0.0)
    table = made.batch.page_table.clone()
    table[(table < 0) | (table >= clean.num_pages)] = 0
    batch = flowlib.Batch(table, made.batch.seq_lens)
    before = made.plan.step(made.q, hostile, made.batch, impl=impl)
    assert not differing(before, made.plan.step(made.q, clean, batch, impl=impl))
    assert before.o.isfinite().all()
    assert before.lse[made.batch.seq_lens > 0].isfinite().all()


def latents(spec: flowlib.Spec, count: int, seed: int, device: str, size: float = 1.0) -> torch.Tensor:
    shape = (count, 1, spec.head_dim)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(spec.kv_dtype).to(device)


@flows
@impls
def test_a_freed_and_reused_page_shows_no_trace(name, impl, device):
    """Request B takes over the pages of A, in another order and with an unfinished page at its end."""
    plan = flowlib.profile(flowlib.build(name), SPEC)
    size = SPEC.page_size
    fresh, used = (flowlib.PagedPool(plan, num_pages=9, device=device) for _ in range(2))
    for value in (fresh.latent, *fresh.fields.values()):
        fill_nan(value)
    used.write(latents(SPEC, 9 * size, 1, device, 50.0), None, torch.arange(9 * size, device=device), impl=impl)
    own, length = [7, 2, 5, 0, 8, 3, 6], 7 * size - size // 2
    slots = torch.tensor([p * size + s for p in own for s in range(size)][:length], device=device)
    k, q = latents(SPEC, length, 2, device), latents(SPEC, SPEC.num_heads, 3, device).transpose(0, 1)
    batch = flowlib.Batch(int32([[*own, -1]], device), int32([length], device))
    outputs = []
    for pool in (fresh, used):
        for part in (slice(0, length // 2), slice(length // 2, None)):
            pool.write(k[part], None, slots[part], impl=impl)
        outputs.append(plan.step(q, pool, batch, impl=impl))
    assert not differing(*outputs)
    for field, value in fresh.fields.items():
        finished = own[: length // size]
        assert torch.equal(bits(value[finished]), bits(used.fields[field][finished]))


@impls
def test_a_step_reads_latents_that_somebody_else_owns(impl, device):
    """Latents in wider rows, as beside other data in a serving engine's buffer; nothing is copied, V is a view."""
    made = made_of("quest_mla", device)
    store = made.pool_by(impl)
    wide = store.latent.new_full((len(store.latent), 2, SPEC.head_dim + 8), 9.0)
    wide[:, :1, :-8] = store.latent
    foreign = flowlib.KVStore(made.plan, wide[:, :1, :-8], None, store.fields)
    before = made.plan.step(made.q, store, made.batch, impl=impl)
    assert not differing(before, made.plan.step(made.q, foreign, made.batch, impl=impl))
    assert foreign.v.data_ptr() == foreign.latent.data_ptr() == wide.data_ptr()
    assert foreign.v.shape == (len(wide), 1, SPEC.kv_lora_rank)
    new = latents(SPEC, 3, 5, device)
    foreign.write(new[:, 0], None, torch.arange(3, device=device), impl=impl)
    assert torch.equal(wide[:3, :1, :-8], new)
    assert (wide[:, 1] == 9.0).all()
    assert (wide[..., -8:] == 9.0).all()


@flows
def test_a_step_updates_the_pages_its_tokens_finish(name, device):
    """One launch with the slots of the step's tokens is an update and a step."""
    plan = flowlib.profile(flowlib.build(name), SPEC)
    assert plan._executor.joined is not None
    made = scene(plan, (9 * SPEC.page_size, 41, 0, 4 * SPEC.page_size), device=device)
    slots = [own[-1] * SPEC.page_size + (n - 1) % SPEC.page_size if n else -1
             for own, n in zip(made.pages, made.lengths, strict=True)]  # fmt: skip
    loc = torch.tensor(slots, device=device)
    apart, joined = made.pool_by("triton"), made.pool_by("triton")
    for pool in (apart, joined):
        for value in pool.fields.values():
            value[[made.pages[0][-1], made.pages[3][-1]]] = 1.0
    plan.update(apart, loc, impl="triton")
    outputs = [plan.allocate(made.batch.size, made.batch.width, device) for _ in range(2)]
    plan.launch(made.q, apart, made.batch, outputs[0])
    plan.launch(made.q, joined, made.batch, outputs[1], loc)
    assert not differing(*outputs)
    for field, value in apart.fields.items():
        assert torch.equal(bits(value), bits(joined.fields[field]))
        assert (value[made.pages[0][-1]] != 1.0).any()


class LoudestHead(flowlib.vFlowMLA):
    """Every query head chooses for itself, by its product with the largest latents."""

    def __init__(self):
        self.cmax, self.gemm, self.topk = CMax(dim=1), GeMM(), topK()

    def create_cache(self, page_size, kv_lora_rank, qk_rope_head_dim):
        return {"peak": (1, kv_lora_rank + qk_rope_head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cmax(cache["latent"], cache["peak"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        self.topk(self.gemm(cache["peak"], q, ctx=ctx), o, ctx=ctx)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [5, 20])
def test_a_users_flow_selects_per_query_head(heads, impl, device):
    plan = flowlib.profile(LoudestHead(), SPEC.replace(group_size=heads))
    assert plan.lanes == heads
    made = scene(plan, LENGTHS, device=device)
    run, oracle = run_step(made, impl, made.pool_by(impl), made.q), ReferenceOracle(plan)
    scores, truths = judge_scores(run, oracle)
    verdict, where = scores.judge(run.compute)
    assert verdict.ok, where
    slack = float(scores.tolerance(run.compute).max())
    verdict, where = judge_selection(run, oracle, truths, slack)
    assert verdict.ok, where
    for label, (verdict, where) in judge_attention(run).items():
        assert verdict.ok, f"{label}: {where}"
    assert len({tuple(pages) for pages in run.out.pages[0].tolist()}) > 1, "heads differ"
