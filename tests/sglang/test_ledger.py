"""The ledger against each SGLang, and what happens when a hook does not take."""

import json
import sys
from importlib import import_module

import pytest

from flowlib.sglang.symbols import TOUCHED
from flowlib.sglang.versions import ADAPTERS
from tests.sglang.engine import run
from tests.sglang.versions import VERSIONS

CONTRACT = """
import json
from importlib.metadata import version
from flowlib.sglang import ledger

TOUCHED = ledger.touched()
POOL = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool"
broken = [
    ledger.Touch("sglang.srt.server_args.NoSuchName", "", "read", ""),
    ledger.Touch(POOL, "", "around", "", takes=("no_such_parameter",)),
    ledger.Touch("sglang.srt.server_args.ServerArgs", "", "read", "", reads=("no_such_field",)),
]
before = [touch.target for touch in ledger.hooks() if ledger.has_taken(touch)]
problems = [p for p in map(ledger.contract_problem, TOUCHED) if p]
seeded = [ledger.contract_problem(touch) for touch in broken]
from sglang.srt.plugins import load_plugins

load_plugins()
ledger.check_hooks()
answer = {"count": len(TOUCHED), "problems": problems, "seeded": seeded, "before": before}
print("ANSWER", json.dumps(answer | {"version": version("sglang")}))
"""


@pytest.fixture(scope="module")
def contract(sglang):
    ended = run([sys.executable, "-c", CONTRACT], timeout=120, env=sglang.environment())
    assert ended.code == 0, ended.text[-4000:]
    return json.loads(ended.text.split("ANSWER ", 1)[1].splitlines()[0])


def test_every_known_version_is_tested():
    assert [sglang.version for sglang in VERSIONS] == list(ADAPTERS)


def test_sglang_keeps_every_entry(contract, sglang):
    assert contract["version"] == sglang.version
    assert contract["problems"] == []
    assert contract["count"] >= 30


def test_an_entry_that_is_not_kept_is_found(contract):
    missing, parameter, field = contract["seeded"]
    assert "NoSuchName: not found" in missing
    assert "takes no no_such_parameter" in parameter
    assert "has no no_such_field" in field


def test_hooks_are_seen_only_once_they_took(contract):
    assert contract["before"] == []


@pytest.mark.parametrize("adapter", ADAPTERS.values())
def test_every_entry_says_why_and_until_when(adapter):
    touched = TOUCHED + import_module(adapter).TOUCHED
    kinds = {"replace", "around", "after", "lend", "extend", "call", "read"}
    for touch in touched:
        assert touch.target.startswith("sglang.srt.")
        assert touch.how in kinds
        assert bool(touch.hook) == (touch.how in {"replace", "around", "after"})
        assert touch.why
        assert touch.until
    targets = [touch.target for touch in touched]
    assert len(set(targets)) == len(targets)
