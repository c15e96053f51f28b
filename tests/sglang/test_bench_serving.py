"""The serving benchmark: its arithmetic on numbers made by hand, and one run to its end on the CPU."""

import io
import json
import math
import sys

import numpy as np
import pytest
from flowlib_cpu_host import cpu_environment
from rich.console import Console

from tests.sglang import latent_model
from tests.sglang.engine import HERE, run

sys.path.insert(0, str(HERE.parent.parent / "experiments"))

import bench_serving_engine as engine
import bench_serving_gate as gate
import bench_serving_report as report
import bench_serving_shapes as shapes

EXPERIMENTS = HERE.parent.parent / "experiments"
QUEST = "gqa_quest_sparse_attention"
COUNTED = {"pages_attended": 10, "pages_cached": 40, "sparse_steps": 3}


def test_workloads_and_the_tokens_they_need():
    assert shapes.parse_workload("16x32k") == shapes.Workload(16, 32768)
    assert [shapes.parse_workload(text).name for text in shapes.WORKLOADS] == list(shapes.WORKLOADS)
    assert shapes.parse_workload("3x200").tokens(7) == 3 * 208
    assert shapes.parse_workload("3x200").tokens(8) == 3 * 224
    assert shapes.parse_workload("3x200").told(8, 64)["tokens"] == 3 * 256
    for text in ("16", "x32k", "0x1k", "16x32m", "16x0"):
        with pytest.raises(shapes.BenchError, match="expected BATCHxCONTEXT"):
            shapes.parse_workload(text)


def test_shapes_are_the_published_ones():
    for name, billions in (("Qwen3-1.7B", 1.72), ("Qwen3-8B", 8.19)):
        s = shapes.SHAPES[name].numbers
        heads = s["num_attention_heads"] + s["num_key_value_heads"]
        layer = s["hidden_size"] * (2 * heads * s["head_dim"] + 3 * s["intermediate_size"])
        tables = 1 if s["tie_word_embeddings"] else 2
        total = s["num_hidden_layers"] * layer + tables * s["hidden_size"] * s["vocab_size"]
        assert total / 1e9 == pytest.approx(billions, abs=0.01)
    with pytest.raises(shapes.BenchError, match=r"expected one of Qwen3-1\.7B"):
        shapes.model_config("Qwen", 1024)


def test_shapes_with_mla_are_the_published_one_and_the_same_without_experts():
    for name, billions in (("DeepSeek-V2-Lite", 15.7), ("DeepSeek-V2-Lite-dense", 2.6)):
        s = shapes.SHAPES[name].numbers
        hidden, heads, layers, rank = (
            s[n] for n in ("hidden_size", "num_attention_heads", "num_hidden_layers", "kv_lora_rank")
        )
        queries = hidden * heads * (s["qk_nope_head_dim"] + s["qk_rope_head_dim"])
        latents = hidden * (rank + s["qk_rope_head_dim"]) + rank * heads * (s["qk_nope_head_dim"] + s["v_head_dim"])
        attention = queries + latents + hidden * heads * s["v_head_dim"]
        experts = (s["n_routed_experts"] + s["n_shared_experts"]) * s["moe_intermediate_size"]
        dense = s["first_k_dense_replace"]
        mlps = 3 * hidden * (dense * s["intermediate_size"] + (layers - dense) * experts)
        assert (layers * attention + mlps + 2 * hidden * s["vocab_size"]) / 1e9 == pytest.approx(billions, abs=0.05)
        assert shapes.model_config(name, 4096)["architectures"] == ["DeepseekV2ForCausalLM"]


def test_a_run_serves_shapes_of_one_architecture():
    assert shapes.common_architecture(["Qwen3-8B", "tiny"]) is shapes.QWEN3
    assert (shapes.QWEN3.top_k("cuda"), shapes.DEEPSEEK_V2.top_k("cuda")) == (128, 32)
    with pytest.raises(shapes.BenchError, match="tiny-mla is of another architecture than tiny"):
        shapes.common_architecture(["tiny", "tiny-mla"])


