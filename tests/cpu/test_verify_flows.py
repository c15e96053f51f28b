"""The experiment that decodes with every flow: right flows pass, wrong ones fail, and it says what sparsity cost."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

import flowlib
from flowlib.errors import OptionError
from flowlib.testing import Oracle, oracle_of
from tests.processes import ROOT
from tests.refusals import refused
from tests.suites.same import IMPLEMENTATIONS

EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
experiment = importlib.import_module("verify_flows")

SIZES = {"head_dim": 16, "group_size": 3, "num_kv_heads": 2, "top_k": 2, "kv_dtype": torch.bfloat16}
SETUP = experiment.Setup(SIZES, pages=8, steps=3)
FLOW = """
from flowlib import register, vFlow
from flowlib.ops import CMax, GeMV, topK

@register("{name}")
class Peak(vFlow):
    def create_cache(self, page_size, head_dim):
        return {{"high": (1, head_dim)}}

    def forward_cache(self, cache, loc, ctx):
        CMax(dim=1)(cache["k"], cache["high"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        topK()(GeMV()(q.mean(1, True), cache["high"], ctx=ctx), o, ctx=ctx)
"""


def script(*arguments: object) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, str(EXPERIMENTS / "verify_flows.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", flowlib.list_flows(mla=False))
def test_every_flow_is_right_while_requests_grow(name):
    steps = list(experiment.decode(name, SETUP))
    assert [s.impl for s in steps] == ["reference"] * 3 + ["triton"] * 3
    wrong = {(s.impl, s.number, stage): str(v) for s in steps for stage, v in s.verdicts.items() if not v.ok}
    assert not wrong
    assert steps[2].tokens == steps[0].tokens + 2
    for s in steps:
        assert 0 < s.attended < s.cached or (name == "entmax_gaussian_attention" and s.attended == s.cached)
        if "entmax" in name:  # which tells of no share, and of a threshold in place of a sum
            assert s.mass.isnan().all()
            assert {"selection", "o", "tau", "mass"} <= s.verdicts.keys()
            continue
        assert 0 < float(s.mass.min()) <= float(s.mass.mean()) <= 1
        assert s.distance > 0
        assert {"selection", "o", "lse"} <= s.verdicts.keys()


def test_a_budget_that_covers_all_keeps_all():
    setup = experiment.Setup({**SIZES, "top_k": 16}, pages=8, steps=1)
    for s in experiment.decode("quest", setup):
        assert s.attended == s.cached
        assert float(s.mass.min()) > 0.99
        assert s.distance < 0.01


class Opposite(Oracle):
    """Quest's fields and the opposite of its scores."""

    def __init__(self) -> None:
        self.right = oracle_of("quest")

    def fields(self, k, v, spec):
        return self.right.fields(k, v, spec)

    def scores(self, q, pages, spec):
        return -self.right.scores(q, pages, spec)


def test_a_wrong_flow_fails_in_its_stage():
    for s in experiment.decode("quest", SETUP, Opposite()):
        assert not s.ok
        assert not s.verdicts["scores"].ok
        assert not s.verdicts["selection"].ok
        assert s.verdicts["o"].ok


def test_a_setup_of_nothing_is_refused():
    with refused(OptionError, "steps is 0, pages 8, expected at least 1 each"):
        next(experiment.decode("quest", experiment.Setup(SIZES, pages=8, steps=0)))


def test_the_script_takes_a_users_file(tmp_path):
    path = tmp_path / "peak.py"
    path.write_text(FLOW.format(name="peak_of_somebody"))
    small = ["--pages", 6, "--steps", 2, "--head-dim", 16]
    done = script("--flow-file", path, *small)
    assert done.returncode == 0, done.stderr
    assert "peak_of_somebody (oracle: own reference)" in done.stdout
    assert "PASS peak_of_somebody: all stages" in done.stdout
    assert "1 of 1 flows are right" in done.stdout
    for impl in IMPLEMENTATIONS:
        assert done.stdout.count(f"│ {impl}") == 2
    assert script("--flow", "quets", *small).returncode == 2


def test_the_script_refuses_what_it_can_not_do():
    done = script("--device", "cuda", "--impl", "reference")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert (done.returncode, done.stderr.splitlines()[-1][:6]) == (2, "error:")
    assert script("--dtype", "int8").stderr == "error: --dtype is 'int8', expected one of bfloat16, float16, float32\n"
