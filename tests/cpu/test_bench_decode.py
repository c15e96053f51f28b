"""`experiments/bench_decode.py`: the gate, what is printed and saved, the command line; no GPU is timed."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_decode
import bench_gate
import bench_measure
import bench_peers
import bench_pools
import bench_report
import bench_shapes
from bench_bytes import Moved
from bench_shapes import FlowChoice, Numbers, Workload
from bench_timing import Bandwidth, Timed, whole_words

import flowlib

SCRIPT = Path(bench_decode.__file__)
SMALL = Numbers(group_size=2, num_kv_heads=2, head_dim=16, page_size=8, top_k=2)
QUEST, BLOCK = FlowChoice("gqa_quest_sparse_attention", {}), FlowChoice("block_sparse_attention", {})


def small(*lengths):
    return Workload(bench_shapes.canonical(lengths), lengths, SMALL, standard=False)


def settings(folder, *choices, works=None, **more):
    return bench_decode.Settings(tuple(works or (small(64, 64),)), choices or (QUEST,), folder, device="cpu", **more)


def run(chosen):
    """Exit status and what was printed."""
    console = Console(width=230, record=True, markup=False, file=io.StringIO())
    code = bench_decode.Bench(chosen, console).run()
    return code, console.export_text()


def test_over_the_layers_of_a_step_a_row_finishes_a_page_once_in_page_size():
    made = bench_pools.problem(small(64, 40, 64), "cpu")
    locs = bench_measure.step_locs(made, 32)
    assert locs.shape == (32, 3)
    assert ((locs + 1) % 8 == 0).sum(0).tolist() == [4, 4, 4]
    assert (locs // 8 == made.loc // 8).all()


# -- gate


def test_a_green_gate_on_a_cpu_prints_no_speed(tmp_path):
    code, text = run(settings(tmp_path, QUEST, BLOCK, works=[small(64, 64), small(5, 64, 43)]))
    assert code == 0
    assert "The gate is green." in text
    assert "no speed is measured on a CPU" in text
    saved = json.loads((tmp_path / "bench_decode.json").read_text())
    assert saved["gate"]["green"]
    assert saved["rows"] == []
    stages = {v["stage"] for v in saved["gate"]["verdicts"] if v["flow"] == QUEST.name}
    assert stages == {
        "plan", "field k_max", "field k_min", "scores", "selection", "attention o", "attention lse",
    }  # fmt: skip


def test_state_is_gated(tmp_path):
    numbers = dataclasses.replace(SMALL, page_size=1, top_k=4)
    work = Workload("2x24", (24, 24), numbers, standard=False)
    code, text = run(settings(tmp_path, FlowChoice("h2o_token_sparse_attention", {}), works=[work]))
    assert (code, "The gate is green." in text) == (0, True), text
    if FlowChoice("h2o_token_sparse_attention", {}).plan(work).state_fields:
        assert "state " in text


def _wrong_page(out):
    out.pages[:, :, 1] = torch.where(out.pages[:, :, 1] > 1, 1, 2)


CORRUPTIONS = {
    "attention o": lambda out, store: out.o[0, 0].mul_(1.05),
    "attention lse": lambda out, store: out.lse[0, 0].add_(1e-3),
    "scores": lambda out, store: out.raw_scores[0, 0, 1].mul_(1.01),
    "selection": lambda out, store: _wrong_page(out),
}


@pytest.mark.parametrize("stage", CORRUPTIONS)
def test_a_red_gate_prints_no_speed_and_exits_1(stage, tmp_path, monkeypatch):
    launch = flowlib.Plan.launch

    def corrupted(self, q, store, batch, out):
        launch(self, q, store, batch, out)
        CORRUPTIONS[stage](out, store)

    monkeypatch.setattr(flowlib.Plan, "launch", corrupted)
    _expect_red(tmp_path, stage)


def test_a_wrong_field_is_red(tmp_path, monkeypatch):
    update = flowlib.Plan.update

    def corrupted(self, store, loc, impl="reference"):
        update(self, store, loc, impl)
        store.fields["k_max"].mul_(1.02)

    monkeypatch.setattr(flowlib.Plan, "update", corrupted)
    _expect_red(tmp_path, "field k_max")


def test_wrong_planning_is_red(tmp_path, monkeypatch):
    plan_step = bench_pools.Problem.plan_step

    def corrupted(self):
        plan_step(self)
        self.batch.page_table[0, 0] = self.batch.page_table[0, 1]

    monkeypatch.setattr(bench_pools.Problem, "plan_step", corrupted)
    _expect_red(tmp_path, "plan")


def test_a_kernel_that_raises_is_red(tmp_path, monkeypatch):
    def broken(self, q, store, batch, out):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(flowlib.Plan, "launch", broken)
    text = _expect_red(tmp_path, "run")
    assert "out of shared memory" in text


def _expect_red(folder, stage):
    code, text = run(settings(folder, QUEST, BLOCK))
    assert code == 1
    assert "The gate is red: no speed is printed." in text
    assert "microseconds" not in text
    saved = json.loads((folder / "bench_decode.json").read_text())
    assert not saved["gate"]["green"]
    assert "rows" not in saved
    assert stage in {v["stage"] for v in saved["gate"]["verdicts"] if not v["ok"]}
    assert {v["flow"] for v in saved["gate"]["verdicts"]} == {QUEST.name}, "nothing is run behind a red gate"
    return text


# -- what is measured, with stand-ins for the GPU's clock


@pytest.fixture
def stand_in_clock(monkeypatch):
    """Captures run eagerly, replays take as many microseconds as the capture has calls; three GB are free."""

    def capture(calls, pool, first=None):
        for call in (*([first] if first else []), *calls):
            call()
        return len(calls)

    monkeypatch.setattr(bench_measure, "capture", capture)
    monkeypatch.setattr(bench_measure, "replay", lambda graphs, units, seconds: Timed(1.0 * units, units, units, 9))
    monkeypatch.setattr(bench_measure, "LAYERS", 2)
    monkeypatch.setattr(bench_measure, "_LAUNCHES", 1)
    monkeypatch.setattr(bench_decode, "LAYERS", 2)
    monkeypatch.setattr(bench_decode, "measure_bandwidth", lambda memory, seconds: Bandwidth(4e12, 3e12))
    monkeypatch.setattr(bench_decode, "MAX_POOLS", 2)
    monkeypatch.setattr(bench_pools, "MAX_POOLS", 2)
    for name, value in {
        "graph_pool_handle": lambda: None, "mem_get_info": lambda: (3 << 30, 4 << 30), "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0, "empty_cache": lambda: None, "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def measured(chosen):
    """A run whose device is a CPU that counts as a GPU."""
    console = Console(width=230, record=True, markup=False, file=io.StringIO())
    bench = bench_decode.Bench(chosen, console)
    bench.cuda, bench.l2 = True, 512
    code = bench.run()
    return code, console.export_text(), json.loads((chosen.out / "bench_decode.json").read_text())


def test_measured_rows_without_peers(stand_in_clock, tmp_path):
    code, text, saved = measured(settings(tmp_path, QUEST, FlowChoice("streaming_attention", {})))
    assert code == 0
    quest, streaming = saved["rows"]
    assert set(quest["stages"]) == {"update", "plan", "score", "select", "attend"}
    assert set(streaming["stages"]) == {"plan", "select", "attend"}
    assert quest["step"]["us"] == 2.0
    assert quest["floor_us"] == pytest.approx(1e6 * quest["bytes"] / 4e12)
    assert quest["speedup"] is None
    assert 0 < quest["attended"] < 1
    assert "FlashInfer is not measured: not installed" in text
    assert "FA3 is not measured: not installed" in text
    assert (tmp_path / "bench_decode.png").exists() or "matplotlib is not installed" in text


def test_stages_only_and_a_spent_time_budget(stand_in_clock, tmp_path, monkeypatch):
    clock = iter([0.0, *[10.0] * 2, *[60.0] * 5, *[101.0] * 100])
    monkeypatch.setattr(bench_decode.time, "monotonic", lambda: next(clock))
    works = [small(24), small(16, 16), small(8)]
    code, text, saved = measured(settings(tmp_path, works=works, stages_only=True, time_budget=100.0))
    assert "dense kernels are not measured (--stages-only)" in text
    assert [row["shape"] for row in saved["rows"]] == [works[0].label]
    assert f"{works[1].label}: skipped, half of the time budget" in text
    assert code == 0


def _dense(q, k, v, table, lengths, scale):
    """o of q ``[bs, H_q, D]`` over k, v ``[pages, page_size, H_kv, D]``."""
    rows = []
    for row, own, n in zip(q, table, lengths, strict=True):
        pages = own[: -(-int(n) // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[: int(n)].float() for x in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        weights = (torch.einsum("hd,thd->ht", row.float(), keys) * scale).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(rows).to(q.dtype)


class _Wrapper:
    """Takes the arguments that FlashInfer's decode wrapper takes."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        assert kv_layout == "NHD"

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type,
        kv_data_type, sm_scale,
    ):  # fmt: skip
        counts = indptr.diff().tolist()
        self.lengths = [(n - 1) * page_size + last for n, last in zip(counts, last_page_len.tolist(), strict=True)]
        self.table, self.scale = indices.split(counts), sm_scale

    def run(self, q, kv, *, out):
        out.copy_(_dense(q, *kv, self.table, self.lengths, self.scale))


