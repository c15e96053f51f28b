"""`experiments/bench_mla.py`, prefill and schedule: the gate, what is counted and measured; no GPU is timed."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import bench_mla
import bench_mla_counts as counts
import bench_mla_peers as peers
import bench_mla_prefill as prefill
from bench_mla_problem import prefill_problem, samples
from bench_mla_shapes import PrefillShape, mla_flows
from mla_cases import Sizes

from flowlib.errors import BackendError
from flowlib.runtime import interpreter
from tests.suites.bench_mla import (
    ALONE,
    PAIR,
    RAGGED,
    WORK,
    clock_that_stands_in,  # noqa: F401
    fa3_cached,
    libraries_that_stand_in,  # noqa: F401
)

interpreter.install()


def settings(folder, *parts, shapes=(RAGGED,), **more):
    flows = mla_flows(["quest_mla"])
    given = {"device": "cpu", "heads": (2,), "tiles": (), "seconds": 0.0, **more}
    return bench_mla.Settings(parts, shapes, shapes, (WORK,), flows, out=folder, **given)


def run(chosen, timing=False):
    """Exit status, what was printed, and the saved result; with `timing` the CPU counts as a GPU."""
    console = Console(width=260, record=True, markup=False, file=io.StringIO())
    bench = bench_mla.MlaBench(chosen, console)
    if timing:
        bench.timing, bench.l2 = True, 512
    code = bench.run()
    return code, console.export_text(), json.loads((chosen.out / "bench_mla.json").read_text())


# -- gate


def test_a_green_gate_on_a_cpu_prints_no_speed(tmp_path):
    code, text, saved = run(settings(tmp_path, "prefill", "schedule", "decode"))
    assert code == 0, text
    assert "no speed is measured on a CPU" in text
    assert "milliseconds" not in text
    assert "chunked, flashinfer is not measured" in text
    judged = {(v["flow"], v["stage"]) for v in saved["gate"]["verdicts"]}
    own = ("chunked, triton", "chunked, triton, even", "absorbed, flowlib decode kernel")
    assert {(name, stage) for name in own for stage in ("o", "lse")} <= judged
    assert ("quest_mla", "attention o") in judged
    assert saved["prefill"] == saved["decode"] == []


def _merge_in_base_2(monkeypatch):
    from flowlib.mla import prefill as loop

    merge = loop.merge_attn_states

    def wrong(prefix, prefix_lse, *rest, **options):
        return merge(prefix, prefix_lse / math.log(2.0), *rest, **options)

    monkeypatch.setattr(loop, "merge_attn_states", wrong)


def _drop_a_chunk(monkeypatch):
    build = prefill.Chunked.__init__

    def wrong(self, *given):
        build(self, *given)
        self.context = dataclasses.replace(self.context, chunks=self.context.chunks[:-1])

    monkeypatch.setattr(prefill.Chunked, "__init__", wrong)


def _raise(monkeypatch):
    def broken(self, cache):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(prefill.Chunked, "run", broken)


@pytest.mark.parametrize("fault", [_merge_in_base_2, _drop_a_chunk, _raise])
def test_a_red_gate_prints_no_speed_and_exits_1(fault, tmp_path, monkeypatch):
    fault(monkeypatch)
    code, text, saved = run(settings(tmp_path, "prefill", "decode"))
    assert code == 1
    assert "The gate is red: no speed is printed." in text
    assert "prefill" not in saved
    assert {v["flow"] for v in saved["gate"]["verdicts"]} == {"chunked, triton"}, "nothing is run behind a red gate"


def test_samples_know_rounding_from_faults():
    """Both forms with what must be rounded are near; another head's output is not."""
    problem = prefill_problem(RAGGED, "cpu")
    found = samples(problem, problem.caches[0])
    assert {s.request for s in found} == {0, 2}
    for sample in found:
        for low in (sample.materialised, sample.absorbed):
            assert 0 < (low - sample.o).norm() < 0.02 * sample.o.norm()
    pair = [s for s in found if (s.request, s.token) == (0, 0)]
    verdicts = prefill.judge_outputs("x", "y", pair[:1], pair[1].o.expand(6, 2, -1))
    assert not verdicts[0].ok


