"""What can't be served right is refused by the name of its flag, model feature or layer."""

import re
from types import SimpleNamespace

import pytest

import flowlib
from flowlib.core.errors import BackendError, FlowDefinitionError, OptionError
from flowlib.sglang import refusals, v0_5_23

FINE_ARGS = {
    "speculative_algorithm": None,
    "enable_mixed_chunk": False,
    "enable_hisparse": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": None,
    "disaggregation_mode": "null",
    "enable_page_major_kv_layout": False,
    "enable_unified_memory": False,
    "prefill_only_disable_kv_cache": False,
    "is_embedding": False,
    "dllm_algorithm": None,
    "dcp_size": 1,
    "attn_cp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "quantization_param_path": None,
    "enable_torch_compile": False,
    "kv_cache_dtype": "auto",
}
FLAGS = [
    ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
    ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
    ("enable_hisparse", True, "--enable-hisparse"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("enable_lmcache", True, "--enable-lmcache"),
    ("enable_flexkv", True, "--enable-flexkv"),
    ("radix_cache_backend", "theirs", "--radix-cache-backend"),
    ("disaggregation_mode", "decode", "--disaggregation-mode"),
    ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout"),
    ("enable_unified_memory", True, "--enable-unified-memory"),
    ("prefill_only_disable_kv_cache", True, "--prefill-only-disable-kv-cache"),
    ("is_embedding", True, "--is-embedding"),
    ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
    ("dcp_size", 2, "--dcp-size"),
    ("attn_cp_size", 2, "--attn-cp-size"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_pdmux", True, "--enable-pdmux"),
    ("quantization_param_path", "scales.json", "--quantization-param-path"),
    ("enable_torch_compile", True, "--enable-torch-compile"),
    ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype"),
    ("kv_cache_dtype", "mxfp8", "--kv-cache-dtype"),
    ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype"),
    ("kv_cache_dtype", "fp4_mx_block16", "--kv-cache-dtype"),
    ("kv_cache_dtype", "fp4_e2m1", "--kv-cache-dtype"),
]
FINE_ARGS_0_5_23 = FINE_ARGS | {
    "enable_kv_cache_sharding": False,
    "enable_unified_cache_external_linker": False,
    "enable_pd_role_switch": False,
    "enable_nvidia_megakernel": False,
    "enable_amd_monokernel": False,
    "attention_backend": "flashinfer",
    "prefill_attention_backend": "fa3",
    "startup_weight_load_mode": "serial",
}
FLAGS_0_5_23 = [
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
    ({"enable_nvidia_megakernel": True}, "--enable-nvidia-megakernel"),
    ({"enable_amd_monokernel": True}, "--enable-amd-monokernel"),
    ({"attention_backend": "qsa"}, "--attention-backend"),
    ({"prefill_attention_backend": "minicpm_flashattn"}, "--prefill-attention-backend"),
    ({"prefill_attention_backend": "minicpm_flashinfer"}, "--prefill-attention-backend"),
    ({"startup_weight_load_mode": "overlap", "kv_cache_dtype": "fp8_e4m3"}, "--startup-weight-load-mode"),
]
FINE_LAYER = {
    "layer_id": 3,
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "is_cross_attention": False,
    "attn_type": SimpleNamespace(name="DECODER"),
    "xai_temperature_len": -1,
    "pos_encoding_mode": "NONE",
    "use_irope": False,
    "tp_k_head_num": 2,
    "tp_v_head_num": 2,
    "qk_head_dim": 64,
    "v_head_dim": 64,
}
LAYERS = [
    ("logit_cap", 30.0, "a logit cap"),
    ("sliding_window_size", 128, "a sliding window"),
    ("is_cross_attention", True, "cross attention"),
    ("attn_type", SimpleNamespace(name="ENCODER_ONLY"), "non-causal attention"),
    ("xai_temperature_len", 1024, "a temperature by length"),
    ("pos_encoding_mode", "ALIBI", "positions added in attention"),
    ("use_irope", True, "interleaved RoPE"),
    ("tp_v_head_num", 1, "unequal numbers of K and V heads"),
    ("qk_head_dim", 96, "heads of 96 and 64 (K and V), expected 64 and 64"),
]
FINE_MODEL = {
    "attention_arch": SimpleNamespace(name="MHA"),
    "is_encoder_decoder": False,
    "is_hybrid_swa": False,
    "has_attention_sinks": False,
    "attention_chunk_size": None,
    "hf_config": SimpleNamespace(architectures=["SomeForCausalLM"]),
}
MODELS = [
    ("is_encoder_decoder", True, "an encoder-decoder"),
    ("is_hybrid_swa", True, "hybrid sliding-window layers"),
    ("has_attention_sinks", True, "attention sinks"),
    ("attention_chunk_size", 8192, "chunked attention"),
    (
        "hf_text_config",
        SimpleNamespace(llama_4_scaling={"beta": 0.1}),
        "a temperature by position (llama_4_scaling)",
    ),
    (
        "hf_config",
        SimpleNamespace(architectures=["SomeForCausalLM"], dual_chunk_attention_config={"chunk_size": 8192}),
        "dual chunk attention",
    ),
]


def test_ordinary_arguments_models_and_layers_pass(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE", raising=False)
    refusals.refuse_flags(SimpleNamespace(**FINE_ARGS))
    refusals.refuse_model(SimpleNamespace(**FINE_MODEL))
    refusals.refuse_layers([SimpleNamespace(**FINE_LAYER)], 64, 64)


@pytest.mark.parametrize(("name", "value", "flag"), FLAGS)
def test_flag_is_refused(name, value, flag):
    with pytest.raises(OptionError, match=f"^{flag} can't be used together with --flow: "):
        refusals.refuse_flags(SimpleNamespace(**FINE_ARGS | {name: value}))


def test_every_flag_of_the_table_is_tried():
    assert {flag for _, _, flag in FLAGS} == {refusal.what for refusal in refusals.FLAGS}
    assert {flag for _, flag in FLAGS_0_5_23} == {refusal.what for refusal in v0_5_23.FLAGS}


@pytest.mark.parametrize(("given", "flag"), FLAGS_0_5_23)
def test_flag_of_the_other_sglang_is_refused(given, flag):
    with pytest.raises(OptionError, match=f"^{flag} can't be used together with --flow: "):
        refusals.refuse_flags(SimpleNamespace(**FINE_ARGS_0_5_23 | given), v0_5_23.FLAGS)


@pytest.mark.parametrize("given", [{}, {"startup_weight_load_mode": "overlap"}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_ordinary_arguments_of_the_other_sglang_pass(given, monkeypatch):
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE", raising=False)
    refusals.refuse_flags(SimpleNamespace(**FINE_ARGS_0_5_23 | given), v0_5_23.FLAGS)


@pytest.mark.parametrize("name", ["SGLANG_USE_HND_KVCACHE", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_variable_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(OptionError, match=f"^{name}=1 can't be used together with --flow"):
        refusals.refuse_flags(SimpleNamespace(**FINE_ARGS))


@pytest.mark.parametrize(("name", "value", "feature"), MODELS)
def test_model_is_refused(name, value, feature):
    with pytest.raises(BackendError, match=f"^SomeForCausalLM has {re.escape(feature)}, which --flow can't serve"):
        refusals.refuse_model(SimpleNamespace(**FINE_MODEL | {name: value}))


@pytest.mark.parametrize(("name", "value", "feature"), LAYERS)
def test_layer_is_refused_by_its_id(name, value, feature):
    with pytest.raises(BackendError) as caught:
        refusals.refuse_layers([SimpleNamespace(**FINE_LAYER | {name: value})], 64, 64)
    assert str(caught.value).startswith("layer 3 has ")
    assert feature in str(caught.value)


def test_every_model_and_layer_fact_of_the_tables_is_tried():
    models, layers = {feature for _, _, feature in MODELS}, [feature for _, _, feature in LAYERS]
    assert {refusal.what for refusal in refusals.MODELS} == models
    for refusal in refusals.LAYERS:
        assert any(refusal.what.startswith(feature) for feature in layers), refusal.what


def test_layers_that_share_keys_and_values_are_refused():
    with pytest.raises(BackendError, match="two attention layers have the id 3, which --flow can't serve: they share"):
        refusals.refuse_layers([SimpleNamespace(**FINE_LAYER)] * 2, 64, 64)


def test_models_that_keep_more_than_one_pool_are_refused():
    model = SimpleNamespace(**FINE_MODEL)
    with pytest.raises(BackendError, match=r"^SomeForCausalLM has recurrent layers"):
        refusals.refuse_hybrid(model, recurrent=True, own_sparse=False)
    with pytest.raises(BackendError, match=r"^SomeForCausalLM has sparse attention of its own"):
        refusals.refuse_hybrid(model, recurrent=False, own_sparse=True)
    refusals.refuse_hybrid(model, recurrent=False, own_sparse=False)


def test_a_normaliser_other_than_softmax_is_refused():
    for name in ("entmax_topk_attention", "entmax_gaussian_attention"):
        with pytest.raises(OptionError, match=rf"^flow '{name}' attends with entmax, alpha 1.5, .*which --flow can't"):
            refusals.refuse_normaliser(name, flowlib.build(name))
    with pytest.raises(FlowDefinitionError, match=r"SimpleNamespace: attention is 'softmax', expected flowlib\.att"):
        refusals.refuse_normaliser("mine", SimpleNamespace(attention="softmax"))
    for name in ("gqa_quest_sparse_attention", "twilight_attention", "h2o_sparse_attention", "streaming_attention"):
        refusals.refuse_normaliser(name, flowlib.build(name))


def test_flows_over_latents_are_suggested_only_where_they_are_served():
    model, name = SimpleNamespace(**FINE_MODEL | {"attention_arch": SimpleNamespace(name="MLA")}), "streaming_attention"
    said = {}
    for served in (True, False):
        with pytest.raises(OptionError, match="and V of each head, and SomeForCausalLM keeps MLA latents: ") as caught:
            refusals.refuse_other_attention(name, flowlib.build(name), model, served)
        said[served] = str(caught.value)
    assert all(flow in said[True] and flow not in said[False] for flow in flowlib.list_flows(mla=True))
    assert said[False].endswith(": no flow is served for such a model with this version of SGLang, leave --flow off")


def test_state_needs_the_radix_cache_off():
    with pytest.raises(OptionError, match=r"keeps state per request in 'acc'.*add --disable-radix-cache"):
        refusals.refuse_state("h2o", ("acc",), disable_radix_cache=False)
    refusals.refuse_state("h2o", ("acc",), disable_radix_cache=True)
    refusals.refuse_state("quest", (), disable_radix_cache=False)


def test_chunks_end_where_pages_end():
    with pytest.raises(OptionError, match="--chunked-prefill-size is 2048, expected a multiple of the page size 48"):
        refusals.refuse_chunks(2048, 48)
    for size in (-1, None, 96):
        refusals.refuse_chunks(size, 48)


@pytest.mark.parametrize("backend", ["trtllm_mha", "aiter"])
def test_a_prefill_backend_that_writes_a_float8_pool_itself(backend):
    with pytest.raises(OptionError, match=f"--prefill-attention-backend {backend} can't be used with an fp8 KV cache"):
        refusals.refuse_prefill(backend, float8=True)
    refusals.refuse_prefill(backend, float8=False)
    refusals.refuse_prefill("flashinfer", float8=True)