@pytest.fixture
def peers(monkeypatch):
    """Stand-ins of both libraries, with the signatures that are called."""
    compiled = types.SimpleNamespace(is_compiled=True)
    attention = types.SimpleNamespace(
        gen_batch_prefill_module=lambda *a: compiled, gen_batch_decode_module=lambda *a: compiled
    )

    def attend(
        *, q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
        window_size, softcap, num_splits, out, scheduler_metadata,
    ):  # fmt: skip
        out.copy_(_dense(q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale))
        if scheduler_metadata is not None:
            out.mul_(scheduler_metadata)
        return out

    def schedule(**_):
        return torch.tensor(1.5)

    library = types.SimpleNamespace(flash_attn_with_kvcache=attend, get_scheduler_metadata=schedule)
    modules = {
        "flashinfer": types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=_Wrapper),
        "flashinfer.jit.attention": attention,
        "sgl_kernel.flash_attn": library,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(bench_peers, "_WORKSPACE_BYTES", 16)
    return types.SimpleNamespace(compiled=compiled)


def test_peers_are_held_against_the_truth_and_the_faster_one_counts(stand_in_clock, peers, tmp_path):
    code, text, saved = measured(settings(tmp_path, works=[small(21, 64)]))
    row = saved["rows"][0]
    assert code == 0
    assert set(row["dense"]) == {"FlashInfer", "FA3 unscheduled"}
    assert f"FA3 is not measured at {row['shape']}: wrong: relative error 0.5" in text
    assert row["speedup"] == pytest.approx(1.0)
    assert saved["machine"]["peers"] == {"FlashInfer": "unknown version", "FA3": "unknown version"}


