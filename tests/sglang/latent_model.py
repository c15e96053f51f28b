"""A small model of DeepSeek-V2-Lite's shape with random weights, and its forward pass in float64, written apart."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, LAYERS, HEADS = 512, 128, 2, 4
RANK, ROPE, NOPE, V = 512, 64, 128, 128
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "float32",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "max_position_embeddings": 2048,
    "rope_theta": 10000, "rope_scaling": YARN, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip


def write(folder):
    """Writes configuration and weights in float32; attention weighs much, so that what it reads decides tokens."""
    generator = torch.Generator().manual_seed(7)

    def random(rows, columns, size=1.0):
        return torch.randn(rows, columns, generator=generator) * size * columns**-0.5

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN, HIDDEN**0.5), "lm_head.weight": random(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": random(HEADS * (NOPE + ROPE), HIDDEN, 2.0),
            "self_attn.kv_a_proj_with_mqa": random(RANK + ROPE, HIDDEN, 2.0),
            "self_attn.kv_b_proj": random(HEADS * (NOPE + V), RANK),
            "self_attn.o_proj": random(HIDDEN, HEADS * V, 3.0),
            "mlp.gate_proj": random(2 * HIDDEN, HIDDEN),
            "mlp.up_proj": random(2 * HIDDEN, HIDDEN),
            "mlp.down_proj": random(HIDDEN, 2 * HIDDEN),
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN, "self_attn.kv_a_layernorm": RANK}
        weights |= {f"model.layers.{i}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Model:
    """The model in float64, with up-projected keys and values of all heads: nothing is absorbed, cached or chunked."""

    def __init__(self, folder):
        self.weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
        mscale = 0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1.0
        self.scale = (NOPE + ROPE) ** -0.5 * mscale**2

    def next_tokens(self, ids):
        """The likeliest token behind each position of `ids`."""
        w = self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            x = x + self.attention(norm(x, w[at + "input_layernorm.weight"]), at + "self_attn.")
            y = norm(x, w[at + "post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T)
            x = x + (gate * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        return (norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T).argmax(-1).tolist()

    def attention(self, x, at):
        w, n = self.weights, len(x)
        q = (x @ w[at + "q_proj.weight"].T).view(n, HEADS, NOPE + ROPE)
        latent = x @ w[at + "kv_a_proj_with_mqa.weight"].T
        content = norm(latent[:, :RANK], w[at + "kv_a_layernorm.weight"])
        both = (content @ w[at + "kv_b_proj.weight"].T).view(n, HEADS, NOPE + V)
        angles = torch.arange(n, dtype=torch.float64)[:, None, None] * frequencies()
        scores = torch.einsum("qhd,khd->hqk", q[..., :NOPE], both[..., :NOPE])
        q_rope, k_rope = turned(q[..., NOPE:], angles), turned(latent[:, None, RANK:], angles)[:, 0]
        scores += torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        p = (scores * self.scale).masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", p, both[..., NOPE:]).reshape(n, HEADS * V) @ w[at + "o_proj.weight"].T


def norm(x, weight):
    """RMS norm."""
    return x * (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * weight


def frequencies():
    """YaRN's angle a position, ``[ROPE / 2]``: slow channels are stretched by the factor, fast ones are not."""
    base, length = CONFIG["rope_theta"], YARN["original_max_position_embeddings"]
    channel = torch.arange(ROPE // 2, dtype=torch.float64)
    plain = base ** (-2.0 * channel / ROPE)

    def channel_of(turns):
        return ROPE * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(channel_of(YARN["beta_fast"])), math.ceil(channel_of(YARN["beta_slow"]))
    stretched = ((channel - max(low, 0)) / (min(high, ROPE - 1) - max(low, 0))).clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / YARN["factor"] * stretched


def turned(x, angles):
    """Rotary embedding of neighbouring channels."""
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
