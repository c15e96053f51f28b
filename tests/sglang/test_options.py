"""``--flow-config``: what it accepts, and what it says when it does not."""

import json

import pytest
import torch

from flowlib import Spec
from flowlib.core.errors import BackendError, OptionError
from flowlib.sglang.options import FlowConfig, TraceConfig
from flowlib.sglang.setup import CROSSOVER, FlowSetup, ModelFacts, choose_impl

WRONG = [
    ('{"top_k": 4', "is not JSON: Expecting ',' delimiter at line 1 column 12"),
    ("[4]", "--flow-config is [4], expected a JSON object"),
    ('{"topk": 4}', "unknown key 'topk', expected one of top_k, top_k_ratio, bos, eos"),
    ('{"topk": 4}', "Did you mean 'top_k'?"),
    ('{"top_k": 4, "top_k": 5}', "key 'top_k' is given twice"),
    ('{"top_k": -1}', "top_k is -1, expected an integer of at least 0"),
    ('{"top_k": 4.0}', "top_k is 4.0, expected an integer"),
    ('{"top_k": true}', "top_k is True, expected an integer"),
    ('{"eos": 0}', "eos is 0, expected an integer of at least 1 (the unfinished last page has no summary"),
    ('{"bos": "1"}', "bos is '1', expected an integer"),
    ('{"top_k_ratio": 1.5}', "top_k_ratio is 1.5, expected a number from 0 to 1"),
    ('{"dense_below": null}', "dense_below is None, expected an integer"),
    ('{"options": [1]}', "options is [1], expected an object of the flow's options"),
    ('{"dense_layers": 3}', "dense_layers is 3, expected a list of layer ids"),
    ('{"dense_layers": [0, "1"]}', "dense_layers is '1', expected an integer"),
    ('{"impl": "cuda"}', "impl is 'cuda', expected 'reference' or 'triton'"),
    ('{"module_path": 3}', "module_path is 3, expected the path of a Python file"),
    ('{"trace": 3}', "trace is 3, expected a path or an object"),
    ('{"trace": {"pages": true}}', "trace.path is None, expected the path of the file to write"),
    ('{"trace": {"path": "t", "page": true}}', "unknown key 'page' in 'trace', expected one of path, pages, mass"),
    ('{"trace": {"path": "t", "mass": 1}}', "trace.mass is 1, expected true or false"),
    ('{"summary_dtype": "fp8"}', "summary_dtype is 'fp8', expected one of auto, bf16, fp16, fp32, fp8_e4m3"),
    ('{"summary_dtype": ["auto"]}', "summary_dtype is ['auto'], expected one of auto, bf16"),
    ('{"summary_dtype": "fp8_e4m3", "summary_scale": 3}', "summary_scale is 3, expected a power of two from 2**-64"),
    ('{"summary_dtype": "fp8_e4m3", "summary_scale": "1"}', "summary_scale is '1', expected a power of two"),
    ('{"summary_scale": 2}', "summary_scale is 2, expected 1.0 unless summary_dtype is 'fp8_e4m3'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_configuration_is_refused_by_name(text, message):
    with pytest.raises(OptionError) as caught:
        FlowConfig.parse(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--flow-config")


def test_text_and_mapping_mean_the_same():
    said = {"top_k": 4, "options": {"a": 1}, "dense_layers": [1, 0, 1], "trace": "t.jsonl"}
    parsed = FlowConfig.parse(said)
    assert parsed == FlowConfig.parse(json.dumps(said))
    assert parsed.dense_layers == (0, 1)
    assert parsed.trace == TraceConfig("t.jsonl")


def test_nothing_said_keeps_the_defaults_of_the_spec():
    spec, config = Spec(), FlowConfig.parse(None)
    assert config.budget_numbers() == {name: getattr(spec, name) for name in config.budget_numbers()}
    assert config.summary_numbers() == {name: getattr(spec, name) for name in config.summary_numbers()}
    assert config.to_json() == "{}"


def test_written_back_and_read_again_is_the_same():
    config = FlowConfig(top_k=3, options={"x": 2}, dense_layers=(4,), trace=TraceConfig("t", pages=True))
    assert FlowConfig.parse(config.to_json()) == config
    eight = FlowConfig(summary_dtype="fp8_e4m3", summary_scale=2)
    assert FlowConfig.parse(eight.to_json()) == eight
    assert Spec(**eight.summary_numbers()).summary_dtype is torch.float8_e4m3fn


def test_the_implementation_is_chosen_by_the_device_and_never_changed_silently(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_impl(None, "cuda") == "triton"
    assert choose_impl(None, "cpu") == "reference"
    assert choose_impl("reference", "cuda") == "reference"
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        choose_impl("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_impl("triton", "cpu") == "triton"


def test_short_requests_are_attended_in_full_only_where_that_was_measured():
    def dense_below(flow, head_dim, v_head_dim, kv_heads, rank=None, device="cuda", **config):
        kinds = (torch.bfloat16, torch.bfloat16, device, rank)
        facts = ModelFacts(head_dim, v_head_dim, 8, kv_heads, 0, 2, 2, 16, 4096, *kinds)
        return FlowSetup(flow, FlowConfig(top_k=30, **config), facts).dense_below

    keys, latents = ("gqa_quest_sparse_attention", 64, 64, 2), ("quest_mla", 576, 512, 1, 512)
    assert dense_below(*keys) == CROSSOVER * 32 * 16  # top_k, bos and eos
    assert dense_below(*keys, device="cpu") == 0
    assert dense_below(*latents) == 0
    assert dense_below(*latents, dense_below=512) == 512


def test_options_that_are_no_json():
    with pytest.raises(OptionError, match=r"options .* can't be handed to SGLang's processes.*give numbers, texts"):
        FlowConfig(options={"state_dtype": object()}).to_json()
