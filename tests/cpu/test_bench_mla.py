"""`experiments/bench_mla.py`: the gate, what is counted, printed and saved, the command line; no GPU is timed."""

import dataclasses
import io
import itertools
import json
import math
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
import bench_measure
import bench_mla
import bench_mla_counts as counts
import bench_mla_peers as peers
import bench_mla_prefill as prefill
import bench_mla_report as report
import bench_mla_tiles as tiles
import bench_pools
from bench_bytes import count_bytes, dense_bytes
from bench_mla_decode import LatentRow
from bench_mla_problem import prefill_problem, samples
from bench_mla_shapes import (
    MlaNumbers,
    MlaWorkload,
    PrefillShape,
    decode_workloads,
    mla_flows,
    parse_prefill,
    prefill_shapes,
    schedule_shapes,
)
from bench_shapes import BenchError
from bench_timing import Bandwidth, Timed
from mla_cases import Sizes

import flowlib
from flowlib.errors import BackendError
from flowlib.runtime import interpreter

interpreter.install()
SIZES = Sizes(32, 16, 32, 32, 0.2)
RAGGED = PrefillShape((37, 0, 20), (3, 2, 1), 2, 16, 32, SIZES)
"""Two chunks packed, three even; a request without context between."""
PAIR = PrefillShape((37, 5), (2, 1), 1, 16, 32, SIZES)
ALONE = dataclasses.replace(RAGGED, context=(41,), new=(5,))
WORK = MlaWorkload(
    "2x45", (45, 45), MlaNumbers(3, 1, 48, 8, 2, kv_lora_rank=32, scale=0.2), standard=False
)  # fmt: skip


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


# -- what is measured, with stand-ins for the GPU's clock


@pytest.fixture
def stand_in_clock(monkeypatch):
    """Captures run eagerly, replays take as many microseconds as the capture has calls; three GB are free."""

    def capture(calls, pool, first=None):
        for call in (*([first] if first else []), *calls):
            call()
        return len(calls)

    for module in (bench_measure, prefill, tiles):
        monkeypatch.setattr(module, "capture", capture)
        monkeypatch.setattr(module, "replay", lambda graphs, units, *_: Timed(1.0 * units, units, units, 9))
    for module in (bench_measure, bench_decode):
        monkeypatch.setattr(module, "LAYERS", 2)
    monkeypatch.setattr(bench_measure, "_LAUNCHES", 1)
    for module in (bench_decode, bench_mla):
        monkeypatch.setattr(module, "measure_bandwidth", lambda memory, seconds: Bandwidth(4e12, 3e12))
    monkeypatch.setattr(bench_mla, "measure_matmul", lambda device, seconds: 8e14)
    monkeypatch.setattr(bench_mla, "_GIB", 64)
    for module in (bench_decode, bench_pools):
        monkeypatch.setattr(module, "MAX_POOLS", 2)
    monkeypatch.setattr(prefill, "_MAX_COPIES", 1)
    monkeypatch.setattr(bench_decode.Bench, "cuda", property(lambda _: True, lambda *_: None), raising=False)
    found = types.SimpleNamespace(L2_cache_size=512)
    for name, value in {
        "get_device_properties": lambda device: found,
        "graph_pool_handle": lambda: None, "mem_get_info": lambda: (3 << 30, 4 << 30), "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0, "empty_cache": lambda: None, "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


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


# -- others, by stand-ins with the signatures that are called


def _causal(q, k, v, queries, keys, scale, causal):
    """(o, natural lse ``[T, H]``) of ragged requests."""
    o, lse = q.new_zeros(*q.shape[:2], v.shape[2]), torch.full(q.shape[:2], -math.inf)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), k[k0:k1].float()) * scale
        if causal:
            seen = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            scores = scores.masked_fill(torch.arange(k1 - k0) > seen, -math.inf)
        if k1 > k0:
            o[q0:q1] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[k0:k1].float()).to(q.dtype)
            lse[q0:q1] = scores.logsumexp(-1).t()
    return o, lse


class _Ragged:
    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"

    def plan(self, starts, ends, *, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, sm_scale,
             q_data_type, kv_data_type):  # fmt: skip
        self.args = starts.tolist(), ends.tolist(), sm_scale, causal

    def run(self, q, k, v, return_lse):
        o, lse = _causal(q, k, v, *self.args)
        return o, lse / math.log(2.0)


