"""`experiments/bench_entmax.py`: its gate, what is measured with a stand-in clock, table and files; no GPU is timed."""

import dataclasses
import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_entmax
import bench_entmax_measure
import bench_entmax_report
import bench_entmax_scene
from bench_entmax_measure import Row, Sample, Timing
from bench_entmax_scene import Options, Scene, Work
from bench_gate import Verdict
from bench_shapes import BenchError
from bench_timing import Bandwidth

SMALL = {"kv_heads": 1, "query_heads": 2, "head_dim": 16}
TOPK = Options("topk", **SMALL)
GAUSSIAN = Options("gaussian", tau_mode="exact", certify=True, stats_dtype=torch.bfloat16, **SMALL)


def run(folder, options, *works, fixed=0, measured=False, timing=None, **how):
    """Exit status, what was printed, and what was saved."""
    console = Console(width=300, record=True, markup=False, file=io.StringIO())
    given = bench_entmax.How(timing or Timing(0, 1), folder, device="cpu", gate_only=not measured, **how)
    bench = bench_entmax.Bench(bench_entmax.Settings(options, works, fixed, given), console)
    if measured:
        bench.cuda, bench.l2 = True, 4096
    code = bench.run()
    saved = json.loads((folder / f"bench_entmax_{options.method}.json").read_text())
    return code, console.export_text(), saved


@pytest.mark.parametrize("options", [TOPK, GAUSSIAN], ids=lambda o: o.method)
def test_a_green_gate_on_a_cpu_prints_no_speed(options, tmp_path):
    code, text, saved = run(tmp_path, options, Work(1, 90))
    assert code == 0, text
    assert "The gate is green." in text
    assert "no speed is measured on a CPU" in text
    assert saved["rows"] == []
    stages = {v["stage"] for v in saved["gate"]["verdicts"]}
    assert stages == {"statistics", "selection", "attention", "full entmax", "certificate"}
    assert {v["row"] for v in saved["gate"]["verdicts"]} == {"row 0, head 0", "row 0, head 1"}


def _told(change):
    """A step whose info is changed after it."""
    sparse = Scene.sparse

    def changed(self, cache, info=None):
        out = sparse(self, cache, info)
        if info is not None:
            info[-1] = change(info[-1])
        return out

    return {"sparse": changed}


def _scaled(name, factor):
    step = getattr(Scene, name)
    return {name: lambda self, cache, info=None: step(self, cache, info).mul_(factor)}


def _other_page(info):
    pages = info.selection.pages.clone()
    pages[:, :, 0] = torch.where(pages[:, :, 0] > 0, pages[:, :, 0] - 1, 1 - (pages[:, :, 1] == 1).int())
    return info._replace(selection=info.selection._replace(pages=pages))


CORRUPTIONS = {
    "attention": lambda: _scaled("sparse", 1.05),
    "full entmax": lambda: _scaled("full", 1.05),
    "selection": lambda: _told(_other_page),
    "certificate": lambda: _told(lambda info: info._replace(certified=torch.ones_like(info.certified))),
}


@pytest.mark.parametrize("stage", CORRUPTIONS)
def test_a_red_gate_prints_no_speed_and_exits_1(stage, tmp_path, monkeypatch):
    for name, value in CORRUPTIONS[stage]().items():
        monkeypatch.setattr(Scene, name, value)
    _expect_red(tmp_path, stage)


def test_a_wrong_statistic_is_red(tmp_path, monkeypatch):
    add = Scene.add_cache

    def corrupted(self):
        cache = add(self)
        cache.page_stats.k_max[1] += 0.01
        return cache

    monkeypatch.setattr(Scene, "add_cache", corrupted)
    _expect_red(tmp_path, "statistics")


def test_a_kernel_that_raises_is_red(tmp_path, monkeypatch):
    def broken(self, cache, info=None):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(Scene, "sparse", broken)
    assert "out of shared memory" in _expect_red(tmp_path, "run")


def _expect_red(folder, stage):
    code, text, saved = run(folder, TOPK, Work(1, 90), Work(1, 80))
    assert code == 1
    assert "The gate is red: no speed is printed." in text
    assert "microseconds" not in text
    assert not saved["gate"]["green"]
    assert "rows" not in saved
    assert stage in {v["stage"] for v in saved["gate"]["verdicts"] if not v["ok"]}
    assert {v["shape"] for v in saved["gate"]["verdicts"]} == {"1 x 90"}, "nothing is run behind a red gate"
    return text


# -- what is measured, with stand-ins for the GPU's clock


