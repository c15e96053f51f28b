"""Run by ``test_latent_pool``: SGLang's pool of latents with flowlib's fields, its refusals and its hooks."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.plugins import load_plugins

from flowlib.sglang.mla_pool import latent_pool_class
from flowlib.sglang.options import FlowConfig
from flowlib.sglang.setup import FlowSetup, ModelFacts
from tests.sglang.pool_job import said_by

RANK, ROPE, PAGES = 512, 64, 6
FLOWS = (
    ("quest_mla", 1), ("quest_mla", 64), ("lserve_centroid_mla", 64), ("rope_aware_block_sparse_mla", 16),
    ("rope_unaware_block_sparse_mla", 16),
)  # fmt: skip


def make(page, dtype, model_dtype, flow="quest_mla", pages=PAGES, **config):
    facts = ModelFacts(RANK + ROPE, RANK, 4, 1, 0, 2, 2, page, 96, dtype, model_dtype, "cpu", RANK)
    setup = FlowSetup(flow, FlowConfig(**config), facts)
    pool = latent_pool_class(MLATokenToKVPool, setup)(
        pages * page - page, page_size=page, dtype=dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return setup, pool


def layer(layer_id, scaling=0.1):
    return SimpleNamespace(layer_id=layer_id, scaling=scaling, k_scale_float=None, v_scale_float=None)


def wanted(latent, field, name):
    """A page's field from its latents ``[page, 576]``: means or bounds of as many parts as the field has rows."""
    parts = latent.view(field.shape[0], -1, RANK + ROPE)
    return {"centroid": parts.mean(1), "latent_max": parts.amax(1), "latent_min": parts.amin(1)}[name]


def written(flow, page):
    """Largest difference of the fields of pages that whole latents and parts of latents finish, chunk by chunk."""
    generator = torch.Generator().manual_seed(1)
    _, pool = make(page, torch.float32, torch.float32, flow, dense_layers=(0,))
    worst = []
    for parts in (False, True):
        latent = torch.randn(2 * page, 1, RANK + ROPE, generator=generator)
        slots = torch.cat([torch.arange(3 * page, 4 * page), torch.arange(page, 2 * page)])
        cut = max(1, page // 2)
        for begin, end in [(0, cut), (cut, 2 * page - 1), (2 * page - 1, 2 * page)]:
            rows = latent[begin:end]
            if parts:
                pool.set_mla_kv_buffer(layer(1), slots[begin:end], rows[..., :RANK], rows[..., RANK:])
            else:
                pool.set_kv_buffer(layer(1), KVWriteLoc(slots[begin:end]), rows, None)
        for at, rows in ((3, latent[:page, 0]), (1, latent[page:, 0])):
            worst.append(float((pool.flow_pages(1)[at] - rows).abs().max()))
            for name, field in pool.flow_fields[1].items():
                worst.append(float((field[at, 0] - wanted(rows, field[at, 0], name)).abs().max()))
    return {"worst": max(worst), "layers": list(pool.flow_fields), "compared": len(worst)}


def memory():
    """Bytes of the fields, and what SGLang's budget is told."""
    setup, pool = make(16, torch.bfloat16, torch.bfloat16)
    fields = sum(f.nbytes for by_name in pool.flow_fields.values() for f in by_name.values())
    return [fields, setup.field_bytes_per_token * PAGES * 16]


def built():
    """The pools that SGLang's own builder makes with a flow and without, and whether its name is its own again."""
    from sglang.srt.mem_cache import kv_cache_configurator as theirs

    def pool(flow):
        args = SimpleNamespace(
            flow=flow, flow_config=None, page_size=16, enable_memory_saver=False, disable_radix_cache=False
        )
        model = SimpleNamespace(
            attention_arch=SimpleNamespace(name="MLA"), kv_lora_rank=RANK, qk_rope_head_dim=ROPE, num_attention_heads=4,
            num_hidden_layers=2, context_len=96, dtype=torch.float32,
        )  # fmt: skip
        layers = SimpleNamespace(start_layer=0, end_layer=2, num_effective_layers=2)
        configurator = SimpleNamespace(
            server_args=args, model_config=model, layer_info=layers, kv_cache_dtype=torch.float32, device="cpu",
            is_draft_worker=False, page_size=16,
        )  # fmt: skip
        parallel = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)
        with patch("sglang.srt.runtime_context.get_parallel", lambda: parallel):
            return theirs.KVCacheConfigurator._build_mla_kv_pool(configurator, max_total_num_tokens=80)

    ours, stock = pool("quest_mla"), pool(None)
    names = [type(ours).__name__, sorted(ours.flow_fields[1]), type(stock).__name__]
    return [*names, theirs.MLATokenToKVPool is MLATokenToKVPool]


def refused():
    _, pool = make(16, torch.float32, torch.float32)
    loc = torch.tensor([20])
    setup, _ = make(16, torch.bfloat16, torch.bfloat16)
    numbers = {
        "page_size": 16, "dtype": torch.bfloat16, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "layer_num": 2,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    made = latent_pool_class(MLATokenToKVPool, setup)
    return said_by(
        {
            "move": lambda: pool.move_kv_cache(loc, loc),
            "load": lambda: pool.load_cpu_copy([], loc),
            "size": lambda: made(PAGES * 16 - 3, **numbers),
            "rope": lambda: made(PAGES * 16 - 16, **numbers | {"qk_rope_head_dim": 32}),
            "another SGLang": other_version,
            "indexer": lambda: made(PAGES * 16 - 16, **numbers, use_dsa=True),
        }
    )


def other_version():
    """The check of server arguments for an MLA model with an SGLang whose MLA is not known."""
    from flowlib.sglang import args

    with patch.object(args, "adapter", lambda: SimpleNamespace(LATENTS=False)):
        args._refuse_latents()


def chosen():
    """The backends that a flow over latents chooses before SGLang resolves its arguments, and what is logged."""
    from flowlib.sglang import args as ours

    cases = {
        "a CPU": (None, "cpu", {}),
        "a GPU": (None, "cuda", {}),
        "cpu:0": ("cpu:0", None, {}),
        "triton beside": ("cuda", None, {"attention_backend": "triton", "prefill_attention_backend": "flowlib"}),
    }
    answers, names = {}, ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    for name, (device, found, given) in cases.items():
        args = SimpleNamespace(**dict.fromkeys(names) | given, flow="quest_mla", device=device)
        with patch.object(ours, "get_device", lambda found=found: found), patch.object(ours.logger, "info") as info:
            ours._choose_backend(args, latents=True)
        lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
        answers[name] = [[getattr(args, flag) for flag in names], lines]
    return answers


def left(cases):
    """What becomes of server arguments."""
    from sglang.srt.server_args import ServerArgs

    answers = {}
    for name, keywords in cases.items():
        try:
            args = ServerArgs(**keywords)
            answers[name] = [args.attention_backend, *args.get_attention_backends(), args.page_size]
        except SystemExit as error:
            answers[name] = str(error.code)
    return answers


if __name__ == "__main__":
    from tests.sglang import latent_core

    load_plugins()
    answer = {"written": {f"{flow} {page}": written(flow, page) for flow, page in FLOWS}}
    answer |= {"built": built(), "memory": memory(), "refused": refused(), "chosen": chosen()}
    answer |= {"methods": latent_core.methods(), "gates": latent_core.gates(), "checks": latent_core.checks()}
    answer |= {"prefills": [latent_core.prefill(*case) for case in latent_core.PREFILLS], "graph": latent_core.graph()}
    print("ANSWER", json.dumps(answer | {"left": left(json.loads(sys.argv[1]))}))
