"""The symbols of SGLang 0.5.23 that the plugin touches in this version alone."""

from flowlib.sglang.ledger import STABLE, Touch
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
            "attn_dp_size",
            "enable_kv_cache_sharding",
            "enable_unified_cache_external_linker",
            "enable_pd_role_switch",
            "enable_nvidia_megakernel",
            "enable_amd_monokernel",
            "startup_weight_load_mode",
            "_resolution_finished",
        ),
        hook="flowlib.sglang.v0_5_23.args.FlowServerArgs",
    ),
    Touch(
        "sglang.srt.entrypoints.engine.Engine.server_args_class",
        "the Engine keywords flow and flow_config",
        "replace",
        "plugins can add fields to ServerArgs",
        hook="flowlib.sglang.v0_5_23.args.FlowServerArgs",
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "the checks before and behind SGLang's own",
        "extend",
        STABLE,
    ),
    Touch(
        "sglang.srt.arg_groups.overrides.declare_resolution",
        "flow_served in /server_info",
        "call",
        STABLE,
        takes=("server_args", "source", "fields"),
    ),
    Touch(
        "sglang.srt.arg_groups.overrides.resolution_result",
        "the arguments in effect",
        "call",
        STABLE,
        takes=("server_args", "field", "default"),
    ),
    Touch(
        "sglang.srt.arg_groups.overrides.model_config_of", "the model's numbers", "call", STABLE, takes=("server_args",)
    ),
    Touch(
        "sglang.srt.arg_groups.overrides.attention_backends_of",
        "the backends of prefill and decode",
        "call",
        STABLE,
        takes=("cfg",),
    ),
    Touch("sglang.srt.runtime_context.attn_tp_size_of", "the heads of a rank", "call", STABLE, takes=("cfg",)),
    Touch(
        f"{_RUNNER}.capture_one_shape",
        "a second graph of a batch size, for short batches",
        "around",
        STABLE,
        takes=("size", "forward", "stream_idx", "variant_label", "attention_variant"),
        hook="flowlib.sglang.v0_5_23.hooks.capture_one_shape",
    ),
    Touch(
        f"{_RUNNER}._resolve_attention_variant",
        "which of the two graphs a batch is replayed by",
        "around",
        STABLE,
        takes=("forward_batch", "capture_batch_size"),
        hook="flowlib.sglang.v0_5_23.hooks.attention_variant",
    ),
)
