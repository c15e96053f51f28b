"""What `bench_serving.py` serves: published model shapes with random weights, workloads, and servers to compare."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = 16
"""Tokens of a page where the model keeps K and V."""
AHEAD = 1
"""Tokens a request may hold beyond prompt and answer: the overlap schedule runs one step past the last."""
BUDGET = 2048
"""Tokens that flows choose on a GPU unless a budget is given."""


@dataclass(frozen=True)
class Architecture:
    """What all shapes of one architecture have in common.

    Args:
        constants: of config.json.
        flows: what is served unless flows are named.
        dense: attention backends to compare with unless some are named, by device; flows prefill with the first.
        page_size: tokens of a page of all servers, by device.
    """

    constants: dict[str, Any]
    flows: tuple[str, ...]
    dense: dict[str, tuple[str, ...]]
    page_size: dict[str, int]

    def top_k(self, device: str) -> int:
        """Pages that flows choose unless a budget is given."""
        return BUDGET // self.page_size[device] if device == "cuda" else 4


QWEN3 = Architecture(
    constants={
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1000000.0,
    },
    flows=("gqa_quest_sparse_attention", "block_sparse_attention"),
    dense={"cuda": ("flashinfer", "fa3"), "cpu": ("torch_native",)},
    page_size={"cuda": PAGE, "cpu": PAGE},
)  # fmt: skip
DEEPSEEK_V2 = Architecture(
    constants={
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "q_lora_rank": None, "moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
    flows=("quest_mla", "rope_aware_block_sparse_mla"),
    dense={"cuda": ("triton", "flashinfer"), "cpu": ("triton",)},
    page_size={"cuda": 64, "cpu": PAGE},
)  # fmt: skip
"""Of DeepSeek-V2-Lite. Any page size does for the two dense backends: they address single tokens."""


@dataclass(frozen=True)
class Shape:
    """A model's shape: its architecture, and what config.json says beside the constants of that."""

    architecture: Architecture
    numbers: dict[str, Any]


_V2_LITE = {
    "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 102400, "tie_word_embeddings": False, "max_position_embeddings": 163840, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
}  # fmt: skip

SHAPES = {
    "Qwen3-1.7B": Shape(QWEN3, {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "Qwen3-8B": Shape(QWEN3, {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    }),
    "tiny": Shape(QWEN3, {
        "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    }),
    "DeepSeek-V2-Lite": Shape(DEEPSEEK_V2, _V2_LITE),
    "DeepSeek-V2-Lite-dense": Shape(DEEPSEEK_V2, _V2_LITE | {"first_k_dense_replace": 27}),
    "tiny-mla": Shape(DEEPSEEK_V2, _V2_LITE | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "first_k_dense_replace": 2,
    }),
}  # fmt: skip
"""Numbers of the published config.json files (huggingface.co/Qwen, huggingface.co/deepseek-ai).

`DeepSeek-V2-Lite-dense` has the dense MLP of the first layer in all layers, in place of experts: attention is the same,
and SGLang has no expert kernels to compile and tune. `tiny` and `tiny-mla` are for machines without a GPU, where speed
says nothing: the dense server of `tiny-mla` runs in Triton's interpreter."""

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

    def tokens(self, new_tokens: int, page_size: int = PAGE) -> int:
        """Tokens of the KV pool that the requests take, in whole pages."""
        pages = -(-(self.context + new_tokens + AHEAD) // page_size)
        return self.batch * pages * page_size

    def told(self, new_tokens: int, page_size: int) -> dict[str, Any]:
        """What the engine's process is told."""
        needed = self.tokens(new_tokens, page_size)
        return {"name": self.name, "batch": self.batch, "context": self.context, "tokens": needed}


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


def find_shape(name: str) -> Shape:
    """The shape of that name. Raises BenchError."""
    if name not in SHAPES:
        raise BenchError(f"--model is {name!r}, expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def common_architecture(names: list[str]) -> Architecture:
    """The architecture of shapes that the same servers are to serve. Raises BenchError."""
    first = find_shape(names[0]).architecture
    for name in names[1:]:
        if find_shape(name).architecture is not first:
            raise BenchError(f"--model {name} is of another architecture than {names[0]}: measure them one by one")
    return first


def model_config(shape: str, context: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape, with room for `context` tokens. Raises BenchError for an unknown shape."""
    found = find_shape(shape)
    return {
        **found.architecture.constants,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": context,
        **found.numbers,
        **changes,
    }


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    """A model folder without weights, for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=1), encoding="utf-8")
    return folder


def engine_settings(device: str, context: int, batch: int, page_size: int) -> dict[str, Any]:
    """What all servers are started with.

    Args:
        device: ``cuda`` or ``cpu``.
        context: most tokens of a request.
        batch: most requests at once.
        page_size: tokens of a page.
    """
    settings: dict[str, Any] = {
        "device": device, "load_format": "dummy", "skip_tokenizer_init": True, "page_size": page_size,
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