def test_servers_differ_in_nothing_but_their_attention():
    first, second, flow = shapes.parse_servers((QUEST,), ("flashinfer", "fa3"), {"top_k": 3})
    assert (first.engine, second.engine) == ({"attention_backend": "flashinfer"}, {"attention_backend": "fa3"})
    assert flow.engine == {"attention_backend": "flashinfer", "flow": QUEST, "flow_config": {"top_k": 3}}
    on_two = shapes.parse_servers((QUEST,), ("flashinfer",), {}, 2)
    assert [(s.name, s.engine["tp_size"]) for s in on_two] == [("dense flashinfer, TP 2", 2), (f"{QUEST}, TP 2", 2)]
    with pytest.raises(shapes.BenchError, match="--dense names no attention backend"):
        shapes.parse_servers((QUEST,), (), {})


def test_prompts_are_the_same_for_every_server_and_others_for_every_workload():
    assert engine.make_prompts(2, 9, 512, 1) == engine.make_prompts(2, 9, 512, 1)
    assert engine.make_prompts(2, 9, 512, 1) != engine.make_prompts(2, 9, 512, 2)
    assert engine.make_prompts(2, 9, 512, 1)[0] != engine.make_prompts(1, 9, 512, 1)[0]


def test_gaps_are_those_while_all_requests_decode():
    early = [(1.0, 1), (2.0, 2), (4.0, 3), (4.5, 4)]
    late = [(2.0, 1), (4.0, 3), (9.0, 4)]
    assert engine.steady_gaps([early, late]) == [2.0, 0.5, 1.0, 1.0]


def test_percentiles():
    assert [engine.percentile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.95, 1.0)] == [1, 2, 4, 4]
    assert engine.percentile([7.0], 0.5) == 7.0


def test_the_gate_allows_twice_the_dense_distance_and_sees_a_small_budget():
    assert gate.tolerance(0.01, 4.0, "bfloat16") == 0.02 + 4.0 / 256
    assert gate.distance([np.zeros((2, 3))], [np.array([[0, 0, 0], [0, -0.5, 0]])]) == 0.5
    assert gate.Verdict("flow", 0.01, 0.02, COUNTED).ok
    assert not gate.Verdict("flow", 0.03, 0.02, COUNTED).ok
    assert not gate.Verdict("flow", math.nan, 0.02, COUNTED).ok
    assert gate.Verdict("flow", 0.03, 0.02, COUNTED, sees=True).ok
    assert not gate.Verdict("flow", 0.01, 0.02, COUNTED, sees=True).ok
    assert not gate.Verdict("flow", 0.03, 0.02, {}, sees=True).ok


def test_a_server_that_recorded_too_little_is_an_error(tmp_path):
    np.zeros((3, gate.VOCABULARY)).tofile(tmp_path / "logits")
    assert gate.load([tmp_path / "logits"], 3)[0].shape == (2, gate.VOCABULARY)
    with pytest.raises(RuntimeError, match="recorded 3 steps, expected 4"):
        gate.load([tmp_path / "logits"], 4)


def test_the_truth_of_mla_models_is_that_of_a_model_written_apart(tmp_path, monkeypatch):
    """The one thing that transformers leaves out, YaRN's softmax scale, is in it, and the gate would see it missing."""
    folder, asked = gate.write_gate_model(tmp_path, "tiny-mla", "cpu"), gate.sequences("cpu", 1)
    monkeypatch.setattr(latent_model, "LAYERS", gate.LAYERS)
    apart, (wanted, largest) = latent_model.Model(folder), gate.truth(folder, asked)
    for sequence, rows in zip(asked, wanted, strict=True):
        tokens = apart.next_tokens(sequence["prompt"] + sequence["force"][:-1])
        assert rows.argmax(-1).tolist() == tokens[len(sequence["prompt"]) :]
    monkeypatch.setattr(gate, "set_temperature", lambda model: None)
    spoiled, _ = gate.truth(folder, asked)
    assert gate.distance(spoiled, wanted) > 1e3 * gate.tolerance(1e-4, largest, "float32")