# -- counts


def test_work_of_a_small_shape_by_hand():
    shape = PrefillShape((6, 2), (3, 1), 2, sizes=Sizes(8, 4, 5, 7))
    work = counts.chunked_work(shape)
    assert shape.pairs == (6 * 3 + 2 * 1, 6 + 1)
    assert work["attend"].flops == 2 * 20 * 2 * (9 + 7)
    assert work["attend new"].flops == 2 * 7 * 2 * (9 + 7)
    assert work["gather"].bytes == 2 * 8 * 12 * 2
    assert work["project"] == counts.Work(8 * 12 * 2 + 8 * 24 * 2 + 8 * 2 * 16 * 2, 2 * 8 * 8 * 24)
    absorbed = counts.absorbed_work(shape)
    assert absorbed["attend"].flops == 2 * 27 * 2 * (12 + 8)
    assert absorbed["absorb"].flops == 2 * 4 * 2 * 5 * 8
    assert absorbed["restore"].flops == 2 * 4 * 2 * 8 * 7
    assert counts.one_shot_work(shape)["attend"].flops == work["attend"].flops + work["attend new"].flops
    both = {"a": counts.Work(4e6, 1e6), "b": counts.Work(1e3, 8e6)}
    assert counts.floor_us(both, 1e12, 1e12) == pytest.approx(4.0 + 8.0)


# -- what is measured, with stand-ins for the GPU's clock


def test_measured_rows(stand_in_clock, tmp_path, monkeypatch):
    monkeypatch.setattr(prefill, "_MAX_COPIES", 2)
    code, text, saved = run(settings(tmp_path, "prefill", "schedule", "decode", shapes=(PAIR,)), timing=True)
    assert code == 0, text
    rows = {(row["part"], row["name"]): row for row in saved["prefill"]}
    packed, even = rows["schedule", "chunked, triton"], rows["schedule", "chunked, triton, even"]
    assert (packed["chunks"], even["chunks"]) == (2, 3)
    assert set(packed["stages"]) == {"project new", "attend new", "gather", "project", "(product)", "attend", "merge"}
    assert packed["whole"]["us"] == packed["copies"] == 2
    absorbed = rows["prefill", "absorbed, flowlib decode kernel"]
    assert set(absorbed["stages"]) == {"absorb", "attend", "restore"}
    work = counts.absorbed_work(PAIR)
    assert absorbed["floor_us"] == pytest.approx(counts.floor_us(work, 4e12, 8e14))
    decode = saved["decode"][0]
    assert set(decode["dense"]) == {"flowlib"}
    assert decode["speedup"] == pytest.approx(1.0)
    assert decode["flops"] == pytest.approx(2 * decode["attended"] * 90 * 3 * (48 + 32))
    assert "FlashInfer is not measured: not installed" in text
    assert "Prefill, milliseconds a layer" in text
    assert "Schedule, milliseconds a layer" in text
    assert "Read bandwidth 4.00 TB/s (a large sum), bf16 products 800 TFLOP/s." in text
    assert (tmp_path / "bench_mla.png").exists() or "matplotlib is not installed" in text


def test_a_spent_time_budget_is_told(stand_in_clock, tmp_path, monkeypatch):
    clock = iter([0.0, *[1.0] * 2, *[200.0] * 50])
    monkeypatch.setattr(bench_mla.time, "monotonic", lambda: next(clock))
    code, text, saved = run(settings(tmp_path, "prefill", shapes=(ALONE, PAIR), time_budget=100.0), timing=True)
    assert code == 0
    assert {row["shape"]["context"][0] for row in saved["prefill"]} == {41}
    assert f"prefill {PAIR.label}, 1 heads, workspace 32: skipped, the time budget of 100 s is spent" in text


# -- others, by stand-ins