class _Latent:
    def __init__(self, workspace, backend):
        pass

    def plan(self, starts, ends, pages, lengths, heads, rank, rope, page, causal, scale, q_type, kv_type):
        self.starts, self.ends, self.pages = starts.tolist(), ends.tolist(), pages.long()
        self.lengths, self.causal, self.scale = lengths.tolist(), causal, scale

    def run(self, q, q_rope, content, rope, out):
        whole = torch.cat((content, rope), -1)
        rows = [whole[self.pages[a:b]].flatten(0, 1)[:n] for a, b, n in zip(
            self.ends, self.ends[1:], self.lengths, strict=False)]  # fmt: skip
        k = torch.cat(rows)[:, None].expand(-1, q.shape[1], -1)
        keys = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        o, _ = _causal(torch.cat((q, q_rope), -1), k, k[..., : q.shape[2]], self.starts, keys, self.scale, self.causal)
        out.copy_(o)


def _fa3_varlen(*, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                return_softmax_lse):  # fmt: skip
    o, lse = _causal(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale, causal)
    return o, lse.t(), None


def _fa3_cached(*, q, qv, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale,
                causal, window_size, softcap, num_splits):  # fmt: skip
    pages = [row[: -(-n // k_cache.shape[1])] for row, n in zip(page_table, cache_seqlens.tolist(), strict=True)]
    wrapper = _Latent(None, "auto")
    starts = torch.tensor([0, *torch.tensor([len(p) for p in pages]).cumsum(0).tolist()])
    wrapper.plan(cu_seqlens_q, starts, torch.cat(pages), cache_seqlens, 0, 0, 0, 0, causal, softmax_scale, None, None)
    out = torch.empty_like(qv)
    wrapper.run(qv, q, v_cache[:, :, 0], k_cache[:, :, 0], out)
    return out


def _merge(a, a_lse, b, b_lse, out, out_lse):
    total = torch.logaddexp(a_lse, b_lse)
    out.copy_((a_lse - total).exp()[..., None] * a.float() + (b_lse - total).exp()[..., None] * b.float())
    out_lse.copy_(total)


@pytest.fixture
def libraries(monkeypatch):
    flash = types.SimpleNamespace(flash_attn_varlen_func=_fa3_varlen, flash_attn_with_kvcache=_fa3_cached)
    compiled = types.SimpleNamespace(is_compiled=True)
    attention = types.SimpleNamespace(
        gen_batch_prefill_module=lambda *a: compiled, gen_batch_mla_module=lambda *a: compiled
    )
    modules = {
        "flashinfer": types.SimpleNamespace(
            BatchPrefillWithRaggedKVCacheWrapper=_Ragged, BatchMLAPagedAttentionWrapper=_Latent
        ),
        "flashinfer.jit.attention": attention,
        "sgl_kernel": types.SimpleNamespace(merge_state_v2=_merge), "sgl_kernel.flash_attn": flash,
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("_WORKSPACE_BYTES", "_RAGGED_BYTES"):
        monkeypatch.setattr(peers, name, 16)
    monkeypatch.setattr(peers, "SGLANG_CAPACITY", 64)
    return types.SimpleNamespace(compiled=compiled, flash=flash)


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
    libraries.flash.flash_attn_with_kvcache = lambda **given: _fa3_cached(**given) * 1.05
    notes: list[str] = []
    bench = prefill.PrefillBench("cpu", 0.01, 512, (4e12, 8e14), False, notes.append)
    monkeypatch.setattr(prefill, "prefill_makers", lambda *_: {"absorbed, FA3": peers.AbsorbedFA3})
    assert not list(bench.run("prefill", ALONE))
    assert "absorbed, FA3 is not measured at 41 + 5" in notes[0]
    assert "o off by 0.05" in notes[0]
    assert not bench.verdicts, "another library's fault is not flowlib's"


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
    [(("--only", "speed"), "expected some of prefill"), (("--heads", "0"), "--heads 0"), (("--prefill", "1"), "1: exp"),
     (("--flow", "quest"), "quest_mla"), (("--decode-shape", "64k"), "expected BATCHxCONTEXT"),
     (("--tile", "64"), "--tile 64")],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(arguments, said, tmp_path):
    done = _in_process("--device", "cpu", "--out", str(tmp_path), *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stdout.split())


def test_every_flow_over_latents_is_measured():
    assert [choice.name for choice in mla_flows()] == flowlib.list_flows(mla=True)
