"""MLA flows, specs and pools put to a wrong use are refused by name."""

import pytest
import torch
from typer.testing import CliRunner

import flowlib
from flowlib.algorithms import QuestMLA
from flowlib.cli import app
from flowlib.errors import FlowDefinitionError, FormatError, OptionError, ShapeError
from flowlib.ops import CMax, GeMM, topK
from tests.refusals import refused

SIZES = {"kv_lora_rank": 24, "head_dim": 40, "num_kv_heads": 1, "group_size": 5, "scale": 0.2, "page_size": 8}
SPEC = flowlib.Spec(**SIZES)
OF_LATENT = "V is the first kv_lora_rank channels of the latent"
IS_MLA = "(kv_lora_rank is 24, so this is MLA)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 23}, "Spec: kv_lora_rank is 24, expected at most head_dim 23 (head_dim = kv_lora_rank + qk_rope"),
        ({"num_kv_heads": 2}, f"Spec: num_kv_heads is 2, expected 1: all query heads share one latent {IS_MLA}"),
        ({"scale": None}, "Spec: scale is None, expected that of the model, such as (128 + 64) ** -0.5 times"),
        ({"v_head_dim": 40}, f"Spec: v_head_dim is 40, expected None or 24: {OF_LATENT} {IS_MLA}"),
        ({"v_scale": 2.0}, f"Spec: v_scale is 2.0, expected k_scale, 1.0: {OF_LATENT} {IS_MLA}"),
        ({"alibi_slopes": (0.5,) * 5}, "Spec: alibi_slopes is (0.5, 0.5, 0.5, 0.5, 0.5), expected None: positions"),
        ({"kv_lora_rank": 2.5}, "Spec: kv_lora_rank is 2.5, expected an integer of at least 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_spec_that_does_not_fit_a_latent(changes, message):
    with refused(OptionError, message):
        flowlib.Spec(**{**SIZES, **changes})


def test_a_spec_of_deepseek_and_one_without_rope():
    spec = flowlib.Spec(kv_lora_rank=512, head_dim=576, num_kv_heads=1, group_size=128, scale=0.1147)
    assert (spec.dv, spec.num_heads, spec.is_mla) == (512, 128, True)
    assert flowlib.Spec(**{**SIZES, "head_dim": 24, "v_head_dim": 24}).dv == 24
    assert not flowlib.Spec().is_mla


def test_a_flow_over_latents_needs_an_mla_spec_and_the_others_refuse_one():
    wanted = "quest_mla: kv_lora_rank is None, expected the content channels of an MLA latent: Spec(kv_lora_rank=512"
    with refused(OptionError, wanted):
        flowlib.profile(flowlib.build("quest_mla"), flowlib.Spec())
    for name in ("quest_sparse_attention", "lserve_sparse_attention", "streaming_attention"):
        with refused(OptionError, f"{name}: kv_lora_rank is 24, expected None: the flow reads separate K and V"):
            flowlib.profile(flowlib.build(name), SPEC)


def test_pages_that_are_no_whole_number_of_sub_blocks():
    with refused(OptionError, "lserve_centroid_mla: page_size is 40, expected at most 16 or a multiple of it"):
        flowlib.profile(flowlib.build("lserve_centroid_mla"), SPEC.replace(page_size=40))


class _Peak(flowlib.vFlowMLA):
    def create_cache(self, page_size, kv_lora_rank, qk_rope_head_dim):
        return {"peak": (1, kv_lora_rank + qk_rope_head_dim)}

    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["latent"], cache["peak"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        topK()(GeMM()(q.mean(1, True), cache["peak"], ctx=ctx), o, ctx=ctx)


class _ReadsKeys(_Peak):
    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["k"], cache["peak"], loc=loc, ctx=ctx)


class _WritesLatents(_Peak):
    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["latent"], cache["latent"], loc=loc, ctx=ctx)


class _NamesLatent(_Peak):
    def create_cache(self, page_size, kv_lora_rank, qk_rope_head_dim):
        return {"latent": (1, kv_lora_rank)}


class _WritesNothing(_Peak):
    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["latent"], None, loc=loc, ctx=ctx)


class _OfTwoArguments(_Peak):
    def create_cache(self, page_size, head_dim):  # pyright: ignore
        return {"peak": (1, head_dim)}


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (_ReadsKeys, "cache['k']: no such field, create_cache and the pool give 'latent', 'peak'"),
        (_WritesLatents, "CMax: 'latent' is read-only"),
        (_NamesLatent, "create_cache: field 'latent' is given by the pool, choose another name"),
        (_WritesNothing, "field 'peak' is never written: forward_cache must compute it from 'latent'"),
        (_OfTwoArguments, "create_cache: takes (page_size, head_dim), expected (page_size, kv_lora_rank, "),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_flow_that_is_not_well_formed(flow, message):
    with refused(FlowDefinitionError, message):
        flowlib.profile(flow(), SPEC)


