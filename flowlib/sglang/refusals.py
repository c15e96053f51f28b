"""What a flow can't serve right, each with the flag or the layer it is about and the reason.

The tables read SGLang's server arguments, model configuration and attention layers; nothing here imports SGLang.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import flowlib
from flowlib.compiler.verify import refuse_shared_state
from flowlib.core.attention import Softmax, check_normaliser
from flowlib.core.errors import BackendError, OptionError


@dataclass(frozen=True)
class Refusal:
    """Something that is refused: `wrong` tells whether it is the case, `what` names it, `why` says why not."""

    wrong: Callable[[Any], Any]
    what: str
    why: str


MISSES_WRITES = "K and V would reach the pool without an update of the flow's fields"

FLAGS = (
    Refusal(
        lambda a: a.speculative_algorithm, "--speculative-algorithm", "draft tokens are verified by dense attention"
    ),
    Refusal(lambda a: a.enable_mixed_chunk, "--enable-mixed-chunk", "decode tokens would take the dense prefill path"),
    Refusal(lambda a: a.enable_hisparse, "--enable-hisparse", "it is another sparse attention with its own pools"),
    Refusal(lambda a: a.enable_hierarchical_cache, "--enable-hierarchical-cache", MISSES_WRITES),
    Refusal(lambda a: a.enable_lmcache, "--enable-lmcache", MISSES_WRITES),
    Refusal(lambda a: a.enable_flexkv, "--enable-flexkv", MISSES_WRITES),
    Refusal(lambda a: a.radix_cache_backend, "--radix-cache-backend", MISSES_WRITES),
    Refusal(lambda a: a.disaggregation_mode != "null", "--disaggregation-mode", MISSES_WRITES),
    Refusal(lambda a: a.enable_page_major_kv_layout, "--enable-page-major-kv-layout", "the flow reads the layout NHD"),
    Refusal(lambda a: a.enable_unified_memory, "--enable-unified-memory", "the flow keeps its fields in its own pool"),
    Refusal(lambda a: a.prefill_only_disable_kv_cache, "--prefill-only-disable-kv-cache", "there is no KV cache then"),
    Refusal(lambda a: a.is_embedding, "--is-embedding", "an embedding model has no decode step"),
    Refusal(lambda a: a.dllm_algorithm, "--dllm-algorithm", "a diffusion model has no decode step of one token"),
    Refusal(lambda a: a.dcp_size > 1, "--dcp-size", "the pages of a request would lie on several ranks"),
    Refusal(lambda a: a.attn_cp_size > 1, "--attn-cp-size", "the pages of a request would lie on several ranks"),
    Refusal(lambda a: a.enable_two_batch_overlap, "--enable-two-batch-overlap", "a step's plan serves one batch"),
    Refusal(lambda a: a.enable_pdmux, "--enable-pdmux", "a step's plan serves one stream"),
    Refusal(
        lambda a: a.quantization_param_path,
        "--quantization-param-path",
        "it sets KV scales that neither the prefill backends nor the flow would use",
    ),
    Refusal(lambda a: a.enable_torch_compile, "--enable-torch-compile", "a flow's step is not traced by torch.compile"),
    Refusal(
        lambda a: a.kv_cache_dtype in ("nvfp4", "fp4_mx_block16", "mxfp8", "fp8_e5m2", "fp4_e2m1"),
        "--kv-cache-dtype",
        "the flow reads bfloat16, float16, float32 and fp8_e4m3 pools",
    ),
)

WRITES_FP8_ITSELF = ("trtllm_mha", "aiter", "trtllm_mla", "tokenspeed_mla", "cutedsl_mla")
"""Prefill backends that write K and V, or latents, into a float8 pool past its methods."""

VARIABLES = (
    Refusal(lambda e: _is_on(e, "SGLANG_USE_HND_KVCACHE"), "SGLANG_USE_HND_KVCACHE", "the flow reads the layout NHD"),
    Refusal(
        lambda e: _is_on(e, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "the pool's fields are allocated for its size at start",
    ),
)

MODELS = (
    Refusal(lambda m: m.is_encoder_decoder, "an encoder-decoder", "cross attention reads no pages of the request"),
    Refusal(lambda m: m.is_hybrid_swa, "hybrid sliding-window layers", "they keep two pools"),
    Refusal(lambda m: m.has_attention_sinks, "attention sinks", "they add a term to the softmax"),
    Refusal(lambda m: m.attention_chunk_size, "chunked attention", "a token does not see its whole row"),
    Refusal(
        lambda m: getattr(getattr(m, "hf_text_config", m.hf_config), "llama_4_scaling", None),
        "a temperature by position (llama_4_scaling)",
        "SGLang's MLA prefill with keys of each head leaves it out",
    ),
    Refusal(
        lambda m: getattr(m.hf_config, "dual_chunk_attention_config", None),
        "dual chunk attention",
        "a key's position depends on the query's",
    ),
)

LAYERS = (
    Refusal(lambda x: x.logit_cap, "a logit cap", "the flow's softmax has none"),
    Refusal(lambda x: x.sliding_window_size > -1, "a sliding window", "a token does not see its whole row"),
    Refusal(lambda x: x.is_cross_attention, "cross attention", "it reads no pages of the request"),
    Refusal(lambda x: x.attn_type.name != "DECODER", "non-causal attention", "a token sees later ones"),
    Refusal(lambda x: x.xai_temperature_len > 0, "a temperature by length", "the flow's softmax has none"),
    Refusal(lambda x: x.pos_encoding_mode != "NONE", "positions added in attention", "the flow's softmax adds none"),
    Refusal(lambda x: x.use_irope, "interleaved RoPE with chunked attention", "a token does not see its whole row"),
    Refusal(lambda x: x.tp_k_head_num != x.tp_v_head_num, "unequal numbers of K and V heads", "pages hold both"),
)


def refuse_flags(args: Any, more: Iterable[Refusal] = ()) -> None:
    """Raises an OptionError that names the first flag or variable a flow can't be served with.

    Args:
        args: SGLang's server arguments.
        more: flags that the installed SGLang has beside those of :data:`FLAGS`.
    """
    for refusal in (*FLAGS, *more):
        if refusal.wrong(args):
            raise OptionError(f"{refusal.what} can't be used together with --flow: {refusal.why}. Leave it off")
    for refusal in VARIABLES:
        if refusal.wrong(os.environ):
            raise OptionError(f"{refusal.what}=1 can't be used together with --flow: {refusal.why}. Unset it")


def refuse_prefill(backend: str | None, float8: bool) -> None:
    """Raises an OptionError for a prefill backend that would write a float8 pool without updating the fields."""
    if float8 and backend in WRITES_FP8_ITSELF:
        raise OptionError(
            f"--prefill-attention-backend {backend} can't be used with an fp8 KV cache together with --flow: "
            f"{MISSES_WRITES}. Choose flashinfer, fa3 or triton"
        )


def refuse_latent_prefill(args: Any, own: str, chunked: Iterable[str]) -> None:
    """Raises an OptionError for a prefill backend of an MLA model that can't do it with these arguments.

    Args:
        args: the arguments in effect.
        own: the name of flowlib's backend.
        chunked: the backends whose prefixes are attended in flowlib's chunks.
    """
    backend, graph = args.get_attention_backends()[0], args.cuda_graph_config.prefill.backend
    other = f"choose another --prefill-attention-backend than {backend}"
    absorbed = graph == "tc_piecewise" and backend != own  # SGLang attends absorbed then
    if backend in chunked and graph != "disabled" and not absorbed:
        raise OptionError(
            f"a CUDA graph of prefill ({graph}) can't capture chunks, whose number is the batch's: add "
            f"--cuda-graph-backend-prefill disabled, or {other}"
        )
    if backend in ("torch_native", "flex_attention"):
        raise OptionError(
            f"--prefill-attention-backend {backend} can't prefill an MLA model: it reads K and V of each head from the "
            f"pool, which keeps latents. Give --prefill-attention-backend {own}"
        )
    if backend != own:
        return
    if args.disable_chunked_prefix_cache:
        raise OptionError(f"--disable-chunked-prefix-cache: {own} prefills in chunks only; leave it off, or {other}")
    if args.enable_deterministic_inference:
        raise OptionError(
            f"--enable-deterministic-inference: chunks depend on the batch; give --attention-backend triton, or {other}"
        )
    if args.kv_cache_dtype == "fp8_e4m3":
        raise OptionError(f"--kv-cache-dtype fp8_e4m3: {own} prefills from latents as the model has them; {other}")


def refuse_model(config: Any) -> None:
    """Raises a BackendError that names what in the model a flow can't serve."""
    for refusal in MODELS:
        if refusal.wrong(config):
            names = ", ".join(config.hf_config.architectures or ["the model"])
            raise BackendError(f"{names} has {refusal.what}, which --flow can't serve: {refusal.why}")


