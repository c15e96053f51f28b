"""The symbols of SGLang 0.5.16 that the plugin touches in this version alone."""

from flowlib.sglang.ledger import NATIVE, STABLE, Touch
from flowlib.sglang.symbols import ARGUMENTS

_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

TOUCHED = (
    Touch(
        "sglang.srt.server_args.ServerArgs",
        "the fields flow and flow_config, and the checks of the flags they go with",
        "replace",
        "plugins can add fields to ServerArgs",
        reads=(
            *ARGUMENTS,
            "enable_dp_attention",
            "get_model_config",
            "get_attention_backends",
            "override",
            "disable_chunked_prefix_cache",
            "enable_deterministic_inference",
        ),
        hook="flowlib.sglang.v0_5_16.args.FlowServerArgs",
    ),
    Touch(
        "sglang.srt.entrypoints.engine.Engine.server_args_class",
        "the Engine keywords flow and flow_config",
        "replace",
        "plugins can add fields to ServerArgs",
        hook="flowlib.sglang.v0_5_16.args.FlowServerArgs",
    ),
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_oot_mha_kv_pool",
        "the flow's fields in the KV pool of an out-of-tree platform",
        "around",
        NATIVE,
        takes=("max_total_num_tokens",),
        hook="flowlib.sglang.v0_5_16.hooks.build_oot_mha_pool",
    ),
    Touch(
        "sglang.srt.platforms.interface.SRTPlatform.get_mha_kv_pool_cls",
        "the pool class of an out-of-tree platform; gives the flow's class while the pool is built",
        "lend",
        NATIVE,
    ),
    Touch("sglang.srt.platforms.current_platform", "the out-of-tree platform", "read", STABLE),
    Touch(
        f"{_RUNNER}.capture_one_shape",
        "a second graph of a batch size, for short batches",
        "around",
        STABLE,
        takes=("size", "forward", "stream_idx", "variant_label"),
        hook="flowlib.sglang.v0_5_16.hooks.capture_one_shape",
    ),
    Touch(
        f"{_RUNNER}._resolve_lora_variant",
        "which of the two graphs a batch is replayed by",
        "around",
        STABLE,
        takes=("forward_batch",),
        hook="flowlib.sglang.v0_5_16.hooks.variant_label",
    ),
)
