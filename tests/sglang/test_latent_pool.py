"""SGLang's pool of MLA latents with a flow's fields; which flows, models and prefill backends go together."""

import json
import sys
from types import SimpleNamespace

import pytest

import flowlib
from flowlib.core.errors import BackendError, OptionError
from flowlib.sglang import refusals
from tests.sglang import latent_model
from tests.sglang.engine import ENGINE, HERE, run
from tests.sglang.test_refusals import FINE_LAYER

CHUNKED = ("flowlib", "triton", "flashinfer")
QUEST, MLA = "gqa_quest_sparse_attention", "quest_mla"
CASES = {
    "latents of an MHA model": (
        "mha", {"flow": MLA},
        "flow 'quest_mla' reads MLA latents, and Qwen3ForCausalLM keeps K and V of each head: choose a flow over K",
    ),
    "K and V of an MLA model": (
        "mla", {"flow": QUEST},
        f"flow {QUEST!r} reads K and V of each head, and DeepseekV2ForCausalLM keeps MLA latents: choose one of "
        "lserve_centroid_mla, quest_mla, rope_aware_block_sparse_mla, rope_unaware_block_sparse_mla",
    ),
    "torch_native": (
        "mla", {"flow": MLA, "attention_backend": "torch_native"},
        "--prefill-attention-backend torch_native can't prefill an MLA model",
    ),
    "no chunks": (
        "mla", {"flow": MLA, "disable_chunked_prefix_cache": True},
        "--disable-chunked-prefix-cache: flowlib prefills in chunks only; leave it off, or choose another",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answer(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mla")
    latent_model.write(folder)
    models = {"mha": str(tiny_model), "mla": str(folder)}
    cases = {name: ENGINE | {"model_path": models[model]} | more for name, (model, more, _) in CASES.items()}
    cases["default"] = ENGINE | {"model_path": str(folder), "flow": MLA}
    cases["triton"] = cases["default"] | {"attention_backend": "triton", "page_size": 64}
    ended = run([sys.executable, str(HERE / "latent_pool_job.py"), json.dumps(cases)], timeout=200)
    assert ended.code == 0, ended.text[-4000:]
    return json.loads(ended.text.split("ANSWER ", 1)[1].splitlines()[0])


def test_fields_of_every_flow_follow_whole_latents_and_parts_of_latents(answer):
    assert {case.split()[0] for case in answer["written"]} == set(flowlib.list_flows(mla=True))
    for case, found in answer["written"].items():
        tokens = 16 if "centroid" in case or "rope" in case else 0  # bounds are exact, means round at every token
        assert found["worst"] <= tokens * 2.0**-23 * 6.0, case  # 6: more than any of these normal numbers
        assert found["layers"] == [1]
        assert found["compared"] >= 8


def test_sglangs_own_builder_makes_the_pool_with_a_flow_alone(answer):
    assert answer["built"] == ["FlowMLATokenToKVPool", ["latent_max", "latent_min"], "MLATokenToKVPool", True]


def test_the_memory_budget_counts_the_fields(answer):
    fields, told = answer["memory"]
    assert fields == told == 2 * 2 * 576 * 2 * 6


def test_what_leaves_the_fields_behind_and_other_layouts_are_refused(answer):
    said = answer["refused"]
    assert said["move"].startswith("move_kv_cache: ")
    assert said["load"].startswith("load_cpu_copy: ")
    assert said["size"] == "SGLang's KV pool has 93 tokens, expected a multiple of 16"
    assert "(16, 512, 544, torch.bfloat16), expected (16, 512, 576, torch.bfloat16)" in said["rope"]
    assert said["another SGLang"] == "flows over MLA latents are served by SGLang 0.5.16, found 0.5.16"
    assert said["indexer"].startswith("SGLang's latent pool keeps a sparse indexer's keys")


def test_prefixes_take_chunks_by_sglangs_own_gate(answer):
    assert answer["methods"] == {
        "triton": "MHA_CHUNKED_KV*",
        "triton, below the threshold": "MLA",
        "triton, disabled": "MLA",
        "triton, deterministic": "MLA",
        "triton, decode": "MLA",
        "triton, no prefix": "MHA",
        "triton, fp8": "MLA",
        "triton, stock": "MLA",
        "flowlib": "MHA_CHUNKED_KV*",
        "flowlib, no prefix": "MHA_CHUNKED_KV*",
        "flashinfer": "MHA_CHUNKED_KV*",
        "flashinfer, no prefix": "MHA_ONE_SHOT",
        "flashinfer, below the threshold": "MLA",
        "flashinfer, fp8": "MLA*",
        "fa3": "MHA_ONE_SHOT",
    }
    assert answer["gates"] == [False, True, True, True]


def test_chunks_are_for_layers_that_the_hooks_reach(answer):
    refused = "layer {} of {} does not belong to a DeepseekV2AttentionMLA, and --prefill-attention-backend flowlib"
    said = {name: line for name, (line, _) in answer["checks"].items() if line}
    assert sorted(said) == ["flowlib, half", "flowlib, others"]
    assert said["flowlib, half"].startswith(refused.format(1, "ModuleList"))
    assert said["flowlib, others"].startswith(refused.format(0, "Model"))
    logged = {name: lines for name, (_, lines) in answer["checks"].items() if lines}
    assert logged == {"flowlib, whole": 1, "triton, whole": 1, "triton, half": 1}


def test_chunks_give_attention_over_the_whole_prefix(answer):
    for case in answer["prefills"]:
        bound = 2.0 * case["plain"] + 2.0**-23 * case["size"]
        assert max(case["errors"]) <= bound, case
        assert case["padding"] == 0.0
        assert [sum(column) for column in zip(*case["chunks"], strict=True)] == [0, 37, 5, 0]
    assert [len(case["chunks"]) for case in answer["prefills"]] == [3, 3, 3, 1]


def test_replayed_steps_by_kernels_give_the_reference(answer):
    said = answer["graph"]
    # fp32 against fp32: sums of at most 96 terms of size about 1, in another order
    assert said["worst"] <= 96 * 2**-23
    assert said["fields"] == 0.0
    assert said["counts"][0] == said["counts"][1]
    assert said["counts"][0]["sparse_steps"] > 0


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_go_together_ends_the_server_with_the_fix(name, answer):
    assert CASES[name][2] in answer["left"][name]
    assert answer["left"][name].startswith("flowlib: can't serve --flow ")


def test_prefill_is_flowlibs_on_a_cpu_unless_another_one_is_given(answer):
    assert answer["left"]["default"] == ["flowlib", "flowlib", "flowlib", 16]
    assert answer["left"]["triton"] == ["triton", "triton", "flowlib", 64]


def test_prefill_is_chosen_by_the_device_that_sglang_will_find(answer):
    assert answer["chosen"]["a CPU"][0] == answer["chosen"]["cpu:0"][0] == ["flowlib", "flowlib", "flowlib"]
    assert answer["chosen"]["a GPU"][0] == [None, None, "flowlib"]


def test_an_attention_backend_that_nothing_is_left_for_is_logged(answer):
    chosen, logged = answer["chosen"]["triton beside"]
    assert chosen == ["flowlib", "flowlib", "flowlib"]
    assert logged[-1] == "flowlib: prefill and decoding are flowlib's, --attention-backend triton is left out"
    for name in ("a CPU", "a GPU"):
        assert not any("left out" in line for line in answer["chosen"][name][1])


def _args(backend, graph="disabled", **more):
    fine = {"disable_chunked_prefix_cache": False, "enable_deterministic_inference": False, "kv_cache_dtype": "auto"}
    fine["cuda_graph_config"] = SimpleNamespace(prefill=SimpleNamespace(backend=graph))
    return SimpleNamespace(get_attention_backends=lambda: (backend, "flowlib"), **fine | more)


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_flowlibs_prefill_is_refused_where_it_would_not_be_sglangs(name, value, flag):
    refusals.refuse_latent_prefill(_args("flowlib"), "flowlib", CHUNKED)
    with pytest.raises(OptionError, match=f"^{flag}: "):
        refusals.refuse_latent_prefill(_args("flowlib", **{name: value}), "flowlib", CHUNKED)
    refusals.refuse_latent_prefill(_args("triton", **{name: value}), "flowlib", CHUNKED)


def test_a_graph_of_prefill_is_refused_where_it_would_capture_chunks():
    for backend, graph in (("flowlib", "tc_piecewise"), ("triton", "breakable"), ("flashinfer", "full")):
        with pytest.raises(OptionError, match=rf"^a CUDA graph of prefill \({graph}\) can't capture chunks"):
            refusals.refuse_latent_prefill(_args(backend, graph), "flowlib", CHUNKED)
    for backend, graph in (("triton", "tc_piecewise"), ("fa3", "full")):
        refusals.refuse_latent_prefill(_args(backend, graph), "flowlib", CHUNKED)


def test_layers_over_latents_are_checked_by_their_ids():
    absorbed = FINE_LAYER | {"qk_head_dim": 576, "v_head_dim": 512, "k_scale_float": None, "tp_k_head_num": 1}
    absorbed["tp_v_head_num"] = 1
    up_projected = FINE_LAYER | {"qk_head_dim": 192, "v_head_dim": 128, "k_scale_float": None}

    def refuse(*layers):
        refusals.refuse_latent_layers([SimpleNamespace(**layer) for layer in layers], 576, 512)

    refuse(absorbed, up_projected)
    with pytest.raises(BackendError, match=r"^0 attention layers with the id 3 attend over latents of 576 channels"):
        refuse(up_projected)
    with pytest.raises(BackendError, match=r"^2 attention layers with the id 3 attend over latents"):
        refuse(absorbed, absorbed)
    with pytest.raises(BackendError, match=r"^layer 3 has an fp8 k_scale of 0.5, which --flow can't serve"):
        refuse(absorbed, up_projected | {"k_scale_float": 0.5})
    with pytest.raises(BackendError, match=r"^layer 3 has a sliding window"):
        refuse(absorbed, up_projected | {"sliding_window_size": 128})


def test_kinds_of_flows_and_models_that_go_together_pass():
    for arch, name in (("MLA", MLA), ("MHA", QUEST)):
        config = SimpleNamespace(architectures=None)
        model = SimpleNamespace(attention_arch=SimpleNamespace(name=arch), hf_config=config)
        refusals.refuse_other_attention(name, flowlib.build(name), model, serves_latents=False)