def test_fields_of_a_latent_declared_in_a_flow_over_k_and_v():
    class WrongBase(flowlib.vFlow):
        create_cache = _Peak.create_cache  # type: ignore[assignment]

    wanted = "create_cache: takes (page_size, kv_lora_rank, qk_rope_head_dim), expected (page_size, head_dim)"
    with refused(FlowDefinitionError, wanted, "in a vFlow (", "test_mla_flow_errors.py:"):
        flowlib.profile(WrongBase(), flowlib.Spec())


def test_latents_are_written_alone():
    pool = flowlib.PagedPool(flowlib.profile(_Peak(), SPEC), num_pages=2)
    latent, loc = torch.ones(3, 1, 40), torch.arange(3)
    with refused(FormatError, "write: 'v' is a tensor [3, 1, 24], expected None: with MLA, V is part of the latents"):
        pool.write(latent, latent[..., :24], loc)
    with refused(ShapeError, "write: 'latent' is [3, 1, 24], expected [3, 1, 40]"):
        pool.write(latent[..., :24], None, loc)
    with refused(FormatError, "write: 'latent' is NoneType, expected a tensor [3, 1, 40]"):
        pool.write(None, None, loc)  # type: ignore[arg-type]
    assert not pool.latent.any(), "nothing was stored"
    pool.write(latent[:, 0], None, loc)
    assert pool.latent[:3].eq(1).all()
    assert pool.v.data_ptr() == pool.k.data_ptr() == pool.latent.data_ptr(), "one copy"
    assert pool.v.shape == (16, 1, 24)


def test_a_store_of_latents_has_no_v_of_its_own():
    plan = flowlib.profile(_Peak(), SPEC)
    fields = {"peak": torch.zeros(2, 1, 1, 40, dtype=torch.bfloat16)}
    latent = torch.zeros(16, 1, 40, dtype=torch.bfloat16)
    with refused(FormatError, "KVStore: 'v' is a tensor [16, 1, 24], expected None: with MLA"):
        flowlib.KVStore(plan, latent, latent[..., :24], fields)
    with refused(ShapeError, "KVStore: 'latent' is [16, 1, 24], expected [16, 1, 40]"):
        flowlib.KVStore(plan, latent[..., :24], None, fields)
    pool = flowlib.PagedPool(flowlib.profile(flowlib.build("quest"), flowlib.Spec(head_dim=8)), num_pages=1)
    with refused(FormatError, "KVStore: there is no latent, the plan's spec has no kv_lora_rank; use k and v"):
        pool.latent  # noqa: B018
    with refused(FormatError, "write: 'v' is NoneType, expected a tensor [1, 2, 8]"):
        pool.write(torch.ones(1, 2, 8), None, torch.tensor([0]))


def test_what_a_flow_over_latents_says_of_itself():
    flow = QuestMLA()
    sizes = {"latent_max": (1, 40), "latent_min": (1, 40)}
    assert flow.get_cache_meta_info(8, 24, 16) == {"latent": (8, 40), **sizes}
    assert flow.run_indexer_virtual(5, 8, 24, 16) == 2 * 40 * 2, "two bfloat16 fields"
    assert flow.run_indexer_virtual(5, 8, 24, 16, torch.float8_e4m3fn) == 2 * 40
    spec = flow.default_spec(top_k=3)
    assert (spec.kv_lora_rank, spec.head_dim, spec.num_kv_heads, spec.top_k) == (512, 576, 1, 3)
    text = str(flowlib.profile(flow, spec))
    assert "flowlib.kernels.attend_mla:launch_attend_mla" in text
    assert "12.5% of the latents" in text


def test_flows_are_listed_by_what_they_read():
    assert "quest_mla" in flowlib.list_flows(mla=True)
    assert "quest_mla" not in flowlib.list_flows(mla=False)
    assert sorted(flowlib.list_flows(mla=True) + flowlib.list_flows(mla=False)) == flowlib.list_flows()


def test_verify_all_takes_the_flows_that_sizes_of_a_latent_fit():
    sizes = ("--kv-lora-rank", "8", "--head-dim", "12", "--group-size", "2", "--max-pages", "20", "--top-k", "2")
    arguments = ["verify", "--all", "--impl", "reference", "--device", "cpu", "--page-size", "2", *sizes]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "4 of 4 flows are right"
    assert "quest_mla " in done.stdout
    done = CliRunner().invoke(app, ["profile", "quest_mla", *sizes])
    assert "QuestMLA: page_size 16, head_dim 12, 2 query / 1 kv heads" in done.stdout
    done = CliRunner().invoke(app, ["profile", "quest_sparse_attention", *sizes])
    assert (done.exit_code, done.stdout) == (2, "")