def others(shape):
    """Right outputs, wrong ones and refusals of the other variants, by name."""
    problem = prefill_problem(shape, "cpu")
    found, verdicts = samples(problem, problem.caches[0]), {}
    for name, make in prefill.prefill_makers(shape, True, False).items():
        if not name.startswith(("chunked", "absorbed, flowlib")):
            try:
                variant = make(problem)
            except RuntimeError as error:
                verdicts[name] = str(error)
                continue
            assert variant.name == name
            o, lse = variant.run(problem.caches[0])
            verdicts[name] = all(v.ok for v in prefill.judge_outputs(name, "", found, o, lse, variant.absorbed))
            for call in variant.stages().values():
                call(problem.caches[0])
            assert set(variant.stages()) == set(variant.work())
    return verdicts


def test_others_agree_with_float64(libraries):
    """SGLang's chunks are even: of 64 rows 21 a request, so two chunks; all 63 tokens fit in one attention."""
    verdicts = others(RAGGED)
    assert set(verdicts) == {
        "absorbed, FlashInfer", "absorbed, FA3", "SGLang chunks, FlashInfer", "SGLang chunks, FA3",
        "SGLang one shot, FlashInfer", "SGLang one shot, FA3",
    }  # fmt: skip
    assert all(ok is True for ok in verdicts.values()), verdicts
    variant = peers.SGLangPrefix(prefill_problem(RAGGED, "cpu"), "FA3", False, False)
    assert [[b - a for a, b in span] for span in variant.spans] == [[21, 0, 20], [16, 0, 0]]


def test_others_that_cannot_or_may_not_run_are_told(libraries):
    libraries.compiled.is_compiled = False
    verdicts = others(dataclasses.replace(RAGGED, context=(90, 0, 20)))
    assert "not compiled (--compile-peers" in verdicts["absorbed, FlashInfer"]
    assert "not compiled (--compile-peers" in verdicts["SGLang chunks, FlashInfer"]
    assert "SGLang takes chunks at 116 tokens" in verdicts["SGLang one shot, FA3"]
    assert verdicts["SGLang chunks, FA3"] is True


def test_a_wrong_library_is_told_and_not_timed(stand_in_clock, libraries, monkeypatch):
    libraries.flash.flash_attn_with_kvcache = lambda **given: fa3_cached(**given) * 1.05
    notes: list[str] = []
    bench = prefill.PrefillBench("cpu", 0.01, 512, (4e12, 8e14), False, notes.append)
    monkeypatch.setattr(prefill, "prefill_makers", lambda *_: {"absorbed, FA3": peers.AbsorbedFA3})
    assert not list(bench.run("prefill", ALONE))
    assert "absorbed, FA3 is not measured at 41 + 5" in notes[0]
    assert "o off by 0.05" in notes[0]
    assert not bench.verdicts, "another library's fault is not flowlib's"


def test_a_library_can_be_left_out(stand_in_clock, monkeypatch):
    def never(_):
        raise AssertionError("it was asked for")

    notes: list[str] = []
    bench = prefill.PrefillBench("cpu", 0.01, 512, (4e12, 8e14), False, notes.append, ("FA3",))
    monkeypatch.setattr(prefill, "prefill_makers", lambda *_: {"absorbed, FA3": never})
    assert not list(bench.run("prefill", ALONE))
    assert notes == ["absorbed, FA3 is not measured: left out by --without"]


@pytest.mark.parametrize("own", [True, False])
def test_a_variant_that_cannot_be_timed_does_not_take_the_others_along(own, stand_in_clock, monkeypatch):
    def measure(part, variant, *_):
        variant.own = own
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prefill, "measure", measure)
    notes: list[str] = []
    bench = prefill.PrefillBench("cpu", 0.01, 512, (4e12, 8e14), False, notes.append)
    assert not list(bench.run("prefill", PAIR))
    told = [note for note in notes if "is not timed at" in note]
    assert [note.split(" is")[0] for note in told] == ["chunked, triton", "absorbed, flowlib decode kernel"]
    assert all(note.endswith("out of memory") for note in told)
    assert bench.failed == own


def test_the_loop_asked_for_by_name_says_why_it_cannot_run():
    problem = prefill_problem(ALONE, "cpu")
    with pytest.raises(BackendError, match="flashinfer"):
        prefill.prefill_makers(ALONE, False, False)["chunked, flashinfer"](problem)
