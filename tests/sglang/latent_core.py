"""Called by ``latent_pool_job``: prefill in chunks, its gates, and decoding, driven as SGLang does it."""

import logging
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod as Method
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from flowlib.sglang import mla_prefill
from flowlib.sglang.backend import FlowBackend, attention_layers
from tests.sglang.graph_job import batch
from tests.sglang.latent_pool_job import RANK, ROPE, make
from tests.sglang.pool_job import said_by

HEADS, NOPE, V, SCALE = 4, 128, 128, 0.1147
CONTEXT, NEW = (0, 37, 5, 0), (3, 1, 6, 2)
PREFILLS = (("reference", 1), ("reference", 16), ("triton", 16), ("reference", 64))
"""Implementation and page size."""
PADDED = 2


def methods():
    """How a layer attends, by backend and what SGLang's handler says; ``*`` marks what is not SGLang's."""
    pools = {"latents": make(16, torch.float32, torch.float32)[1], "stock": SimpleNamespace()}
    pools["fp8"] = make(16, torch.float8_e4m3fn, torch.bfloat16)[1]

    def method(backend, said, cached=(60, 0, 40), pool="latents", threshold=100, **more):
        more = {"disabled": False, "deterministic": False, "mode": ForwardMode.EXTEND} | more
        attn = SimpleNamespace(
            chunked_prefix_cache_threshold=threshold, disable_chunked_prefix_cache=more["disabled"]
        )
        now = SimpleNamespace(forward_mode=more["mode"], extend_prefix_lens_cpu=list(cached))
        handler = mla_prefill.get_handler(lambda *_: lambda *_: said, object, backend)
        args = SimpleNamespace(enable_deterministic_inference=more["deterministic"])
        context = ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pools[pool]))
        with forward_context(context), patch("sglang.srt.runtime_context.get_server_args", lambda: args):
            found = handler(attn, now)
        return found.name + "*" * (found is not said)

    return {
        "triton": method("triton", Method.MLA),
        "triton, below the threshold": method("triton", Method.MLA, threshold=101),
        "triton, disabled": method("triton", Method.MLA, disabled=True),
        "triton, deterministic": method("triton", Method.MLA, deterministic=True),
        "triton, decode": method("triton", Method.MLA, mode=ForwardMode.DECODE),
        "triton, no prefix": method("triton", Method.MHA, cached=(0, 0), threshold=0),
        "triton, fp8": method("triton", Method.MLA, pool="fp8"),
        "triton, stock": method("triton", Method.MLA, pool="stock"),
        "flowlib": method("flowlib", Method.MLA, threshold=1000),
        "flowlib, no prefix": method("flowlib", Method.MHA, cached=(0, 0)),
        "flashinfer": method("flashinfer", Method.MHA_ONE_SHOT),
        "flashinfer, no prefix": method("flashinfer", Method.MHA_ONE_SHOT, cached=(0, 0)),
        "flashinfer, below the threshold": method("flashinfer", Method.MLA),
        "flashinfer, fp8": method("flashinfer", Method.MHA_CHUNKED_KV, pool="fp8"),
        "fa3": method("fa3", Method.MHA_ONE_SHOT),
    }


def gates():
    """Whether SGLang's load-time gate is left to decide, by prefill backend, flow and kind of model."""

    def left(prefill, flow="quest_mla", latents=True):
        args = SimpleNamespace(flow=flow, get_attention_backends=lambda: (prefill, "flowlib"))
        for name in ("attention_backend", "prefill_attention_backend"):
            setattr(args, name, prefill)
        done = mla_prefill.keep_prefix_cache(
            lambda **_: "stock", server_args=args, use_mla_backend=latents, is_draft_worker=False
        )
        return done == "stock"

    return [left("triton"), left("fa3"), left("triton", flow=None), left("triton", latents=False)]