class _Event:
    """Every replay takes three milliseconds."""

    count = 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        type(self).count += 3
        self.at = type(self).count

    def elapsed_time(self, other):
        return float(other.at - self.at)


@pytest.fixture
def stand_in_clock(monkeypatch):
    """Captures run the last of their calls; a megabyte is free."""

    def capture(calls, pool):
        calls[-1]()
        return types.SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(bench_entmax_measure, "capture", capture)
    monkeypatch.setattr(bench_entmax_measure, "_UNITS", 2)
    monkeypatch.setattr(bench_entmax, "_BANDWIDTH_VALUES", 8)
    monkeypatch.setattr(bench_entmax, "measure_bandwidth", lambda memory, seconds: Bandwidth(4e12, 3e12))
    for name, value in {
        "graph_pool_handle": lambda: None, "mem_get_info": lambda: (1 << 20, 1 << 30), "empty_cache": lambda: None,
        "synchronize": lambda: None, "Event": _Event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def test_measured_rows(stand_in_clock, tmp_path):
    code, text, saved = run(tmp_path, GAUSSIAN, Work(1, 40), fixed=40, measured=True, timing=Timing(1, 3))
    assert code == 0, text
    (row,) = saved["rows"]
    assert set(row["stages"]) == {"statistics", "threshold", "bounds", "selection", "attention"}
    assert row["pools"] == 2
    assert row["step"] == {"median": 1500.0, "least": 1500.0, "p90": 1500.0, "count": 3}
    assert saved["fixed_us"] == 1500.0
    assert row["floor_us"] == pytest.approx(1e6 * row["bytes"] / 4e12)
    assert (row["over_full"], row["over_softmax"], row["over_own_softmax"]) == (1.0, None, 1.0)
    assert 1 <= row["selected"][0] <= row["selected"][1] <= row["selected"][2] == 3
    assert "Fixed cost of a step (1 x 40): 1500.00 us, goal below 35: no." in text
    assert "FlashInfer is not measured: not installed" in text
    assert (tmp_path / "bench_entmax_gaussian.png").exists()


def test_a_spent_time_budget(stand_in_clock, tmp_path):
    code, text, saved = run(tmp_path, TOPK, Work(1, 40), measured=True, time_budget=0.0)
    assert (code, saved["rows"]) == (1, []), "without a single number the run is no success"
    assert "1 x 40: skipped, the time budget of 0 s is spent" in text


def test_what_does_not_fit_is_no_failure(stand_in_clock, tmp_path, monkeypatch):
    """The smaller batch is gated and measured; the run says what it left out."""
    add = Scene.add_cache

    def full(self):
        if self.work.batch > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return add(self)

    monkeypatch.setattr(Scene, "add_cache", full)
    code, text, saved = run(tmp_path, TOPK, Work(2, 40), Work(1, 40), measured=True)
    assert (code, [row["batch"] for row in saved["rows"]]) == (0, [1]), text
    assert "2 x 40 does not fit the GPU's memory" in text


def test_bytes_by_hand(monkeypatch):
    scene = Scene(TOPK, Work(1, 88), "cpu")
    cache = scene.add_cache()
    scene.sparse(cache)
    plan, _, _ = scene.compiled(cache)
    moved = bench_entmax_measure.moved_bytes(scene, plan, [[2, 3]], 5.0)
    scored = 5 * (2 * 16 * 2 + 2 * 4 + 4)  # bounds of fp16, a score of each query head, a page number
    selection = 5 * 2 * 4 + 5 * 4
    attention = (2 * 16 - 8 + 3 * 16 - 8) * 32 + 2 * 5 * 32 + 2 * (2 * 32 + 4) + 5 * 4
    assert moved == scored + selection + attention


# -- table, files, command line


def row(**changes):
    given = {
        "method": "gaussian", "batch": 1, "tokens": 1 << 20, "standard": True, "step": Sample(100.0, 98.0, 103.0, 50),
        "full": Sample(450.0, 449.0, 452.0, 50), "stages": {"statistics": Sample(40.0, 39.0, 41.0, 50)},
        "softmax": {"FlashInfer": Sample(470.0, 469.0, 471.0, 50)}, "selected": (5000.0, 5400, 65536),
        "certified": 0.25, "bytes": 400e6, "dense_bytes": 1 << 31, "read_bandwidth": 4.0e12, "pools": 3, "reuse": 16.0,
    }  # fmt: skip
    return Row(**{**given, **changes})


def test_a_row_by_its_cells():
    assert bench_entmax_report.cells(row()) == [
        "1 x 1,048,576", "40.00", "-", "-", "-", "-", "100.00", "98.00", "103.00", "450.00", "470.00", "-", "4.70x",
        "4.50x", "3.5x softmax yes, 5x full no", "5000 (8 %)", "5400", "65536", "25 %", "400.0", "100.00", "1.00", "3",
    ]  # fmt: skip
    assert bench_entmax_report.cells(row(reuse=2.5))[-1] == "3 (2.5x L2)"


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({"tokens": 1 << 18}, "1x softmax yes"),
        ({"tokens": 1 << 17}, ""),
        ({"batch": 16, "tokens": 1 << 15, "step": Sample(500.0, 500, 500, 9)}, "1x softmax no"),
        ({"batch": 8}, ""),
        ({"standard": False}, ""),
        ({"softmax": {}}, ""),
        ({"method": "topk"}, ""),
    ],
)
def test_goals(changes, goal):
    assert bench_entmax_report.goals(row(**changes)) == goal