def result(ok=True, counted=COUNTED):
    def row(server, flow, rate, pages):
        return report.Row("tiny", "1x300", server, flow, rate, 1 / rate, [1 / rate], [0.1, 0.2], [0.01, 0.02], pages)

    made = report.Result({}, {"workloads": ["1x300"]}, [gate.Verdict("flow", 0.0 if ok else 1.0, 0.5, COUNTED)])
    made.rows = [row("dense a", None, 10.0, {}), row("dense b", None, 20.0, {}), row("quest", QUEST, 50.0, counted)]
    made.skipped = [{"model": "tiny", "server": "quest", "workload": "64x8k", "reason": "needs 9 tokens"}]
    return made


def printed(found):
    console = Console(file=io.StringIO(), width=150)
    report.render(found, console)
    return console.file.getvalue()


def test_speed_up_is_over_the_faster_dense_server(tmp_path):
    found = result()
    assert [found.speedup(row) for row in found.rows] == [0.5, 1.0, 2.5]
    text = printed(found)
    assert "not measured: tiny, quest, 64x8k: needs 9 tokens" in text
    assert "25.0 %" in text
    saved = report.save(found, tmp_path)
    assert [path.name for path in saved] == ["serving.json", "serving.png"]
    assert saved[1].read_bytes().startswith(b"\x89PNG")


def test_a_red_gate_prints_no_speed(tmp_path):
    found = result(ok=False)
    assert "50.0" not in printed(found)
    assert report.save(found, tmp_path) == [tmp_path / "serving.json"]
    assert json.loads((tmp_path / "serving.json").read_text())["rows"] == []


def test_a_flow_that_counted_nothing_is_not_proven():
    assert result().proven
    assert not result(counted={}).proven
    assert "nothing shows that it was sparse" in printed(result(counted={}))


@pytest.mark.timeout(900)
def test_it_runs_to_its_end_on_the_cpu(tmp_path):
    """The whole of it with a tiny shape; a workload that is too large for the pool is named, not measured."""
    command = [sys.executable, str(EXPERIMENTS / "bench_serving.py"), "--device", "cpu", "--quick", "--flow", QUEST]
    command += ["--workload", "2x200", "--workload", "64x8k", "--out", str(tmp_path)]
    ended = run(command, timeout=880, env=cpu_environment())
    assert (tmp_path / "serving.json").exists(), ended.text[-4000:]
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [v["server"] for v in found["gate"]] == ["dense torch_native", QUEST, f"{QUEST}, budget of a page"]
    assert all(v["ok"] for v in found["gate"]), ended.text[-4000:]
    done = {(r["server"], r["workload"]): r for r in found["rows"]}
    left = {(s["server"], s["workload"]): s["reason"] for s in found["skipped"]}
    servers = ["dense torch_native", QUEST]
    assert all("the KV pool has 4,096" in left[name, "64x8k"] for name in servers)
    for name in servers:  # on a machine this busy a longer answer may take no longer
        assert (name, "2x200") in done or "took no longer" in left[name, "2x200"]
    if (QUEST, "2x200") in done:
        # top_k 4, one first and one last page, of 13 pages, 14 from the ninth token on
        assert done[QUEST, "2x200"]["share"] == pytest.approx(6 / 13, abs=0.03)
        assert ended.code == 0


@pytest.mark.timeout(900)
def test_its_gate_of_an_mla_model_is_green_on_the_cpu(tmp_path):
    command = [sys.executable, str(EXPERIMENTS / "bench_serving.py"), "--device", "cpu", "--model", "tiny-mla"]
    command += ["--gate-only", "--flow", "quest_mla", "--out", str(tmp_path)]
    ended = run(command, timeout=880, env=cpu_environment())
    assert ended.code == 0, ended.text[-4000:]
    found = json.loads((tmp_path / "serving.json").read_text())["gate"]
    assert [v["server"] for v in found] == ["dense triton", "quest_mla", "quest_mla, budget of a page"]
    assert all(v["ok"] for v in found)
    assert found[1]["counted"]["pages_attended"] == found[1]["counted"]["pages_cached"]