def test_flashinfer_is_not_left_to_compile_unasked(stand_in_clock, peers, tmp_path):
    peers.compiled.is_compiled = False
    numbers = dataclasses.replace(SMALL, group_size=4)
    work = Workload("1x64", (64,), numbers, standard=False)
    _, text, saved = measured(settings(tmp_path, works=[work]))
    assert "FlashInfer is not measured at 1 x 64" in text
    assert "--compile-peers" in text
    assert "FlashInfer" not in saved["rows"][0]["dense"]


# -- table and files


DENSE_US = {"FlashInfer": 487.0, "FA3": 490.0, "FA3 unscheduled": 483.0}


def row(**changes):
    timed = Timed(10.0, 9.5, 10.5, 40)
    given = {
        "flow": QUEST.name, "shape": "16 x 32,768", "asked": "16x32k", "standard": True,
        "stages": {"update": Timed(1.0, 1.0, 1.0, 8), "score": timed}, "step": Timed(80.0, 78.0, 82.0, 40),
        "dense": {name: Timed(us, us, us, 8) for name, us in DENSE_US.items()},
        "moved": Moved(1e6, 0.0, 200e6, 1e6, 138e6), "dense_bytes": 2147483648, "read_bandwidth": 4.5e12, "pools": 4,
        "stage_pools": 9, "reuse": {"step": 16.0}, "attended": 0.0635,
    }  # fmt: skip
    return bench_measure.Row(**{**given, **changes})


