"""The experiment that verifies latent prefill: as a command, and against a broken loop."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from tests.suites.mla_loop import cases, checks, mutations

ROOT = Path(__file__).resolve().parents[2]
verify = importlib.import_module("verify_mla_chunked")
Device, Impl = verify.Device, verify.Impl


def script(*arguments):
    """The finished process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "experiments" / "verify_mla_chunked.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def status(**options):
    with pytest.raises(typer.Exit) as done:
        verify.main(**options)
    return done.value.exit_code


def few(*names):
    return [case for case in cases.LOOP_CASES if case.name in names]


def test_the_command_is_green(monkeypatch, capsys):
    monkeypatch.setattr(checks, "loop_cases", lambda impl, *_: few("single") if impl == "triton" else few("edges"))
    assert status() == 0
    said = capsys.readouterr().out
    passed = [line for line in said.splitlines() if line.startswith("PASS")]
    assert len(passed) == 10
    assert "10 of 10 tables are right" in said
    assert "WRONG" not in said
    assert "1.1241 (1.12)" in said, "known bugs and what they did elsewhere"


def test_the_command_is_red_when_the_loop_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(checks, "loop_cases", lambda *_: few("three"))
    with mutations.mutated("rope part zeroed"):
        assert status(device=Device.cpu, impl=[Impl.reference], mutations=False) == 1
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert "7 of 8 tables are right" in said


def test_the_script_refuses_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = script("--device", "cuda")
    assert done.returncode == 2
    assert "torch finds no GPU here" in done.stderr


def test_its_tables_are_red_when_the_loop_is_wrong(monkeypatch):
    monkeypatch.setattr(checks, "loop_cases", lambda *_: few("three", "no-ctx"))
    assert all(row.ok for row in checks.check_loop("reference", "cpu", False))
    for bug in mutations.ORDER_FREE:
        with mutations.mutated(bug):
            assert not all(row.ok for row in checks.check_loop("reference", "cpu", False)), bug


def test_its_tables_are_red_when_schedules_are_wrong(monkeypatch):
    stock = checks.mla.build_chunked_context
    monkeypatch.setattr(checks.mla, "workspace_rows", lambda *_: 65536)
    assert not checks.check_workspace().ok
    monkeypatch.setattr(
        checks.mla, "build_chunked_context", lambda c, q, w, p, s="packed": stock(c, q, w - p if w > 2 * p else w, p, s)
    )
    assert not checks.check_even().ok
    assert not checks.check_packed().ok
    assert not checks.Section("nothing", (), ()).ok


def test_distances_see_nan_and_infinities():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, inf, -inf])
    assert checks.distance(x, x) == 0.0
    for wrong in ([1.0, inf, inf], [nan, inf, -inf], [1.0, 2.0, -inf]):
        assert checks.distance(torch.tensor(wrong), x) == inf
    made = cases.problem(cases.SMALL_CASES[0])
    assert made.error(torch.full_like(made.truth, nan)) == inf


def test_the_data_are_those_of_the_generator():
    state, wanted = 4242, []
    for _ in range(5):
        state = (state * 1664525 + 1013904223) % 2**32
        wanted.append((state >> 8) / 2**24 * 2 - 1)
    assert cases.lcg(4242, 5).tolist() == wanted
    assert torch.equal(cases.lcg(7, 1000)[:300], cases.lcg(7, 300))
    made = cases.problem(cases.LOOP_CASES[0])
    table = made.block_table
    width = table.shape[1]
    assert table[0, :2].tolist() == [width - 1, width - 2]
    assert width == -(-40 // 16) + 1
    assert int((~made.cache.isnan()).all(-1).sum()) == 32, "context rows alone are in the cache"
