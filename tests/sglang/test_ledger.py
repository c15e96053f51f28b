"""The ledger against the installed SGLang, and what happens when a hook does not take."""

import json
import sys

import pytest

from tests.sglang.engine import run

CONTRACT = """
import json
from flowlib.sglang import ledger
from flowlib.sglang.symbols import TOUCHED

broken = [
    ledger.Touch("sglang.srt.server_args.NoSuchName", "", "read", ""),
    ledger.Touch(TOUCHED[2].target, "", "around", "", takes=("no_such_parameter",)),
    ledger.Touch(TOUCHED[0].target, "", "read", "", reads=("no_such_field",)),
]
before = [touch.target for touch in ledger.hooks() if ledger.has_taken(touch)]
problems = [p for p in map(ledger.contract_problem, TOUCHED) if p]
seeded = [ledger.contract_problem(touch) for touch in broken]
from sglang.srt.plugins import load_plugins

load_plugins()
ledger.check_version()
ledger.check_hooks()
print("ANSWER", json.dumps({"count": len(TOUCHED), "problems": problems, "seeded": seeded, "before": before}))
"""


@pytest.fixture(scope="module")
def contract():
    ended = run([sys.executable, "-c", CONTRACT], timeout=120)
    assert ended.code == 0, ended.text[-4000:]
    return json.loads(ended.text.split("ANSWER ", 1)[1].splitlines()[0])


def test_installed_sglang_keeps_every_entry(contract):
    assert contract["problems"] == []
    assert contract["count"] >= 30


def test_an_entry_that_is_not_kept_is_found(contract):
    missing, parameter, field = contract["seeded"]
    assert "NoSuchName: not found" in missing
    assert "takes no no_such_parameter" in parameter
    assert "has no no_such_field" in field


def test_hooks_are_seen_only_once_they_took(contract):
    assert contract["before"] == []


def test_every_entry_says_why_and_until_when():
    from flowlib.sglang.symbols import TOUCHED

    kinds = {"replace", "around", "after", "extend", "call", "read"}
    for touch in TOUCHED:
        assert touch.target.startswith("sglang.srt.")
        assert touch.how in kinds
        assert bool(touch.hook) == (touch.how in {"replace", "around", "after"})
        assert touch.why
        assert touch.until
    targets = [touch.target for touch in TOUCHED]
    assert len(set(targets)) == len(targets)