def prefill(impl, page):
    """Errors of two layers' prefill, of a plain evaluation in float32, and what the layers share."""
    generator = torch.Generator().manual_seed(5)
    total = [c + n for c, n in zip(CONTEXT, NEW, strict=True)]
    width = -(-max(total) // page)
    pages = len(total) * width + 1
    _, pool = make(page, torch.float32, torch.float32, pages=pages, impl=impl)
    table = pages - 1 - (torch.arange(width) * len(total) + torch.arange(len(total))[:, None])
    slots = (table[:, :, None] * page + torch.arange(page)).flatten(1).to(torch.int32)
    latents = [torch.randn(n, RANK + ROPE, generator=generator) for n in total]
    rows = sum(NEW) + PADDED
    q, k, v = (torch.full((rows, HEADS, n), float("nan")) for n in (NOPE + ROPE, NOPE + ROPE, V))
    weight = torch.randn(RANK, HEADS * (NOPE + V), generator=generator) * RANK**-0.5
    q[: sum(NEW)] = torch.randn(sum(NEW), HEADS, NOPE + ROPE, generator=generator)
    attn = layer(weight)
    now = SimpleNamespace(
        extend_prefix_lens_cpu=list(CONTEXT), extend_seq_lens_cpu=list(NEW), req_pool_indices=torch.arange(len(total)),
        get_max_chunk_capacity=lambda: 16,
    )  # fmt: skip
    first = 0
    for latent, context, new in zip(latents, CONTEXT, NEW, strict=True):
        both = (latent[context:, :RANK] @ weight).view(new, HEADS, NOPE + V)
        k[first : first + new, :, :NOPE], v[first : first + new] = both[..., :NOPE], both[..., NOPE:]
        k[first : first + new, :, NOPE:] = latent[context:, None, RANK:]
        first += new
    found = []
    pools = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=slots))
    for layer_id in (0, 1):
        attn.layer_id = layer_id
        pool.kv_buffer[layer_id].fill_(float("nan"))
        for row, latent, context in zip(slots, latents, CONTEXT, strict=True):  # new tokens' latents are not read
            pool.kv_buffer[layer_id][row[:context].long(), 0] = latent[:context]
        with forward_context(ForwardContext(attn_backend=pools)):
            found.append(mla_prefill.chunked_core(None, attn, q.flatten(1), k, v, now))
    wanted, plain = (whole(q, latents, weight, dtype) for dtype in (torch.float64, torch.float32))
    errors = [float((out[: sum(NEW)] - wanted).abs().max()) for out in found]
    shared = vars(now)["_flowlib_prefix"].context
    return {
        "errors": errors, "plain": float((plain - wanted).abs().max()), "size": float(wanted.abs().max()),
        "padding": float(found[0][sum(NEW) :].abs().max()), "chunks": shared.lens.tolist(),
    }  # fmt: skip


def layer(weight):
    """What the loop reads of SGLang's ``DeepseekV2AttentionMLA``; its output projection changes nothing."""
    return SimpleNamespace(
        num_local_heads=HEADS, qk_head_dim=NOPE + ROPE, qk_nope_head_dim=NOPE, v_head_dim=V, kv_lora_rank=RANK,
        current_attention_backend="flowlib", attn_mha=SimpleNamespace(scaling=SCALE),
        kv_b_proj=lambda x: (x @ weight, None), o_proj=lambda x: (x, None),
    )  # fmt: skip


