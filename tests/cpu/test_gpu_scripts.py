"""Scripts that are for a GPU: small cases interpreted, and what they say where there is none."""

import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import flowlib

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def run(monkeypatch):
    """Runs a script's command line, by its module's name."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))

    def run(script: str, *arguments: str):
        app = typer.Typer()
        app.command()(__import__(script).main)
        return CliRunner().invoke(app, list(arguments))

    yield run
    for name in [n for n, m in sys.modules.items() if str(EXPERIMENTS) in str(getattr(m, "__file__", ""))]:
        del sys.modules[name]


def test_small_cases_of_a_flow_are_right(run):
    done = run("small_cases", "--device", "cpu", "--flow", "block_sparse_attention")
    assert done.exit_code == 0, done.output
    assert "block_sparse_attention (float8 summaries): ok" in done.output
    for case in ("wide rows", "rows without a budget", "page table", "long entmax rows", "prefill in chunks"):
        assert f"{case}: ok" in done.output


def test_a_nan_is_no_small_error(run, monkeypatch):
    script = __import__("small_cases")
    stock = script.launch_conv1d

    def spoiled(x, y, *args: object, **kwargs: object) -> None:
        stock(x, y, *args, **kwargs)
        y[-1, -1, 7] = float("nan")

    monkeypatch.setattr(script, "launch_conv1d", spoiled)
    monkeypatch.setattr(script, "CASES", {"ops along the pages": script.along_pages})
    done = run("small_cases", "--device", "cpu", "--flow", "block_sparse_attention")
    assert done.exit_code == 1
    assert "ops along the pages: WRONG" in done.output


def test_every_hand_written_kernel_has_a_case(run, monkeypatch):
    """The flows are those whose steps have a kernel that no other one has."""
    from triton.runtime.interpreter import GridExecutor

    launched, stock = set(), GridExecutor.__call__

    def call(self, *args, **kwargs):
        launched.add(self.fn.__name__)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    flows = ("centered_block_sparse_attention", "entmax_gaussian_attention", "gqa_block_sparse_attention", "quest_mla")
    done = run("small_cases", "--device", "cpu", *(f"--flow={name}" for name in (*flows, "twilight_attention")))
    assert done.exit_code == 0, done.output
    kernels = {
        name
        for file in Path(flowlib.__file__).parent.joinpath("kernels").glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert len(kernels) > 20
    assert kernels - launched == set()


def test_a_wrong_kernel_is_seen(run, monkeypatch):
    select = __import__("flowlib.kernels.select", fromlist=["launch_select"]).launch_select

    def wrong(*args: object, **kwargs: object) -> None:
        select(*args, **{**kwargs, "top_k": 1})

    monkeypatch.setattr("flowlib.kernels.select.launch_select", wrong)
    script = __import__("small_cases")
    monkeypatch.setattr(script, "CASES", {"wide rows": script.CASES["wide rows"]})
    done = run("small_cases", "--device", "cpu", "--flow", "block_sparse_attention")
    assert done.exit_code == 1
    assert "WRONG" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_crossover_needs_a_gpu(run):
    done = run("crossover", "--batch", "1")
    assert done.exit_code == 2
    assert "no CUDA GPU is at hand" in done.output
