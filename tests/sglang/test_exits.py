"""A server that was asked for a flow and can't run it ends with the reason, and serves nothing."""

import json
import sys
from importlib import import_module

import pytest

from flowlib.sglang.versions import ADAPTERS
from tests.sglang.engine import ENGINE, HERE, SERVE, SERVE_FLAGS, run, with_plugin
from tests.sglang.latent_model import CONFIG

CHECKS = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from flowlib.sglang.versions import adapter
from sglang.srt.server_args import ServerArgs, prepare_server_args

answers = []
for words, keywords in json.loads(sys.argv[1]):
    try:
        if words is not None:
            args = prepare_server_args(words)
        else:
            args = ServerArgs(**keywords)
        if hasattr(args, "resolve_once"):  # where making the arguments does not resolve them
            args.resolve_once()
        args = adapter().in_effect(args)
        chosen = [args.flow, args.flow_config, args.page_size, args.decode_attention_backend, args.attention_backend]
        answers.append({"args": chosen})
    except SystemExit as left:
        answers.append({"left": str(left.code)})
    except TypeError as wrong:
        answers.append({"left": f"TypeError: {wrong}"})
print("ANSWER", json.dumps(answers))
"""
"""Many argument lists in one process: SGLang takes seconds to import."""


def _words(model, *more):
    return [[*SERVE_FLAGS, "--model-path", str(model), *more], None]


def _keywords(model, **more):
    return [None, {**ENGINE, "model_path": str(model), **more}]


QUEST = "gqa_quest_sparse_attention"
CASES = {
    "unknown flow": (("--flow", "gqa_quest_sparse_atention"), f"Did you mean '{QUEST}'?"),
    "bad JSON": (
        ("--flow", QUEST, "--flow-config", "{top_k: 1}"),
        "--flow-config is not JSON: Expecting property name",
    ),
    "unknown key": (("--flow", QUEST, "--flow-config", '{"budget": 1}'), "unknown key 'budget'"),
    "bad budget": (
        ("--flow", QUEST, "--flow-config", '{"top_k": -2}'),
        "top_k is -2, expected an integer of at least 0",
    ),
    "backend": (
        ("--flow", QUEST, "--decode-attention-backend", "triton"),
        "--decode-attention-backend is 'triton', but",
    ),
    "prefill": (("--flow", QUEST, "--prefill-attention-backend", "flowlib"), "but a flow only decodes: leave it off"),
    "both": (("--flow", QUEST, "--attention-backend", "flowlib"), "--attention-backend is 'flowlib', but a flow only"),
    "no flow": (("--flow-config", "{}"), "--flow-config is given without --flow: name the flow"),
    "backend, no flow": (("--decode-attention-backend", "flowlib"), "without --flow: name the flow with --flow"),
    "mixed chunk": (
        ("--flow", QUEST, "--enable-mixed-chunk"),
        "--enable-mixed-chunk can't be used together with --flow",
    ),
    "page size": (("--flow", QUEST, "--page-size", "256"), "page_size is 256, expected an integer from 1 to 128"),
    "chunk": (
        ("--flow", QUEST, "--page-size", "48", "--chunked-prefill-size", "256"),
        "--chunked-prefill-size is 256, expected a multiple of the page size 48",
    ),
    "layer": (
        ("--flow", QUEST, "--flow-config", '{"dense_layers": [2]}'),
        "dense_layers names layer 2, expected ids from",
    ),
    "every layer dense": (
        ("--flow", QUEST, "--flow-config", '{"dense_layers": [0, 1]}'),
        "dense_layers names all 2 layers, so nothing would be sparse",
    ),
    "kv dtype": (
        ("--flow", QUEST, "--kv-cache-dtype", "fp8_e5m2"),
        "--kv-cache-dtype can't be used together with --flow",
    ),
    "state": (
        (
            "--flow",
            "running_mean",
            "--flow-config",
            json.dumps({"module_path": str(HERE / "flows" / "running_mean.py")}),
        ),
        "flow 'running_mean' keeps state per request in 'running', and the radix cache shares pages between requests: "
        "add --disable-radix-cache",
    ),
    "state, dense below": (
        (
            "--flow",
            "running_mean",
            "--flow-config",
            json.dumps({"module_path": str(HERE / "flows" / "running_mean.py"), "dense_below": 512}),
        ),
        "dense_below is 512, expected 0 for a flow with state (running)",
    ),
    "kv pool of another dtype": (
        ("--flow", QUEST, "--kv-cache-dtype", "bf16"),
        "gives a KV pool of torch.bfloat16 and the model computes in torch.float32, expected torch.bfloat16",
    ),
    "trace of several": (
        ("--flow", QUEST, "--dp-size", "2", "--flow-config", '{"trace": "t.jsonl"}'),
        "--flow-config: trace follows one scheduler, and --dp-size is 2",
    ),
    "flow file": (
        ("--flow", "mine", "--flow-config", '{"module_path": "no_such_file.py"}'),
        "no_such_file.py",
    ),
}


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory):
    """Folder with the configuration of a model most of whose layers are linear attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64, "torch_dtype": "float32"}))
    return folder


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    """Folder with the configuration of a model that keeps MLA latents."""
    folder = tmp_path_factory.mktemp("latent")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def answers(sglang, tiny_model, hybrid_model, latent_model):
    """What becomes of each case, and of some good arguments, in one process."""
    good = {
        "defaults": _words(tiny_model, "--flow", QUEST),
        "page size given": _words(tiny_model, "--flow", QUEST, "--page-size", "32"),
        "page size one": _words(tiny_model, "--flow", QUEST, "--page-size", "1"),
        "prefill given": _words(tiny_model, "--flow", QUEST, "--attention-backend", "torch_native"),
        "keywords": _keywords(tiny_model, flow=QUEST, flow_config={"top_k": 3}),
        "keyword text": _keywords(tiny_model, flow=QUEST, flow_config='{"top_k": 3}'),
        "what only flowlib says": _keywords(tiny_model, flow_served={"flow": QUEST}),
        "state, no radix cache": _words(tiny_model, *CASES["state"][0], "--disable-radix-cache"),
        "no flow at all": _words(tiny_model),
        "hybrid": _words(hybrid_model, "--flow", QUEST, "--disable-radix-cache"),
        "latents": _words(latent_model, "--flow", "quest_mla"),
    }
    cases = {name: _words(tiny_model, *words) for name, (words, _) in CASES.items()} | good
    ended = run([sys.executable, "-c", CHECKS, json.dumps(list(cases.values()))], timeout=200, env=sglang.environment())
    assert ended.code == 0, ended.text[-4000:]
    found = json.loads(ended.text.split("ANSWER ", 1)[1].splitlines()[0])
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_end_the_process_with_the_reason(name, answers):
    assert "left" in answers[name], f"{name} was accepted: {answers[name]}"
    assert CASES[name][1] in answers[name]["left"]
    assert answers[name]["left"].startswith("flowlib: ")