def whole(q, latents, weight, dtype):
    """Causal attention of the new tokens over context and themselves, one request at a time."""
    out, first = [], 0
    for latent, context, new in zip(latents, CONTEXT, NEW, strict=True):
        both = (latent[:, :RANK].to(dtype) @ weight.to(dtype)).view(-1, HEADS, NOPE + V)
        keys = torch.cat([both[..., :NOPE], latent[:, None, RANK:].to(dtype).expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + new].to(dtype), keys) * SCALE
        later = torch.arange(len(latent)) > context + torch.arange(new)[:, None]
        p = scores.masked_fill(later, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", p, both[..., NOPE:]).reshape(new, HEADS * V))
        first += new
    return torch.cat(out)


class Model(torch.nn.Module):
    """Two layers, each with attention over latents and over up-projected keys and values."""

    def __init__(self):
        super().__init__()
        sizes = {"absorbed": (RANK + ROPE, 1, RANK), "full": (NOPE + ROPE, HEADS, V)}
        for name, (size, heads, v) in sizes.items():
            layers = (RadixAttention(HEADS, size, SCALE, heads, i, v_head_dim=v) for i in (0, 1))
            self.add_module(name, torch.nn.ModuleList(layers))


class Reached(DeepseekV2AttentionMLA):
    """The attention layers of a layer of SGLang's class, without the rest."""

    def __init__(self, model, layer_id):
        torch.nn.Module.__init__(self)
        self.attn_mqa, self.attn_mha = model.absorbed[layer_id], model.full[layer_id]


def checks():
    """What the check at start says and logs, for layers of SGLang's class, of another, and of both."""
    setup, others, lines = make(16, torch.float32, torch.float32)[0], Model(), []
    whole, half = (torch.nn.ModuleList(Reached(others, i) for i in ids) for ids in ((0, 1), (0,)))
    half.append(others.full[1])
    half.append(others.absorbed[1])
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    mla_prefill.logger.addHandler(handler)
    mla_prefill.logger.setLevel(logging.INFO)
    answers = {}
    for name, model in {"whole": whole, "half": half, "others": others}.items():
        for prefill in ("flowlib", "triton"):
            check = partial(mla_prefill.check_prefill, prefill, setup, model, attention_layers(model))
            answers[f"{prefill}, {name}"] = [said_by({"check": check})["check"], len(lines)]
            lines.clear()
    mla_prefill.logger.removeHandler(handler)
    return answers


def backend(impl):
    """A backend over a pool of its own, whose slots hold the same latents for both implementations."""
    page = 16
    _, pool = make(page, torch.float32, torch.float32, pages=8, top_k=1, impl=impl, dense_below=0)
    generator, model = torch.Generator().manual_seed(4), Model()
    slots = torch.arange(8 * page)
    for one in model.absorbed:
        pool.set_kv_buffer(one, slots, torch.randn(len(slots), 1, RANK + ROPE, generator=generator), None)
    pages = torch.tensor([[5, 2, 7, 1, 0, 0], [6, 3, 4, 0, 0, 0], [0] * 6, [2, 4, 6, 1, 3, 0]])
    table = (pages[:, :, None] * page + torch.arange(page)).reshape(len(pages), 96).to(torch.int32)
    args = SimpleNamespace(
        get_attention_backends=lambda: ("triton", "flowlib"), enable_metrics=True, attention_backend="triton",
        prefill_attention_backend=None, decode_attention_backend="flowlib", enable_dp_attention=False, dp_size=1,
    )  # fmt: skip
    pools = {"token_to_kv_pool": pool, "req_to_token_pool": SimpleNamespace(req_to_token=table)}
    return FlowBackend(SimpleNamespace(**pools, model=model, server_args=args)), model


def graph():
    """Largest difference of two replayed steps by kernels and the same by the reference, and the counts of both."""
    (kernels, model), (reference, other) = backend("triton"), backend("reference")
    table = reference.req_to_token_pool.req_to_token
    kernels.init_cuda_graph_state(3, 3)
    static, worst = batch([2, 2, 2], [1, 1, 1], table), 0.0
    kernels.init_forward_metadata_out_graph(static, in_capture=True)
    for seed, (indices, lengths) in enumerate([([0, 1, 2], [60, 48, 1]), ([3, 0, 2], [81, 61, 1])]):
        now = batch(indices, lengths, table)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(now, name))
        kernels.init_forward_metadata_out_graph(static)
        kernels.init_forward_metadata_in_graph(static)
        reference.init_forward_metadata(now)
        generator = torch.Generator().manual_seed(seed)
        for one, twin in zip(model.absorbed, other.absorbed, strict=True):
            q = torch.randn(3, HEADS * (RANK + ROPE), generator=generator)
            k = torch.randn(3, 1, RANK + ROPE, generator=generator)
            found = kernels.forward_decode(q, k.clone(), k[..., :RANK].clone(), one, static)
            wanted = reference.forward_decode(q, k.clone(), k[..., :RANK].clone(), twin, now)
            worst = max(worst, float((found - wanted).abs().max()))
    fields = [
        float((mine[name] - theirs[name])[1:].abs().max())
        for mine, theirs in zip(*(b.token_to_kv_pool.flow_fields.values() for b in (kernels, reference)), strict=True)
        for name in mine
    ]
    return {"worst": worst, "fields": max(fields), "counts": [b.counters.read() for b in (kernels, reference)]}