def test_a_row_by_its_cells():
    assert bench_report.cells(row()) == [
        "16 x 32,768", "gqa_quest", "1.00", "-", "10.00", "-", "-", "80.00", "2.5 %", "487.00", "483.00", "6.04x",
        "6.2x no", "340.0", "75.56", "1.06", "4",
    ]  # fmt: skip
    assert row().fastest_dense[0] == "FA3 unscheduled"
    assert bench_report.cells(row(reuse={"step": 2.5}))[-1] == "4 (2.5x L2)"
    assert bench_report.cells(row(step=Timed(200.0, 200, 200, 8)))[-2] == "2.65!"


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({"step": Timed(70.0, 70, 70, 8)}, "6.2x yes"),
        ({"standard": False}, ""),
        ({"dense": {}}, ""),
        ({"flow": "block_sparse_attention"}, "8x no"),
        ({"flow": "twilight_attention"}, ""),
        ({"asked": "16x2048", "attended": 1.0, "step": Timed(490.0, 1, 1, 8)}, "0.97x yes"),
        ({"asked": "1x2048", "attended": 1.0, "step": Timed(487.5, 1, 1, 8)}, "+3 us: +4.5 no"),
    ],
)
def test_goals(changes, goal):
    assert bench_report.goal_text(row(**changes)) == goal


def test_saved_json_is_json_and_complete(tmp_path):
    green = bench_gate.Verdict(QUEST.name, "16 x 32,768", "scores", "request 0, kv head 0", 1e-6, 1e-4, True)
    result = bench_report.Result(
        {"gpu": "none"}, {}, {"read": 4.5e12, "copy": 4.2e12}, [row()], verdicts=[green], notes=["a note"]
    )
    bench_report.save(result, tmp_path)
    saved = json.loads((tmp_path / "bench_decode.json").read_text())
    assert saved["rows"][0]["speedup"] == pytest.approx(483 / 80)
    assert saved["rows"][0]["floor_ratio"] == pytest.approx(80 / (340e6 / 4.5e6))
    assert saved["rows"][0]["moved"]["score"] == 200e6
    assert saved["bandwidth_bytes_per_second"]["read"] == 4.5e12
    result.verdicts.append(dataclasses.replace(green, ok=False, error=float("inf")))
    bench_report.save(result, tmp_path)
    saved = json.loads((tmp_path / "bench_decode.json").read_text())
    assert saved["gate"]["verdicts"][1]["error"] == "inf"
    assert "rows" not in saved
    assert not (tmp_path / "bench_decode.png").exists()


# -- command line


def test_help_names_the_options():
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, str(SCRIPT), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--shape", "--flow", "--quick", "--time-budget", "--stages-only", "--gate-only", "--out"):
        assert option in done.stdout


def _in_process(*arguments):
    app = typer.Typer()
    app.command()(bench_decode.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = _in_process("--quick")
    assert done.exit_code == 2
    assert "no CUDA GPU is at hand" in done.stdout


def test_an_unknown_flow_is_refused(tmp_path):
    done = _in_process("--device", "cpu", "--flow", "gqa_quest", "--shape", "1x64", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert "gqa_quest_sparse_attention" in done.stdout


@pytest.mark.parametrize(("count", "words"), [(7, 3), (8, 4), (1, 0), (64, 8)])
def test_a_pool_of_an_odd_size_is_read_in_whole_words(count, words):
    assert whole_words(torch.zeros(count, dtype=torch.bfloat16), 32).shape == (words,)
