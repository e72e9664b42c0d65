"""How the model is configured, and how its KV lies in memory."""

from __future__ import annotations

from tests.contract.contract import Use

_SPECS = "vllm.v1.kv_cache_interface"
_CONFIG = "vllm.config"

MODEL: tuple[Use, ...] = (
    Use(
        _CONFIG,
        "VllmConfig",
        members=(
            "cache_config",
            "compilation_config",
            "kv_events_config",
            "kv_transfer_config",
            "load_config",
            "lora_config",
            "max_concurrent_batches",
            "model_config",
            "num_prefill_lookahead_tokens",
            "observability_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
        ),
    ),
    Use(
        _CONFIG,
        "ModelConfig",
        members=(
            "architecture",
            "code_revision",
            "dtype",
            "enable_sleep_mode",
            "get_total_num_hidden_layers",
            "get_total_num_kv_heads",
            "hf_config",
            "hf_overrides",
            "hf_text_config",
            "is_encoder_decoder",
            "max_model_len",
            "model",
            "model_weights",
            "multimodal_config",
            "revision",
            "seed",
            "trust_remote_code",
            "use_mla",
        ),
    ),
    Use(_CONFIG, "CacheConfig", members=("cache_dtype", "prefix_caching_hash_algo")),
    Use(
        _CONFIG,
        "LoadConfig",
        members=("download_dir", "load_format", "model_loader_extra_config"),
    ),
    Use(_CONFIG, "MultiModalConfig", members=("mm_encoder_fp8_scale_path",)),
    Use(_CONFIG, "ObservabilityConfig", members=("otlp_traces_endpoint",)),
    Use(_CONFIG, "SchedulerConfig", members=("enable_chunked_prefill", "max_num_batched_tokens")),
    Use(_CONFIG, "LoRAConfig", members=("lora_dtype",)),
    Use(
        _CONFIG,
        "ParallelConfig",
        members=(
            "data_parallel_index",
            "data_parallel_size",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "local_engines_only",
            "local_world_size",
            "nnodes",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "rank",
            "tensor_parallel_size",
        ),
    ),
    Use(
        _CONFIG,
        "KVTransferConfig",
        members=(
            "engine_id",
            "is_kv_consumer",
            "is_kv_producer",
            "kv_connector",
            "kv_connector_extra_config",
            "kv_port",
            "kv_role",
        ),
    ),
    Use(
        _CONFIG,
        "SpeculativeConfig",
        members=(
            "disable_eagle_block_drop",
            "draft_load_config",
            "draft_model_config",
            "kv_cache_dtype",
            "method",
            "num_speculative_tokens",
            "use_multi_module_mtp",
        ),
    ),
    Use(_CONFIG, "CompilationConfig", members=("static_forward_context",)),
    Use("vllm.config.kv_events", "KVEventsConfig", members=("enable_kv_cache_events",)),
    Use(
        _SPECS,
        "KVCacheConfig",
        members=("kv_cache_groups", "needs_kv_cache_zeroing", "prefix_cacheable_group_ids"),
    ),
    Use(_SPECS, "KVCacheGroupSpec", members=("kv_cache_spec", "layer_names")),
    *(
        Use(
            _SPECS,
            spec,
            members=(
                "block_size",
                "dtype",
                "head_size",
                "num_heads",
                "num_kv_heads",
                "state_content_size_bytes",
                "tokens_per_state",
                *own,
            ),
        )
        for spec, *own in (
            ("FullAttentionSpec", "non_causal"),
            ("MLAAttentionSpec", "non_causal"),
            ("SlidingWindowSpec", "sliding_window", "extra_retained_tokens"),
            ("SlidingWindowMLASpec",),
            ("ChunkedLocalAttentionSpec", "attention_chunk_size"),
        )
    ),
    Use(
        _SPECS,
        "MambaSpec",
        members=(
            "block_size",
            "mamba_cache_mode",
            "num_heads",
            "num_speculative_blocks",
            "state_content_size_bytes",
            "tp_replicated",
        ),
    ),
    Use(_SPECS, "UniformTypeKVCacheSpecs", members=("block_size", "kv_cache_specs")),
    Use(
        "vllm.distributed.utils",
        "get_pp_indices",
        passes=("num_hidden_layers", "pp_rank", "pp_size"),
    ),
    Use("vllm.model_executor.models.utils", "extract_layer_index", passes=("layer_name",)),
    Use(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        members=("get_attn_backend",),
    ),
    Use("vllm.model_executor.models", "ModelRegistry"),
    Use("vllm.model_executor.models.registry", "_ModelRegistry", members=("models",)),
    Use("vllm.platforms", "current_platform"),
    Use("vllm.platforms.interface", "Platform", members=("is_cpu",)),
    Use("vllm.v1.executor", "Executor", members=("get_class",)),
    Use("vllm.v1.executor", "UniProcExecutor"),
    Use("vllm.utils.network_utils", "get_ip", passes=()),
    Use("vllm", "envs"),
    Use("vllm.envs", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    Use("vllm.envs", "VLLM_USE_MODELSCOPE"),
    Use("vllm.envs", "environment_variables"),
    Use("vllm.lora.utils", "get_adapter_absolute_path", passes=("lora_path",)),
    Use(
        "vllm.v1.worker.worker_base",
        "WorkerBase",
        members=("__init__", "apply_model", "get_model", "load_model", "model_runner"),
    ),
    # For type checkers alone.
    Use("vllm.forward_context", "ForwardContext"),
    Use("vllm.v1.attention.backend", "AttentionMetadata"),
)

# Looked at when they are needed: importing them has effects.
LATE: tuple[Use, ...] = (
    Use(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        members=("list_adapters", "lora_config"),
        late=True,
    ),
    Use(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager._load_adapter",
        takes=("lora_request",),
        late=True,
    ),
    Use("vllm", "_custom_ops", late=True),
    Use(
        "vllm._custom_ops",
        "cpu_attn_reshape_and_cache",
        passes=(
            "key",
            "value",
            "key_cache",
            "value_cache",
            "slot_mapping",
            "isa",
            "k_scale",
            "v_scale",
            "kv_cache_dtype",
        ),
        late=True,
    ),
    *(
        Use("vllm._custom_ops", name, late=True)
        for name in ("create_onednn_mm", "create_onednn_scaled_mm")
    ),
    Use(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        members=(
            "_weight_update_active",
            "elastic_ep_execute",
            "finish_weight_update",
            "reload_weights",
            "sleep",
            "start_draft_weight_update",
            "start_weight_update",
            "update_weights",
            "wake_up",
        ),
        late=True,
    ),
    Use(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        members=("drafter", "reload_weights"),
        late=True,
    ),
    Use(
        "vllm.v1.attention.backends.cpu_attn",
        "_get_attn_isa",
        passes=("dtype", "block_size", "head_size", "kv_cache_dtype"),
        late=True,
    ),
)
