"""What `bench_serving.py` serves: published model shapes with random weights, workloads, and servers to compare."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = 16
AHEAD = 1
"""Tokens a request may hold beyond prompt and answer: the overlap schedule runs one step past the last."""

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Numbers of the published config.json files (huggingface.co/Qwen); `tiny` is for machines without a GPU."""

WORKLOADS = ("1x1k", "1x8k", "1x32k", "1x128k", "16x1k", "16x8k", "16x32k", "64x1k", "64x8k")
QUICK_WORKLOADS = ("1x8k", "16x8k", "16x32k")
CPU_WORKLOADS = ("1x300", "3x200", "64x8k")


class BenchError(Exception):
    """Wrong use of the benchmark; the message says what would be right."""


@dataclass(frozen=True)
class Workload:
    """Requests that are sent at once.

    Args:
        batch: how many.
        context: tokens of each prompt.
    """

    batch: int
    context: int

    @property
    def name(self) -> str:
        """Such as ``16x32k``."""
        short = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch}x{short}"

    def tokens(self, new_tokens: int) -> int:
        """Tokens of the KV pool that the requests take, in whole pages."""
        pages = -(-(self.context + new_tokens + AHEAD) // PAGE)
        return self.batch * pages * PAGE

    def told(self, new_tokens: int) -> dict[str, Any]:
        """What the engine's process is told."""
        return {"name": self.name, "batch": self.batch, "context": self.context, "tokens": self.tokens(new_tokens)}


@dataclass(frozen=True)
class Server:
    """One server to measure.

    Args:
        name: what the table calls it.
        engine: keywords of ``sglang.Engine`` in which it differs from the others.
        flow: the flow it decodes with; ``None`` for dense attention.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    flow: str | None = None


def parse_workload(text: str) -> Workload:
    """``16x32k`` or ``3x200``. Raises BenchError."""
    found = re.fullmatch(r"(\d+)x(\d+)(k?)", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise BenchError(f"--workload is {text!r}, expected BATCHxCONTEXT such as 16x32k")
    return Workload(int(found[1]), int(found[2]) * (1024 if found[3] else 1))


def parse_servers(
    flows: tuple[str, ...], dense: tuple[str, ...], flow_config: dict[str, Any], tp: int = 1
) -> list[Server]:
    """The dense servers first, by SGLang's attention backend; the flows prefill with the first of those.

    With `tp` above 1 each runs on so many GPUs (tensor parallelism), and its name says so.
    """
    if not dense:
        raise BenchError("--dense names no attention backend, expected at least one to compare with")
    end, ranks = (f", TP {tp}", {"tp_size": tp}) if tp > 1 else ("", {})
    servers = [Server(f"dense {name}{end}", {"attention_backend": name, **ranks}) for name in dense]
    for flow in flows:
        engine = {"attention_backend": dense[0], "flow": flow, "flow_config": flow_config, **ranks}
        servers.append(Server(flow + end, engine, flow))
    return servers


def model_config(shape: str, context: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape, with room for `context` tokens. Raises BenchError for an unknown shape."""
    if shape not in SHAPES:
        raise BenchError(f"--model is {shape!r}, expected one of {', '.join(SHAPES)}")
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": context,
        **SHAPES[shape],
        **changes,
    }


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    """A model folder without weights, for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=1), encoding="utf-8")
    return folder


def engine_settings(device: str, context: int, batch: int) -> dict[str, Any]:
    """What all servers are started with.

    Args:
        device: ``cuda`` or ``cpu``.
        context: most tokens of a request.
        batch: most requests at once.
    """
    settings: dict[str, Any] = {
        "device": device, "load_format": "dummy", "skip_tokenizer_init": True, "page_size": PAGE,
        "context_length": context, "max_running_requests": max(batch, 2), "grammar_backend": "none",
        "enable_metrics": True, "random_seed": 1, "log_level": "info",
    }  # fmt: skip
    if device == "cuda":
        return settings | {
            "dtype": "bfloat16",
            "mem_fraction_static": 0.85,
            "chunked_prefill_size": 8192,
            "cuda_graph_max_bs_decode": batch,
        }
    return settings | {
        "dtype": "float32",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "disable_cuda_graph": True,
    }
