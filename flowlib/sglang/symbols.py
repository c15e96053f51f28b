"""The symbols of SGLang that the plugin touches in every version; an adapter adds those of its version alone."""

from flowlib.sglang.ledger import NATIVE, STABLE, Touch, names

ARGUMENTS = names(
    "attention_backend prefill_attention_backend decode_attention_backend page_size chunked_prefill_size "
    "disable_radix_cache speculative_algorithm enable_mixed_chunk enable_hisparse enable_hierarchical_cache "
    "enable_lmcache enable_flexkv disaggregation_mode enable_page_major_kv_layout enable_unified_memory "
    "radix_cache_backend quantization_param_path enable_torch_compile "
    "prefill_only_disable_kv_cache is_embedding dllm_algorithm dcp_size attn_cp_size enable_two_batch_overlap "
    "enable_pdmux kv_cache_dtype model_path tp_size dp_size pp_size device cuda_graph_config enable_metrics"
)
"""Fields of ``ServerArgs`` that are read in every version."""

TOUCHED = (
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        "the flow's fields in the KV pool",
        "around",
        NATIVE,
        takes=("max_total_num_tokens", "mha_pool_class", "quant_method"),
        hook="flowlib.sglang.hooks.build_mha_pool",
    ),
    Touch(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "the fields' bytes in SGLang's memory budget",
        "after",
        NATIVE,
        takes=("self", "kvc", "num_layers"),
        hook="flowlib.sglang.hooks.cell_size",
    ),
    Touch(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "models that write K and V inside their RoPE kernel write them through the pool instead",
        "around",
        "the pool is told of such writes",
        takes=("forward_batch",),
        hook="flowlib.sglang.hooks.enable_fused_set_kv_buffer",
    ),
    Touch(
        "sglang.srt.models.utils.create_fused_set_kv_buffer_arg",
        "a model that writes K and V inside its RoPE kernel all the same is refused",
        "around",
        "the pool is told of such writes",
        takes=("value", "layer", "forward_batch"),
        hook="flowlib.sglang.hooks.create_fused_set_kv_buffer_arg",
    ),
    Touch(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        "flowlib's counts are published when SGLang's own are",
        "after",
        "plugins can publish metrics",
        takes=("self", "stats"),
        hook="flowlib.sglang.hooks.log_stats",
    ),
    Touch(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        "labels and client of the published counts",
        "read",
        "plugins can publish metrics",
        reads=("labels", "_counter_cls"),
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "the hooks above",
        "call",
        STABLE,
        takes=("target", "hook", "hook_type"),
    ),
    Touch(
        "sglang.srt.configs.hybrid_arch.mambaish_config",
        "models with recurrent layers are refused",
        "call",
        STABLE,
        takes=("model_config",),
    ),
    Touch(
        "sglang.srt.configs.model_config.is_minimax_sparse",
        "models with sparse attention of their own are refused",
        "call",
        STABLE,
        takes=("config",),
    ),
    Touch(
        "sglang.srt.configs.model_config.is_deepseek_dsa",
        "models with sparse attention of their own are refused",
        "call",
        STABLE,
        takes=("config",),
    ),
    Touch(
        "sglang.srt.configs.model_config.is_deepseek_v4",
        "models with sparse attention of their own are refused",
        "call",
        STABLE,
        takes=("config",),
    ),
    Touch("sglang.srt.plugins.hook_registry.HookType", "the hooks above", "read", STABLE),
    Touch("sglang.srt.utils.get_device", "the device when --device is not given", "call", STABLE),
    Touch("sglang.srt.arg_groups.arg_utils.A", "annotations of the new fields", "call", STABLE),
    Touch("sglang.srt.arg_groups.arg_utils.Arg", "annotations of the new fields", "call", STABLE, takes=("help",)),
    Touch(
        "sglang.srt.server_args.add_attention_backend_choices",
        "flowlib as a value of the backend flags",
        "call",
        STABLE,
    ),
    Touch(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        "the backend's factory",
        "call",
        STABLE,
        takes=("name",),
    ),
    Touch("sglang.srt.layers.attention.base_attn_backend.AttentionBackend", "the decode backend", "extend", STABLE),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
        "static buffers",
        "extend",
        STABLE,
        takes=("max_bs", "max_num_tokens"),
    ),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
        "the page table of a step without a graph",
        "extend",
        STABLE,
        takes=("forward_batch",),
    ),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        "buffers of a graph, before its capture",
        "extend",
        STABLE,
        takes=("forward_batch", "in_capture"),
    ),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
        "the page table, recorded in the graph",
        "extend",
        STABLE,
        takes=("forward_batch",),
    ),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value",
        "padded rows of a graph",
        "extend",
        STABLE,
    ),
    Touch(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_decode",
        "the sparse decode step",
        "extend",
        STABLE,
        takes=("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "K, V and the flow's fields in one pool",
        "extend",
        NATIVE,
        reads=names(
            "size page_size dtype device head_num head_dim v_head_dim kv_cache_layout is_quantized_kv_cache "
            "memory_saver_adapter _create_buffers _clear_buffers _get_key_buffer _get_value_buffer"
        ),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        "fields are updated on every write",
        "extend",
        NATIVE,
        takes=("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"),
    ),
    Touch("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer_prefix_valid", "refused", "extend", NATIVE),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        "refused",
        "extend",
        NATIVE,
        takes=("tgt_loc", "src_loc"),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy",
        "refused",
        "extend",
        NATIVE,
        takes=("kv_cache_cpu", "indices", "mamba_indices"),
    ),
    Touch("sglang.srt.mem_cache.memory_pool.KVWriteLoc", "a decode step's write", "call", STABLE, takes=("loc",)),
    Touch(
        "sglang.srt.mem_cache.memory_pool.unwrap_write_loc", "the written slots", "call", STABLE, takes=("loc_info",)
    ),
    Touch("sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE", "fields pause and resume with K and V", "read", STABLE),
    Touch(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
        "the slots of a request",
        "read",
        STABLE,
        reads=("req_to_token",),
    ),
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
        "the numbers the pool is built with",
        "read",
        NATIVE,
        reads=names("server_args model_config layer_info kv_cache_dtype device is_draft_worker page_size"),
    ),
    Touch(
        "sglang.srt.model_executor.model_runner_components.layer_setup.ModelLayerInfo",
        "the layers of this rank",
        "read",
        STABLE,
        reads=("start_layer", "num_effective_layers"),
    ),
    Touch(
        "sglang.srt.configs.model_config.ModelConfig",
        "the numbers of the model",
        "read",
        STABLE,
        reads=names(
            "head_dim v_head_dim num_attention_heads num_hidden_layers context_len dtype attention_arch hf_config "
            "is_encoder_decoder is_hybrid_swa has_attention_sinks attention_chunk_size get_num_kv_heads kv_lora_rank "
            "qk_rope_head_dim hf_text_config"
        ),
    ),
    Touch(
        "sglang.srt.layers.radix_attention.RadixAttention",
        "the softmax scale, the fp8 scales, and what a flow can't serve",
        "read",
        STABLE,
        reads=names(
            "layer_id scaling k_scale v_scale k_scale_float v_scale_float tp_q_head_num tp_k_head_num tp_v_head_num "
            "qk_head_dim v_head_dim logit_cap sliding_window_size is_cross_attention attn_type xai_temperature_len "
            "use_irope pos_encoding_mode"
        ),
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "the batch of a step",
        "read",
        STABLE,
        reads=names(
            "forward_mode batch_size seq_lens seq_lens_cpu req_pool_indices out_cache_loc encoder_lens rids spec_info"
        ),
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_decode_or_idle",
        "whether a step without a graph decodes",
        "call",
        STABLE,
    ),
    Touch(
        "sglang.srt.model_executor.model_runner.ModelRunner",
        "pools, model and arguments for the backend",
        "read",
        STABLE,
        reads=("model", "server_args", "token_to_kv_pool", "req_to_token_pool", "device"),
    ),
    Touch(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
        "the backend that a decode graph is captured with",
        "read",
        STABLE,
        reads=("attn_backend",),
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend",
        "the flow's backend beside that of prefill",
        "read",
        STABLE,
        reads=("decode_backend",),
    ),
    Touch("sglang.srt.runtime_context.get_parallel", "the rank's share of the heads", "call", STABLE),
    Touch(
        "sglang.srt.runtime_context.ParallelContext",
        "the rank's share of the heads",
        "read",
        STABLE,
        reads=("attn_tp_size", "attn_tp_rank"),
    ),
    Touch(
        "sglang.srt.model_executor.forward_context.get_token_to_kv_pool", "whether a flow is served", "call", STABLE
    ),
)
