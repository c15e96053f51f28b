"""The correctness gate of `bench_serving.py`: log probabilities of servers against those of transformers in float64.

A small model of the served shape's heads gets random weights of an ordinary size (those of ``load_format="dummy"`` are
so small that attention hardly matters). Every server decodes the same forced tokens, so step by step the same question
is answered. A server may be as far from the truth as twice what the dense server is, plus one rounding of the logits.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from bench_serving_shapes import find_shape, model_config, write_model

PROMPTS = {"cuda": (37, 300, 777), "cpu": (37, 100, 163)}
NEW_TOKENS = {"cuda": 24, "cpu": 8}
VOCABULARY = 512
CONTEXT = 2048
"""Most tokens of a request of the gate."""
LAYERS = 3
EPSILON = {"bfloat16": 2.0**-8, "float32": 2.0**-23}


@dataclass(frozen=True)
class Verdict:
    """What the gate found of one server.

    Args:
        server: its name.
        error: largest distance of a log probability from the truth.
        tolerance: how large it may be; for ``sees`` how large it must be at least.
        counted: flowlib's counters; empty for a dense server.
        sees: the server left pages out on purpose, to show that the gate would notice.
    """

    server: str
    error: float
    tolerance: float
    counted: dict[str, int]
    sees: bool = False

    @property
    def ok(self) -> bool:
        """Whether it is as it should be: near the truth, or visibly off it; NaN is neither."""
        if self.sees:
            return self.error > self.tolerance and self.counted.get("sparse_steps", 0) > 0
        return self.error <= self.tolerance


def write_gate_model(folder: Path, shape: str, device: str) -> Path:
    """A model with weights: the shape's heads, few layers with dense MLPs, a small vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = find_shape(shape).numbers
    hidden = min(numbers["hidden_size"], 1024)
    changes = {"first_k_dense_replace": LAYERS} if "first_k_dense_replace" in numbers else {}
    config = model_config(
        shape, CONTEXT, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY, initializer_range=hidden**-0.5, tie_word_embeddings=False, **changes,
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{k: v for k, v in config.items() if k != "architectures"})
    )
    dtype = "bfloat16" if device == "cuda" else "float32"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return write_model(folder, config, dtype)


def sequences(device: str, seed: int) -> list[dict[str, Any]]:
    """Prompts and the tokens that every server is made to answer."""
    source = random.Random(seed)
    new = NEW_TOKENS[device]
    return [
        {
            "prompt": [source.randrange(2, VOCABULARY) for _ in range(length)],
            "force": [source.randrange(2, VOCABULARY) for _ in range(new)],
        }
        for length in PROMPTS[device]
    ]


def truth(
    folder: Path, asked: list[dict[str, Any]], device: str = "cpu", dtype: torch.dtype = torch.float64
) -> tuple[list[np.ndarray], float]:
    """Log probabilities of the decode steps, ``[steps, vocabulary]`` a sequence, and the largest logit.

    Computed by transformers over the whole sequence in float64 (norms and rotations in float32, as it has them), or in
    another `dtype`.
    """
    from transformers import AutoModelForCausalLM

    loaded = cast(torch.nn.Module, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa"))
    model = loaded.to(device, dtype).eval()
    set_temperature(model)
    rows, largest = [], 0.0
    with torch.no_grad():
        for sequence in asked:
            ids = torch.tensor([sequence["prompt"] + sequence["force"][:-1]], device=device)
            logits = model(ids).logits[0, len(sequence["prompt"]) :].double()
            largest = max(largest, float(logits.abs().max()))
            rows.append(logits.log_softmax(-1).cpu().numpy())
    return rows, largest


def set_temperature(model: Any) -> None:
    """Gives a transformers model with MLA the softmax scale that YaRN asks for.

    DeepSeek's own model and SGLang multiply it by the square of YaRN's ``mscale_all_dim``; transformers' DeepseekV2
    does not.
    """
    rope = model.config.rope_parameters
    if not rope.get("mscale_all_dim"):
        return
    mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5 * mscale**2


def load(paths: list[Path], steps: int) -> list[np.ndarray]:
    """What a server wrote: its decode steps, the prefill's left out. Raises RuntimeError if there are too few."""
    rows = []
    for path in paths:
        found = np.fromfile(path, dtype=np.float64).reshape(-1, VOCABULARY)
        if len(found) < steps:
            raise RuntimeError(f"the gate's server recorded {len(found)} steps, expected {steps}")
        rows.append(found[1:steps])
    return rows


def distance(rows: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference; NaN where anything is NaN."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(rows, wanted, strict=True)]))


def tolerance(dense_error: float, largest_logit: float, dtype: str) -> float:
    """How far a server may be off: twice the dense one's distance, and one rounding of the largest logit."""
    return 2.0 * dense_error + EPSILON[dtype] * largest_logit