def refuse_hybrid(config: Any, recurrent: bool, own_sparse: bool) -> None:
    """Raises a BackendError for a model whose layers do not all keep K and V of every token.

    Args:
        config: SGLang's model configuration.
        recurrent: whether it has Mamba or linear attention layers.
        own_sparse: whether its attention chooses tokens itself.
    """
    names = ", ".join(config.hf_config.architectures or ["the model"])
    if recurrent:
        raise BackendError(
            f"{names} has recurrent layers (Mamba or linear attention), which --flow can't serve: they keep two pools"
        )
    if own_sparse:
        raise BackendError(f"{names} has sparse attention of its own, which --flow can't serve: it keeps other pools")


def refuse_normaliser(name: str, flow: Any) -> None:
    """Raises an OptionError for a flow that attends with something else than softmax, as prefill does."""
    attention = check_normaliser(type(flow).__name__, flow.attention)
    if not isinstance(attention, Softmax):
        raise OptionError(
            f"flow {name!r} attends with {attention}, which --flow can't serve: SGLang's prefill is softmax attention, "
            "and no model is trained to prefill with one and decode with the other"
        )


def refuse_other_attention(name: str, flow: Any, config: Any, serves_latents: bool) -> None:
    """Raises an OptionError for a flow over MLA latents with a model that keeps K and V, and the other way round.

    Args:
        name: the name given to ``--flow``.
        flow: the flow.
        config: SGLang's model configuration.
        serves_latents: whether flows over MLA latents are served by the installed SGLang.
    """
    latents, model = isinstance(flow, flowlib.vFlowMLA), ", ".join(config.hf_config.architectures or ["the model"])
    if latents == (config.attention_arch.name == "MLA"):
        return
    if latents:
        raise OptionError(
            f"flow {name!r} reads MLA latents, and {model} keeps K and V of each head: choose a flow over K and V, "
            "such as gqa_quest_sparse_attention (`flowlib list` prints them all)"
        )
    fix = f"choose one of {', '.join(flowlib.list_flows(mla=True))}"
    if not serves_latents:
        fix = "no flow is served for such a model with this version of SGLang, leave --flow off"
    raise OptionError(f"flow {name!r} reads K and V of each head, and {model} keeps MLA latents: {fix}")


