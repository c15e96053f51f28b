"""`experiments/bench_mla.py`, decode, tiles and the report: what is printed and saved, the command line."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_measure
import bench_mla
import bench_mla_counts as counts
import bench_mla_prefill as prefill
import bench_mla_report as report
import bench_mla_tiles as tiles
import bench_pools
from bench_bytes import count_bytes, dense_bytes
from bench_mla_decode import LatentRow
from bench_mla_shapes import PrefillShape, decode_workloads, mla_flows, parse_prefill, prefill_shapes, schedule_shapes
from bench_shapes import BenchError
from bench_timing import Timed

import flowlib
from flowlib.runtime import interpreter
from tests.suites.bench_mla import SIZES, WORK, clock_that_stands_in, libraries_that_stand_in  # noqa: F401

interpreter.install()


def test_a_latent_is_read_once():
    plan = mla_flows(["quest_mla"])[0].plan(WORK)
    moved = count_bytes(plan, WORK.lengths)
    attended = 2 * (4 * 8 - 3) * 48 * 2 + 2 * 3 * ((48 + 32) * 2 + 4) + 2 * 4 * 4
    assert moved.attend == attended
    assert dense_bytes(plan.spec, WORK.lengths) == 2 * 45 * 48 * 2 + 2 * 3 * (48 + 32) * 2 + 2 * 6 * 4
    assert bench_pools.pool_bytes(WORK) == bench_pools.pages_of(WORK) * 8 * 48 * 2


def test_shapes_by_their_names():
    assert parse_prefill("60000+4096") == (60_000, 4096)
    assert parse_prefill("32k+512") == (32_768, 512)
    shapes = prefill_shapes((), (16, 128), 16)
    assert (len(shapes), shapes[0].label, shapes[0].heads) == (16, "60,000 + 4,096", 128)
    assert schedule_shapes((16,), 16, (65536,))[0].label == "1 x 60,000 and 31 x 16, + 16 each"
    works = decode_workloads(("16x64k",), (16, 128), (64, 1))
    assert works[0].label == "16 x 65,536, 128 heads, page 64"
    assert [w.numbers.top_k for w in works] == [32, 32, 2048, 2048]
    for wrong in ("60000", "a+b", "0+4", "1+2+3"):
        with pytest.raises(BenchError, match=r"--prefill .*: expected"):
            parse_prefill(wrong)
    with pytest.raises(BenchError, match="quest_mla"):
        mla_flows(["gqa_quest_sparse_attention"])


def test_dense_attention_of_others_to_latents(libraries, stand_in_clock):
    from bench_mla_decode import LatentPeers

    problem = bench_pools.problem(WORK, "cpu")
    plan = mla_flows(["quest_mla"])[0].plan(WORK)
    arena = bench_pools.Arena(bench_pools.pool_bytes(WORK), "cpu", latent=True)
    stores = bench_pools.make_pools(plan, problem, arena, 1)
    found, refused = bench_measure.measure_dense(LatentPeers(), problem, stores, 0.01)
    assert set(found) == {"flowlib", "FlashInfer", "FA3"}
    assert not refused


# -- tiles


def test_tiles_are_gated_and_wrong_or_impossible_ones_told(stand_in_clock, monkeypatch):
    decode, prompt = tiles.cases("cpu", 1, (3,), SIZES, small=True)
    assert all(v.ok for case in (decode, prompt) for v in tiles.gate(case))
    notes: list[str] = []
    right, broken, wrong = (16, 16, 4, 1), (16, 32, 4, 9), (32, 16, 4, 1)

    def launch(turn, tile, splits):
        if tile == broken:
            raise RuntimeError("out of resource: shared memory")
        return decode.launch(turn, tile, splits).mul_(1.1 if tile == wrong else 1.0)

    case = dataclasses.replace(decode, launch=launch, splits=(1, 4), usual=(decode.usual[0], 1), turns=1)
    assert tiles.sweep(prompt, (), 0.01, notes.append)[0].usual
    rows = tiles.sweep(case, (right, broken, wrong), 0.01, notes.append)
    assert [(row.tile, row.splits) for row in rows] == [(t, s) for t in (decode.usual[0], right) for s in (1, 4)]
    assert [row.usual for row in rows] == [True, False, False, False]
    assert "tile (16, 32, 4, 9) does not run: out of resource" in notes[0]
    assert "tile (32, 16, 4, 1) is wrong: off by 0.1" in notes[1]
    monkeypatch.setattr(tiles, "cases", lambda *a, **k: [dataclasses.replace(case, launch=lambda *a: launch(*a) * 1.1)])
    assert not all(v.ok for v in tiles.gate(tiles.cases()[0]))


@pytest.mark.parametrize("text", ["decode:64,32,8", "decode", "merge:1,2,3,4", "prefill:1,2,3,x", "decode:0,1,1,1"])
def test_tiles_that_are_none(text):
    with pytest.raises(BenchError, match=f"--tile {text}: expected"):
        tiles.parse_tile(text)


# -- goals, table and files


def timed(us):
    return Timed(us, us, us, 9)


def prefill_row(name, us, **changes):
    absorbed = name.startswith("absorbed")
    shape = PrefillShape((60_000,), (4096,), 128)
    work = counts.absorbed_work(shape) if absorbed else counts.chunked_work(shape)
    given = {
        "part": "prefill", "shape": shape, "name": name, "absorbed": absorbed, "own": name.startswith("chunked"),
        "chunks": 1, "whole": timed(us), "eager": us + 100, "stages": {"attend": timed(us / 2)}, "work": work,
        "read": 4.5e12, "matmul": 7.8e14, "copies": 2,
    }  # fmt: skip
    return prefill.PrefillRow(**{**given, **changes})


def decode_row(step, **changes):
    given = {
        "flow": "quest_mla", "shape": "16 x 65,536, 128 heads, page 64", "asked": "16x64k", "standard": True,
        "stages": {"score": timed(9.0)}, "step": timed(step), "dense": {"FlashInfer": timed(500.0)},
        "moved": bench_measure.Moved(0, 0, 20e6, 0, 40e6), "dense_bytes": 1, "read_bandwidth": 4e12, "pools": 4,
        "stage_pools": 8, "flops": 8e9, "matmul_rate": 8e14,
    }  # fmt: skip
    return LatentRow(**{**given, **changes})


def result(**more):
    green = prefill.Verdict("x", "y", "o", "all", 1e-3, 1e-2, True)
    return report.Result(
        {"gpu": "none"}, {}, {"read": 4.5e12, "copy": 4e12, "matmul": 7.8e14}, verdicts=[green], **more
    )


def test_goals():
    schedule = schedule_shapes((128,), 16, (65536,))[0]
    rows = [
        prefill_row("chunked, triton", 60_000.0), prefill_row("chunked, flashinfer", 50_000.0),
        prefill_row("absorbed, FlashInfer", 110_000.0), prefill_row("absorbed, flowlib decode kernel", 300_000.0),
        prefill_row("chunked, triton", 900.0, part="schedule", shape=schedule),
        prefill_row("chunked, triton, even", 2_000.0, part="schedule", shape=schedule, eager=3_100.0),
    ]  # fmt: skip
    found = report.goals(result(prefill=rows, decode=[decode_row(100.0), decode_row(130.0, standard=False)]))
    assert [round(goal.got, 2) for goal in found] == [2.2, 3.1, 5.0]
    assert [goal.met for goal in found] == [True, True, True]
    assert "chunked, flashinfer, 60,000 + 4,096, 128 heads" in found[0].what
    assert found[0].over == "absorbed, FlashInfer"
    assert "from graphs 2.22x" in found[1].what
    assert not report.Goal("a", "b", 4.0, 3.99).met


def test_a_floor_knows_operations():
    """20 MB at 4 TB/s are 5 us; 40 MB are 10 us, and 8 GFLOP at 800 TFLOP/s as well."""
    assert decode_row(30.0).floor_us == pytest.approx(15.0)
    assert decode_row(30.0, flops=16e9).floor_ratio == pytest.approx(30.0 / 25.0)


def test_saved_json_is_complete_and_red_saves_no_speed(tmp_path):
    case = tiles.TileRow("decode", "c", (64, 32, 8, 2), 4, timed(20.0), "2.00 TB/s", True)
    whole = result(prefill=[prefill_row("chunked, triton", 60_000.0)], decode=[decode_row(100.0)], tiles=[case])
    console = Console(width=260, record=True, markup=False, file=io.StringIO())
    report.render(whole, console)
    text = console.export_text()
    for part in ("(64, 32, 8, 2)", "Goal met: quest_mla", "60,000 + 4,096", "16 x 65,536, 128 heads"):
        assert part in text
    report.save(whole, tmp_path)
    saved = json.loads((tmp_path / "bench_mla.json").read_text())
    assert saved["prefill"][0]["work"]["attend"]["flops"] == pytest.approx(2 * 60_000 * 4096 * 128 * 320)
    assert saved["decode"][0]["speedup"] == pytest.approx(5.0)
    assert saved["tiles"][0]["tile"] == [64, 32, 8, 2]
    assert saved["goals"][0]["met"]
    whole.verdicts.append(dataclasses.replace(whole.verdicts[0], ok=False, error=math.inf))
    report.save(whole, tmp_path)
    saved = json.loads((tmp_path / "bench_mla.json").read_text())
    assert not {"prefill", "decode", "tiles", "goals"} & set(saved)
    assert not (tmp_path / "bench_mla.png").exists()


# -- command line


def _in_process(*arguments):
    app = typer.Typer()
    app.command()(bench_mla.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_to_time():
    done = _in_process("--quick")
    assert done.exit_code == 2
    assert "no CUDA GPU is at hand" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--only", "speed"), "expected some of prefill"), (("--heads", "0"), "--heads 0"),
     (("--without", "FA4"), "names among"), (("--prefill", "1"), "1: exp"),
     (("--flow", "quest"), "quest_mla"), (("--decode-shape", "64k"), "expected BATCHxCONTEXT"),
     (("--tile", "64"), "--tile 64")],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(arguments, said, tmp_path):
    done = _in_process("--device", "cpu", "--out", str(tmp_path), *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stdout.split())


def test_every_flow_over_latents_is_measured():
    assert [choice.name for choice in mla_flows()] == flowlib.list_flows(mla=True)
