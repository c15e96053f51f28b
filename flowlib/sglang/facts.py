"""The numbers of the served model, read from SGLang's objects."""

from typing import Any

import torch

from flowlib.core.errors import OptionError
from flowlib.sglang.setup import ModelFacts
from flowlib.sglang.versions import adapter

_KV_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def facts_from_args(args: Any) -> ModelFacts:
    """The numbers as the server arguments promise them, before a model is loaded.

    Args:
        args: SGLang's server arguments in effect.
    """
    model = args.get_model_config()
    named = args.kv_cache_dtype
    if named != "auto" and named not in _KV_DTYPES:
        raise OptionError(f"--kv-cache-dtype is {named!r}, expected one of auto, {', '.join(_KV_DTYPES)} beside --flow")
    return _facts(
        model,
        adapter().attention_ranks(args),
        start_layer=0,
        num_layers=model.num_hidden_layers,
        page_size=args.page_size,
        kv_dtype=_KV_DTYPES.get(named, model.dtype),
        device=args.device,
    )


def facts_from_configurator(configurator: Any) -> ModelFacts:
    """The numbers as SGLang's ``KVCacheConfigurator`` builds the pool with them, on this rank."""
    from sglang.srt.runtime_context import get_parallel

    return _facts(
        configurator.model_config,
        get_parallel().attn_tp_size,
        start_layer=configurator.layer_info.start_layer,
        num_layers=configurator.layer_info.num_effective_layers,
        page_size=configurator.page_size,
        kv_dtype=configurator.kv_cache_dtype,
        device=configurator.device,
    )


def is_mla(model: Any) -> bool:
    """Whether a model keeps MLA latents; `model` is SGLang's ``ModelConfig``."""
    return model.attention_arch.name == "MLA"


def _facts(model: Any, tp_size: int, **numbers: Any) -> ModelFacts:
    if is_mla(model):
        rank = model.kv_lora_rank
        sizes = {"head_dim": rank + model.qk_rope_head_dim, "v_head_dim": rank, "num_kv_heads": 1, "kv_lora_rank": rank}
    else:
        heads = model.get_num_kv_heads(tp_size)
        sizes = {"head_dim": model.head_dim, "v_head_dim": model.v_head_dim, "num_kv_heads": heads}
    return ModelFacts(
        num_heads=model.num_attention_heads // tp_size,
        total_layers=model.num_hidden_layers,
        context_len=model.context_len,
        model_dtype=model.dtype,
        **sizes,
        **numbers,
    )