def refuse_layers(layers: Iterable[Any], head_dim: int, v_head_dim: int) -> None:
    """Raises a BackendError that names the first attention layer a flow can't serve, and why."""
    seen: set[int] = set()
    for layer in layers:
        if layer.layer_id in seen:
            raise BackendError(
                f"two attention layers have the id {layer.layer_id}, which --flow can't serve: they share K and V"
            )
        seen.add(layer.layer_id)
        _refuse_layer(layer)
        if (layer.qk_head_dim, layer.v_head_dim) != (head_dim, v_head_dim):
            raise BackendError(
                f"layer {layer.layer_id} has heads of {layer.qk_head_dim} and {layer.v_head_dim} (K and V), "
                f"expected {head_dim} and {v_head_dim} as in the KV pool"
            )


def refuse_latent_layers(layers: Iterable[Any], head_dim: int, v_head_dim: int) -> None:
    """As :func:`refuse_layers` for a model with MLA: its layers attend over latents, in prefill over K and V, too.

    Args:
        layers: all attention layers; those of one id read the same latents.
        head_dim, v_head_dim: channels of a latent, and of its content.
    """
    found, absorbed = list(layers), []
    for layer in found:
        _refuse_layer(layer)
        if layer.k_scale_float not in (None, 1.0):
            raise BackendError(
                f"layer {layer.layer_id} has an fp8 k_scale of {layer.k_scale_float}, which --flow can't serve: "
                "SGLang's MLA prefill stores latents without it"
            )
        if (layer.qk_head_dim, layer.v_head_dim) == (head_dim, v_head_dim):
            absorbed.append(layer.layer_id)
    for number in sorted({layer.layer_id for layer in found}):
        if absorbed.count(number) != 1:
            raise BackendError(
                f"{absorbed.count(number)} attention layers with the id {number} attend over latents of {head_dim} "
                f"channels with {v_head_dim} of content, expected 1"
            )


def _refuse_layer(layer: Any) -> None:
    for refusal in LAYERS:
        if refusal.wrong(layer):
            raise BackendError(f"layer {layer.layer_id} has {refusal.what}, which --flow can't serve: {refusal.why}")


def refuse_state(name: str, state_fields: tuple[str, ...], disable_radix_cache: bool) -> None:
    """Raises an OptionError when a flow with state would share pages between requests."""
    if not disable_radix_cache:
        refuse_shared_state(name, state_fields)


def refuse_chunks(chunked_prefill_size: int | None, page_size: int) -> None:
    """Raises an OptionError when a prefill chunk does not end at a page's end."""
    if chunked_prefill_size is not None and chunked_prefill_size > 0 and chunked_prefill_size % page_size:
        raise OptionError(
            f"--chunked-prefill-size is {chunked_prefill_size}, expected a multiple of the page size {page_size}"
        )


def _is_on(variables: Any, name: str) -> bool:
    return variables.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")
