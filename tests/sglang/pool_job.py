"""Called by ``objects_job`` for ``test_pool``: SGLang's real pool with flowlib's fields, without an engine."""

import os
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, PageMajorMHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from flowlib.core.errors import BackendError
from flowlib.sglang import hooks
from flowlib.sglang.options import FlowConfig
from flowlib.sglang.pool import pool_class
from flowlib.sglang.setup import FlowSetup, ModelFacts

PAGE, HEADS, DIM, PAGES = 16, 2, 64, 8


def make(kv_dtype, model_dtype, **config):
    facts = ModelFacts(DIM, DIM, 6, HEADS, 0, 2, 2, PAGE, 96, kv_dtype, model_dtype, "cpu")
    setup = FlowSetup("gqa_quest_sparse_attention", FlowConfig(**config), facts)
    pool = pool_class(MHATokenToKVPool, setup)(
        PAGES * PAGE - PAGE,
        page_size=PAGE,
        dtype=kv_dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    return setup, pool


def layer(layer_id, k_scale=None, v_scale=None):
    return SimpleNamespace(layer_id=layer_id, scaling=0.125, k_scale_float=k_scale, v_scale_float=v_scale)


def rows(count, dtype, generator):
    return torch.randn(count, HEADS, DIM, generator=generator).to(dtype)


def chunks_and_decode():
    """A page is finished by the second of two chunks, another by single decode tokens; then both are reused."""
    generator = torch.Generator().manual_seed(1)
    _, pool = make(torch.float32, torch.float32)
    worst = []
    for _ in range(2):
        k = rows(2 * PAGE, torch.float32, generator)
        slots = torch.cat([torch.arange(3 * PAGE, 4 * PAGE), torch.arange(PAGE, 2 * PAGE)])
        for begin, end in [(0, 10), (10, 20), *((i, i + 1) for i in range(20, 32))]:
            pool.set_kv_buffer(layer(1), KVWriteLoc(slots[begin:end]), k[begin:end].clone(), k[begin:end].clone())
        fields = pool.flow_fields[1]
        for page, keys in ((3, k[:PAGE]), (1, k[PAGE:])):
            worst.append(float((fields["k_max"][page, :, 0] - keys.amax(0)).abs().max()))
            worst.append(float((fields["k_min"][page, :, 0] - keys.amin(0)).abs().max()))
    untouched = float(pool.flow_fields[0]["k_max"].abs().max())
    return {"worst": max(worst), "other layer": untouched}


def float8(k_scale):
    """Summaries of a float8 pool in units of the model's keys, relative to what float8 stores."""
    generator = torch.Generator().manual_seed(2)
    _, pool = make(torch.float8_e4m3fn, torch.bfloat16)
    k = rows(PAGE, torch.bfloat16, generator)
    pool.set_kv_buffer(layer(0, k_scale, k_scale), torch.arange(PAGE, 2 * PAGE), k.clone(), k.clone(), k_scale, k_scale)
    stored = (k / k_scale).to(torch.float8_e4m3fn).float() * k_scale
    found = pool.flow_fields[0]["k_max"][1, :, 0].float()
    return float(((found - stored.amax(0)).abs() / stored.amax(0).abs()).max())


def summaries():
    """How far float8 bounds lie inside of the keys, and outside, relative to the keys; and the bytes of all fields."""
    generator = torch.Generator().manual_seed(3)
    setup, pool = make(torch.bfloat16, torch.bfloat16, dense_layers=(0,), summary_dtype="fp8_e4m3", summary_scale=0.25)
    k = rows(PAGE, torch.bfloat16, generator)
    pool.set_kv_buffer(layer(1), torch.arange(PAGE, 2 * PAGE), k.clone(), k.clone())
    store = pool.flow_store(layer(1))
    high = store.values("k_max")[1, :, 0].float() - k.float().amax(0)
    low = k.float().amin(0) - store.values("k_min")[1, :, 0].float()
    size = k.float().abs().amax(0)
    bounds = torch.stack([high, low])
    nbytes = sum(f.numel() * f.element_size() for f in pool.flow_fields[1].values())
    return {
        "inside": float(bounds.min()),
        "outside": float((bounds / size).max()),
        "bytes": [nbytes, setup.field_bytes_per_token * PAGES * PAGE],
        "scales": {str(i): s.tolist() for i, s in pool.flow_scales.items()},
        "saturated": store.saturated_bounds(),
    }


def refused():
    """What is said to writes that would leave the fields behind."""
    _, pool = make(torch.float32, torch.float32, dense_layers=(1,))
    _, eighth = make(torch.float8_e4m3fn, torch.bfloat16)
    k, loc = torch.zeros(1, HEADS, DIM), torch.tensor([20])
    tries = {
        "prefix": lambda: pool.set_kv_buffer_prefix_valid(layer(0), loc[None], loc, k, k),
        "move": lambda: pool.move_kv_cache(loc, loc),
        "load": lambda: pool.load_cpu_copy([], loc, mamba_indices=None),
        "other id": lambda: pool.set_kv_buffer(layer(0), loc, k, k, layer_id_override=1),
        "lost scale": lambda: eighth.set_kv_buffer(layer(0, 2.0), loc, k.bfloat16(), k.bfloat16()),
    }
    return said_by(tries)


def layouts():
    """What is said to pools that do not hold K and V as ``[slots, kv heads, head_dim]`` of plain numbers."""
    setup, _ = make(torch.bfloat16, torch.bfloat16)
    numbers = {
        "page_size": PAGE, "dtype": torch.bfloat16, "head_num": HEADS, "head_dim": DIM, "layer_num": 2, "device": "cpu",
        "enable_memory_saver": False,
    }

    class Quantised(MHATokenToKVPool):
        is_quantized_kv_cache = True

    def hnd():
        os.environ["SGLANG_USE_HND_KVCACHE"] = "1"
        try:
            pool_class(MHATokenToKVPool, setup)(PAGES * PAGE - PAGE, **numbers)
        finally:
            del os.environ["SGLANG_USE_HND_KVCACHE"]

    tries = {
        "hnd": hnd,
        "vectorised": lambda: pool_class(MHATokenToKVPool, setup)(
            PAGES * PAGE - PAGE, **numbers, kv_cache_layout="vectorized_5d"
        ),
        "page major": lambda: pool_class(PageMajorMHATokenToKVPool, setup)(PAGES * PAGE - PAGE, **numbers),
        "quantised": lambda: pool_class(Quantised, setup)(PAGES * PAGE - PAGE, **numbers),
        "size": lambda: pool_class(MHATokenToKVPool, setup)(PAGES * PAGE - 3, **numbers),
        "heads": lambda: pool_class(MHATokenToKVPool, setup)(PAGES * PAGE - PAGE, **numbers | {"head_num": 1}),
    }
    return said_by(tries)


def fused_writes():
    """The hooks of models that write K and V inside their RoPE kernel, with and without a flow's pool."""
    _, ours = make(torch.bfloat16, torch.bfloat16)
    answers = {}
    for name, pool in (("flow", ours), ("stock", SimpleNamespace())):
        context = ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))
        with forward_context(context):
            enabled = hooks.enable_fused_set_kv_buffer(lambda *_: True, None)
            said = said_by({"made": lambda: hooks.create_fused_set_kv_buffer_arg(lambda *_: "argument", None)})
        answers[name] = [enabled, said["made"]]
    return answers


def said_by(tries):
    """The message of the BackendError of each attempt; ``None`` where there was none."""
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
            said[name] = None
        except BackendError as error:
            said[name] = str(error)
    return said


def memory():
    """Bytes of the fields beside what SGLang's budget is told, and the layers that have fields."""
    setup, pool = make(torch.float32, torch.float32, dense_layers=(0,))
    fields = sum(
        f.numel() * f.element_size() for layer_fields in pool.flow_fields.values() for f in layer_fields.values()
    )
    return {"fields": fields, "told": setup.field_bytes_per_token * PAGES * PAGE, "layers": list(pool.flow_fields)}


def answer():
    found = {"chunks": chunks_and_decode(), "float8": [float8(s) for s in (1.0, 0.03, 4.0)]}
    found |= {"refused": refused(), "layouts": layouts(), "fused": fused_writes()}
    return found | {"memory": memory(), "summaries": summaries()}
