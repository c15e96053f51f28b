"""The H2O experiments as scripts and as functions: tables, verdicts, exit status."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowlib
from flowlib.ops import Add, Fill

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
alone = importlib.import_module("h2o_alone")
checks = importlib.import_module("h2o_execute_checks")
smoke = importlib.import_module("h2o_profile_smoke")

IMPLS = ["reference", "triton"]


def script(name, *arguments):
    """The finished process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, str(EXPERIMENTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def lines(done, word):
    """Verdict lines that begin with a word."""
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(
    ("arguments", "status", "passed"),
    [
        ([], 0, ["accumulation", "selection", "page reuse"]),
        (["--decay", "1.0"], 1, ["selection", "page reuse"]),
        (["--decay", "1.0", "--state-dtype", "float32"], 0, ["accumulation", "selection", "page reuse"]),
    ],
)
def test_the_oracle_ends_with_its_verdict(arguments, status, passed):
    done = script("verify_h2o_oracle.py", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    assert [line.removeprefix("PASS ").partition(":")[0] for line in lines(done, "PASS")] == passed
    assert len(lines(done, "PASS") + lines(done, "FAIL")) == 3
    for step in (1, 151, 301, 600):
        assert f"│ {step:>4} │" in done.stdout
    if status:
        assert "of the mass was lost to rounding of the bfloat16 state" in lines(done, "FAIL")[0]


def test_the_oracle_refuses_a_run_that_judges_nothing():
    done = script("verify_h2o_oracle.py", "--top-k", "200")
    assert done.returncode == 2
    assert "error: seq_len 128" in done.stderr
    assert not lines(done, "PASS")


@pytest.mark.parametrize("name", ["h2o_profile_smoke.py", "h2o_execute_checks.py", "verify_h2o_oracle.py"])
def test_a_script_says_that_kernels_are_interpreted(name):
    few = {"h2o_execute_checks.py": ["--steps", "12"], "verify_h2o_oracle.py": ["--steps", "3", "--kv-heads", "1"]}
    done = script(name, "--impl", "triton", *few.get(name, []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRITON_INTERPRET=1 is set" in done.stdout
    assert lines(done, "PASS")
    assert not lines(done, "FAIL")


def test_the_execute_checks_judge_the_decay():
    done = script("h2o_execute_checks.py", "--decay", "1.0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines(done, "PASS Fill")
    assert lines(done, "FAIL Add + Save")


# -- profiles


@pytest.mark.parametrize("group", smoke.GROUPS)
@pytest.mark.parametrize("flow", smoke.PAGE_LEVEL + smoke.TOKEN_LEVEL)
def test_profile_smoke(flow, group):
    found = smoke.smoke(flow, group, "cpu", "triton")
    assert found.failures == []
    assert found.buffers > 0
    assert found.indexer[-1] == "topK"
    assert set(found.cache) == ({"CFill"} if flow in smoke.TOKEN_LEVEL else {"CMean", "CMax", "CMin"})


@pytest.mark.parametrize("flow", smoke.TOKEN_LEVEL)
def test_token_flows_resolve_their_options_and_refuse_pages(flow):
    assert [name for name, *_, ok in smoke.wiring(flow) if not ok] == []
    assert smoke.refusal(flow).startswith(f"{flow}: page_size is 16, expected 1")


@pytest.mark.parametrize("flow", smoke.PAGE_LEVEL)
def test_page_flows_keep_their_weights_and_take_pages(flow):
    assert [name for name, *_, ok in smoke.weights(flow) if not ok] == []
    assert smoke.refusal(flow) == "", "the check of the refusal can fail"


def test_the_smoke_test_sees_a_wrong_size(monkeypatch):
    monkeypatch.setattr(flowlib.Plan, "field_bytes_per_page", property(lambda plan: 6))
    found = smoke.smoke(smoke.TOKEN_LEVEL[1], 4, "cpu", "reference")
    assert [text for text in found.failures if "profiled as" in text]


# -- ops alone


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("impl", IMPLS)
def test_fill_zeroes_exactly_the_written_pages(impl, page_size):
    found = alone.fill(page_size, "cpu", impl, kv_heads=3)
    assert found.zeroed == [3, 5, 11, 40]
    assert found.others_kept


def test_a_fill_that_misses_a_page_is_seen(monkeypatch):
    class Missing(Fill):
        def __call__(self, out, *, loc, ctx):
            return super().__call__(out, loc=loc[:-1], ctx=ctx)

    monkeypatch.setattr(alone, "Fill", Missing)
    assert not alone.fill(1, "cpu", "reference").ok


@pytest.mark.parametrize(("impl", "steps"), [("reference", 800), ("triton", 800)])
def test_add_and_save_follow_the_recurrence(impl, steps):
    judged, plain = (alone.accumulate(d, "cpu", impl, steps=steps) for d in (0.984375, 1.0))
    assert checks.check_accumulation(judged, plain, 128, steps)
    assert judged.largest == pytest.approx(judged.exact_largest, rel=0.05)
    assert plain.error > 0.15, "in bfloat16 the plain sum is lost to rounding"
    assert plain.others_kept
    assert not checks.check_accumulation(plain, plain, 128, steps)


def test_add_and_save_are_exact_in_float32():
    found = alone.accumulate(1.0, "cpu", "reference", tokens=37, steps=200, dtype=torch.float32)
    assert found.error < 200 * torch.finfo(torch.float32).eps
    assert found.ratio == 1.0


def test_a_wrong_add_is_seen(monkeypatch):
    monkeypatch.setattr(alone, "Add", lambda alpha, beta: Add(alpha=beta, beta=alpha))
    found = alone.accumulate(0.5, "cpu", "reference", steps=100)
    assert not checks.check_accumulation(found, found, 128, 100)
