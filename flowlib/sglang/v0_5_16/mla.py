"""The symbols of SGLang 0.5.16 that flows over MLA latents touch."""

from flowlib.sglang.ledger import NATIVE, STABLE, Touch, names

_CHUNKS = "SGLang's triton backend attends to prefixes in chunks"
_FORWARD = "sglang.srt.models.deepseek_common.attention_forward_methods"

TOUCHED = (
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
        "the flow's fields beside latents",
        "around",
        NATIVE,
        takes=("max_total_num_tokens",),
        hook="flowlib.sglang.mla_pool.build_mla_pool",
    ),
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.MLATokenToKVPool",
        "the name of the class that _build_mla_kv_pool builds: the flow's class while it builds",
        "lend",
        NATIVE,
    ),
    Touch(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_oot_mla_kv_pool",
        "the flow's fields beside latents, on an out-of-tree platform",
        "around",
        NATIVE,
        takes=("max_total_num_tokens", "is_dsa_model"),
        hook="flowlib.sglang.mla_pool.build_oot_mla_pool",
    ),
    Touch(
        "sglang.srt.platforms.interface.SRTPlatform.get_mla_kv_pool_cls",
        "the latent pool class of an out-of-tree platform; gives the flow's class while the pool is built",
        "lend",
        NATIVE,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
        "latents and the flow's fields in one pool",
        "extend",
        NATIVE,
        reads=names(
            "size page_size dtype device use_dsa kv_lora_rank kv_cache_dim memory_saver_adapter get_key_buffer "
            "_create_buffers _clear_buffers"
        ),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer",
        "fields are updated on every write",
        "extend",
        NATIVE,
        takes=("layer", "loc_info", "cache_k", "cache_v"),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
        "fields are updated on every write",
        "extend",
        NATIVE,
        takes=("layer", "loc", "cache_k_nope", "cache_k_rope"),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.move_kv_cache",
        "refused",
        "extend",
        NATIVE,
        takes=("tgt_loc", "src_loc"),
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.load_cpu_copy",
        "refused",
        "extend",
        NATIVE,
        takes=("kv_cache_cpu", "indices", "mamba_indices"),
    ),
    Touch(
        "sglang.srt.model_executor.model_runner_components.misc_utils.maybe_disable_chunked_prefix_cache",
        "--disable-chunked-prefix-cache stays as the user gave it",
        "around",
        _CHUNKS,
        takes=("server_args", "use_mla_backend", "is_draft_worker"),
        hook="flowlib.sglang.mla_prefill.keep_prefix_cache",
    ),
    Touch(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        "prefixes of MLA models are attended in chunks",
        "around",
        _CHUNKS,
        takes=("backend_name",),
        hook="flowlib.sglang.mla_prefill.get_handler",
    ),
    Touch(
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin.forward_normal_chunked_kv_core",
        "the loop over the chunks",
        "around",
        _CHUNKS,
        takes=("self", "q", "k", "v", "forward_batch"),
        hook="flowlib.sglang.mla_prefill.chunked_core",
    ),
    Touch(f"{_FORWARD}.forward_methods.AttnForwardMethod.MHA_CHUNKED_KV", "the way of chunks", "read", _CHUNKS),
    Touch(
        f"{_FORWARD}.forward_methods.AttnForwardMethod.MHA_ONE_SHOT", "the way whose prefix is chunked", "read", _CHUNKS
    ),
    Touch(f"{_FORWARD}.forward_methods.AttnForwardMethod.MLA", "the absorbed way, with an fp8 pool", "read", _CHUNKS),
    Touch(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA",
        "projections, sizes and the gate of an MLA layer",
        "read",
        _CHUNKS,
        reads=names(
            "attn_mha kv_b_proj o_proj num_local_heads qk_head_dim qk_nope_head_dim v_head_dim kv_lora_rank layer_id "
            "current_attention_backend chunked_prefix_cache_threshold disable_chunked_prefix_cache"
        ),
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.get_max_chunk_capacity",
        "the most rows of a chunk",
        "call",
        _CHUNKS,
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.extend_prefix_lens_cpu",
        "the prefixes of a batch",
        "read",
        _CHUNKS,
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.extend_seq_lens_cpu",
        "the new tokens of a batch",
        "read",
        _CHUNKS,
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative",
        "what is a plain extend",
        "call",
        _CHUNKS,
    ),
    Touch(
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.is_in_tc_piecewise_cuda_graph",
        "SGLang attends absorbed there",
        "call",
        _CHUNKS,
    ),
    Touch("sglang.srt.runtime_context.get_server_args", "--enable-deterministic-inference", "call", STABLE),
    Touch("sglang.srt.model_executor.forward_context.get_req_to_token_pool", "the slots of a request", "call", STABLE),
)
