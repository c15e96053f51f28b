"""``flowlib serve``: what it hands to SGLang, what it refuses before SGLang starts, and that it becomes the server."""

import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowlib.cli import app
from tests.sglang.engine import HERE, SERVE_FLAGS, run

QUEST = "gqa_quest_sparse_attention"
RUNNING_MEAN = str(HERE / "flows" / "running_mean.py")


@pytest.fixture(autouse=True)
def all_plugins(monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def dry(*words, status=0):
    done = CliRunner().invoke(app, ["serve", *words, "--dry-run"])
    assert done.exit_code == status, done.output
    return done


def command(*words):
    """What would run, as words; ``--flow-config`` as an object at the end."""
    line = dry(*words).stdout.splitlines()[-1]
    assert line.startswith("runs    sglang serve ")
    found = shlex.split(line.removeprefix("runs    "))
    if "--flow-config" in found:
        found[-1] = json.loads(found[-1])
    return found


def test_everything_else_goes_to_sglang_in_its_order():
    words = ["MODEL", "--tp", "2", "--port=30000", "--enable-metrics", "--mem-fraction-static", "0.8"]
    assert command(QUEST, *words) == ["sglang", "serve", *words, "--flow", QUEST]
    found = command(QUEST, *words[:3], "--top-k", "64", *words[3:], "--dense-layers", "0,1", "--dense-below", "4096")
    config = {"top_k": 64, "dense_below": 4096, "dense_layers": [0, 1]}
    assert found == ["sglang", "serve", *words, "--flow", QUEST, "--flow-config", config]


def test_options_of_its_own_and_the_json_object_say_the_same():
    eight = ["--summary-dtype", "fp8_e4m3", "--summary-scale", "2", "--bos", "2", "--eos", "3", "--top-k-ratio", "0.1"]
    text = json.dumps({"summary_dtype": "fp8_e4m3", "summary_scale": 2, "bos": 2, "eos": 3, "top_k_ratio": 0.1})
    assert command(QUEST, "M", *eight) == command(QUEST, "M", "--flow-config", text)
    one = command("twilight", "M", "--option", "p=0.8", "--top-k", "5")
    assert one == command("twilight", "M", "--flow-config", '{"options": {"p": 0.8}}', "--top-k", "5")
    assert one[-1] == {"top_k": 5, "options": {"p": 0.8}}
    mine = command("running_mean", "M", "--flow-file", RUNNING_MEAN)
    assert mine[-1] == {"module_path": RUNNING_MEAN}


def test_it_says_what_it_will_run():
    text = dry("twilight", "M", "--top-k", "5").stdout
    assert "flow    twilight (options p=0.95, max_k=None, logits=quest)" in text
    assert "budget  top_k 5, top_k_ratio 0, bos 1, eos 1, dense_below auto; --page-size 16, the flow's default" in text
    assert "--page-size 32\n" in dry("twilight", "M", "--page-size", "32").stdout


WRONG = [
    (("gqa_quest_sparse_atention", "M"), f"unknown flow 'gqa_quest_sparse_atention'. Did you mean '{QUEST}'?"),
    (("--model-path", "M"), "the first argument is '--model-path', expected the name of a flow"),
    ((QUEST, "M", "--flow", "twilight"), "--flow is given beside the flow's name"),
    ((QUEST, "M", "--flow=twilight"), "--flow is given beside the flow's name"),
    ((QUEST, "M", "--top-k", "-1"), "top_k is -1, expected an integer of at least 0"),
    ((QUEST, "M", "--eos", "0"), "eos is 0, expected an integer of at least 1"),
    ((QUEST, "M", "--dense-layers", "a,b"), "--dense-layers is 'a,b', expected layer ids such as 0,1"),
    ((QUEST, "M", "--option", "p=1"), f"flow '{QUEST}' has no option 'p'"),
    (("twilight", "M", "--option", "p=2"), "p is 2"),
    ((QUEST, "M", "--flow-config", '{"budget": 1}'), "unknown key 'budget'"),
    ((QUEST, "M", "--flow-config", '{"top_k": 1}', "--top-k", "2"), "top_k is given in --flow-config and by an option"),
    (("mine", "M", "--flow-file", "no_such_file.py"), "no_such_file.py"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_mistake_is_one_line_and_nothing_starts(words, message, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started"))
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sglang_that_would_not_serve_the_flow_is_refused(monkeypatch):
    def absent(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("flowlib.sglang.versions.version", absent)
    assert "SGLang is not installed beside flowlib: pip install" in dry(QUEST, "M", status=2).stderr
    monkeypatch.setattr("flowlib.sglang.versions.version", lambda _: "0.4.0")
    assert "knows SGLang 0.5.16 and 0.5.23, found 0.4.0" in dry(QUEST, "M", status=2).stderr
    monkeypatch.undo()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "SGLANG_PLUGINS is 'other', which leaves flowlib out" in dry(QUEST, "M", status=2).stderr


def test_it_becomes_the_server(tiny_model):
    """The process that was started ends with the reason the plugin gives inside SGLang."""
    flowlib = str(Path(sys.executable).with_name("flowlib"))
    words = ["--model-type", "llm", *SERVE_FLAGS, "--model-path", str(tiny_model), "--enable-mixed-chunk"]
    ended = run([flowlib, "serve", QUEST, *words, "--top-k", "3"], timeout=90)
    assert ended.code not in (0, None)
    assert "budget  top_k 3, " in ended.text
    assert f"flowlib: can't serve --flow {QUEST}: --enable-mixed-chunk can't be used" in ended.text