def test_the_flow_chooses_backend_and_page_size_only_when_they_are_not_given(answers):
    assert answers["defaults"]["args"] == [QUEST, "{}", 16, "flowlib", "torch_native"]
    assert answers["page size given"]["args"][2] == 32
    assert answers["page size one"]["args"][2] == 1
    assert answers["prefill given"]["args"][3:] == ["flowlib", "torch_native"]
    assert answers["state, no radix cache"]["args"][0] == "running_mean"
    assert answers["keywords"]["args"] == answers["keyword text"]["args"]
    assert answers["keywords"]["args"][1] == '{"top_k": 3}'


def test_what_is_served_can_not_be_said(answers):
    assert "flow_served" in answers["what only flowlib says"]["left"]


def test_without_a_flow_nothing_changes(answers):
    assert answers["no flow at all"]["args"] == [None, None, 1, None, "torch_native"]


def test_a_hybrid_model_is_refused_before_its_weights_are_read(answers):
    assert "Qwen3NextForCausalLM has recurrent layers (Mamba or linear attention)" in answers["hybrid"]["left"]


def test_latents_are_refused_by_a_version_that_does_not_serve_them(answers, sglang):
    if import_module(ADAPTERS[sglang.version]).LATENTS:
        assert answers["latents"]["args"][0] == "quest_mla"
    else:
        said = f"flows over MLA latents are served by SGLang 0.5.16, found {sglang.version}"
        assert answers["latents"]["left"] == f"flowlib: can't serve --flow quest_mla: {said}"


def test_the_command_line_exits_non_zero_with_the_message(tiny_model):
    ended = run([*SERVE, "--model-path", str(tiny_model), "--flow", "no_such_flow"], timeout=90)
    assert ended.code not in (0, None)
    assert "flowlib: can't serve --flow no_such_flow:" in ended.text


def test_what_only_the_scheduler_can_see_ends_the_server_too(tiny_model, tmp_path):
    config = json.dumps({"trace": str(tmp_path / "missing" / "trace.jsonl")})
    command = [*SERVE, "--model-path", str(tiny_model), "--flow", QUEST, "--flow-config", config]
    ended = run(command, timeout=120)
    assert ended.code not in (0, None)
    assert f"flowlib: can't serve --flow {QUEST}: --flow-config: trace can't be written to" in ended.text


def test_a_hook_that_does_not_take_ends_the_server(tiny_model, tmp_path):
    env = with_plugin(tmp_path, "lost_hook")
    ended = run([*SERVE, "--model-path", str(tiny_model), "--flow", QUEST], timeout=90, env=env)
    assert ended.code not in (0, None)
    assert "did not take: sglang.srt.mem_cache.kv_cache_configurator" in ended.text
    assert "_build_oot_mha_kv_pool" in ended.text