def test_saved_json_is_json(tmp_path):
    green = Verdict("gaussian", "1 x 90", "attention", "row 0, head 0", 1e-6, 1e-4, True)
    result = bench_entmax_report.Result(
        {}, {}, 90, {"read": 4e12, "copy": 3e12}, [row(tokens=90)], verdicts=[green]
    )
    assert bench_entmax_report.save(result, tmp_path, "gaussian")[1].exists()
    saved = json.loads((tmp_path / "bench_entmax_gaussian.json").read_text())
    assert saved["rows"][0]["floor_ratio"] == 1.0
    assert saved["fixed_us"] == 100.0
    result.verdicts.append(dataclasses.replace(green, ok=False, error=float("inf")))
    bench_entmax_report.save(result, tmp_path, "gaussian")
    saved = json.loads((tmp_path / "bench_entmax_gaussian.json").read_text())
    assert saved["gate"]["verdicts"][1]["error"] == "inf"
    assert "rows" not in saved
    assert not (tmp_path / "bench_entmax_gaussian.png").exists()


def test_summary_of_times():
    assert bench_entmax_measure.summary([5.0, 1.0, 2.0, 4.0, 3.0]) == Sample(3.0, 1.0, 4.0, 5)


def _command(*arguments):
    return CliRunner().invoke(bench_entmax.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_every_option_of_the_public_benchmark():
    common = ("kv-len", "batch", "kv-heads", "heads", "head-dim", "page-size", "dtype", "alpha", "warmup", "iters")
    gaussian = ("tau-mode", "niter", "safety-margin-z", "max-quantile", "excess")
    for command, own in (("topk", ("coverage",)), ("gaussian", gaussian)):
        done = _command(command, "--help")
        assert done.exit_code == 0
        for option in (*common, *own):
            assert f"--{option}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gaussian", "--stats-dtype", "int8"), "--stats-dtype int8: expected one of float16, bfloat16, float32"),
        (("topk", "--device", "cpu"), "a CPU is not timed: --device cpu needs --gate-only"),
        (("topk", "--device", "cpu", "--kv-len", "32q"), "a CPU is not timed"),
        (("topk", "--device", "cpu", "--gate-only", "--kv-len", "32q"), "--kv-len 32q: expected whole numbers"),
        (("topk", "--device", "cpu", "--gate-only", "--batch", "0"), "--batch 0: expected whole numbers"),
        (("topk", "--coverage", "0"), "--coverage 0.0: expected above 0, at most 1"),
        (("topk", "--dtype", "int8"), "--dtype int8: expected one of float16, bfloat16, float32"),
        (("gaussian", "--alpha", "1"), "--alpha 1.0: expected above 1, at most 2"),
        (("gaussian", "--heads", "3"), "--heads 3: expected a multiple of the 8 kv heads"),
        (
            ("gaussian", "--device", "cpu", "--gate-only", "--kv-len", "40", "--batch", "1", "--tau-mode", "newton"),
            "tau_mode is 'newton', expected one of 'exact', 'corrected', 'fixed'",
        ),
    ],
)
def test_what_can_not_be_run_is_refused(arguments, message, tmp_path):
    done = _command(*arguments, "--out", str(tmp_path))
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = _command("gaussian", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "no CUDA GPU is at hand" in done.stdout


def test_sizes():
    assert bench_entmax_scene.parse_sizes("--kv-len", "32k, 1m,7,32k") == (32768, 1 << 20, 7)
    assert Options("topk").topk_pages(32768) == 512
    with pytest.raises(BenchError, match=r"--kv-len 1\.5k: expected"):
        bench_entmax_scene.parse_sizes("--kv-len", "1.5k")
    assert bench_entmax_scene.works((1, 8), (64, 128), 64) == (Work(1, 64), Work(1, 128), Work(8, 64), Work(8, 128))
