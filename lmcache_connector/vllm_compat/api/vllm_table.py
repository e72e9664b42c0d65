"""Everything of vLLM that the connector uses."""

from __future__ import annotations

from lmcache_connector.vllm_compat.api.contract import Feature, Use

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_CONNECTORS}.base"
_METRICS = f"{_CONNECTORS}.metrics"
_KV_TRANSFER = "vllm.distributed.kv_transfer"
_EVENTS = "vllm.distributed.kv_events"
_CACHE = "vllm.v1.core.kv_cache_utils"
_SPECS = "vllm.v1.kv_cache_interface"
_CONFIG = "vllm.config"


def _override(method: str, *takes: str) -> Use:
    return Use(_BASE, f"KVConnectorBase_V1.{method}", takes=takes)


# The connector's own class: what vLLM calls.
_CONNECTOR = (
    Use(
        _BASE,
        "KVConnectorBase_V1",
        members=(
            "_kv_cache_config",
            "_kv_cache_manager",
            "_kv_transfer_config",
            "_vllm_config",
            "clear_connector_metadata",
            "get_transfer_results",
            "requires_kv_delivery",
        ),
        abstract=(
            "build_connector_meta",
            "get_num_new_matched_tokens",
            "save_kv_layer",
            "start_load_kv",
            "update_state_after_alloc",
            "wait_for_layer_load",
            "wait_for_save",
        ),
    ),
    Use(_BASE, "KVConnectorBase_V1.__init__", passes=("vllm_config", "role", "kv_cache_config")),
    _override("bind_connector_metadata", "connector_metadata"),
    _override("bind_kv_cache_manager", "kv_cache_manager"),
    _override("build_connector_meta", "scheduler_output"),
    _override("build_connector_worker_meta"),
    _override("build_kv_connector_stats", "data"),
    _override(
        "build_prom_metrics", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"
    ),
    _override("clear_connector_metadata"),
    _override("get_finished", "finished_req_ids"),
    _override("get_kv_connector_stats"),
    _override("get_num_new_matched_tokens", "request", "num_computed_tokens"),
    _override("handle_preemptions", "kv_connector_metadata"),
    _override("has_connector_metadata"),
    _override("has_pending_block_frees"),
    _override("has_pending_push_work"),
    _override("on_new_request", "request"),
    _override("register_kv_caches", "kv_caches"),
    _override("request_finished", "request", "block_ids"),
    _override("requires_piecewise_for_cudagraph", "extra_config"),
    _override("reset_cache"),
    _override("save_kv_layer", "layer_name", "kv_layer", "attn_metadata"),
    _override("set_xfer_handshake_metadata_pp_aware", "metadata"),
    _override("shutdown"),
    _override("start_load_kv", "forward_context"),
    _override("take_events"),
    _override("update_connector_output", "connector_output"),
    _override("update_state_after_alloc", "request", "blocks", "num_external_tokens"),
    _override("wait_for_layer_load", "layer_name"),
    _override("wait_for_save"),
    Use(
        _BASE,
        "KVConnectorBase_V1.get_external_cache_hit_sources",
        takes=("request", "num_external_tokens"),
        feature=Feature.HIT_SOURCES,
        since="0.32",
    ),
    Use(
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        members=("EXTERNAL_UNSPECIFIED", "HOST"),
        feature=Feature.HIT_SOURCES,
        since="0.32",
    ),
    Use(
        _BASE,
        "KVConnectorBase_V1.unregister_kv_caches",
        takes=(),
        feature=Feature.SLEEP_NOTICE,
        since="0.33",
    ),
    Use(_BASE, "SupportsHMA", abstract=("request_finished_all_groups",)),
    Use(_BASE, "SupportsHMA.request_finished_all_groups", takes=("request", "block_ids")),
    Use(_BASE, "KVConnectorRole", members=("SCHEDULER",)),
    Use(_BASE, "KVConnectorHandshakeMetadata"),
    Use(_BASE, "KVConnectorMetadata", abstract=()),
    Use(_BASE, "KVConnectorWorkerMetadata", abstract=("aggregate",)),
    Use(_BASE, "KVConnectorWorkerMetadata.aggregate", takes=("other",)),
    Use(_METRICS, "KVConnectorStats", members=("data",)),
    Use(_METRICS, "KVConnectorStats.aggregate", takes=("other",)),
    Use(_METRICS, "KVConnectorStats.is_empty", takes=()),
    Use(_METRICS, "KVConnectorStats.reduce", takes=()),
    Use(_METRICS, "KVConnectorStats.reset", takes=()),
    Use(
        _METRICS,
        "KVConnectorPromMetrics.__init__",
        passes=("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Use(_METRICS, "KVConnectorPromMetrics.observe", takes=("transfer_stats_data", "engine_idx")),
    Use(
        f"{_KV_TRANSFER}.kv_connector.factory",
        "KVConnectorFactory",
        members=("get_connector_class_by_name", "register_connector"),
    ),
    Use(_KV_TRANSFER, "get_kv_transfer_group", passes=()),
    Use(_KV_TRANSFER, "has_kv_transfer_group", passes=()),
    Use(f"{_CONNECTORS}.multi_connector", "MultiConnector", members=("sub_connectors",)),
)

# What it reads of a step, and of vLLM's own cache.
_SCHEDULING = (
    Use(
        "vllm.v1.request",
        "Request",
        members=(
            "all_token_ids",
            "block_hashes",
            "cache_salt",
            "is_finished",
            "kv_hints",
            "kv_transfer_params",
            "lora_request",
            "mm_features",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_prompt_tokens",
            "num_tokens",
            "pooling_params",
            "prompt_embeds",
            "prompt_is_token_ids",
            "request_id",
            "resumable",
            "sampling_params",
            "shared_prefix_boundary",
            "skip_reading_prefix_cache",
            "status",
        ),
    ),
    Use(
        "vllm.v1.request",
        "RequestStatus",
        members=("FINISHED_ABORTED", "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"),
    ),
    Use(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        members=(
            "free_encoder_mm_hashes",
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_cached_reqs",
            "scheduled_encoder_inputs",
            "scheduled_new_reqs",
            "total_num_scheduled_tokens",
        ),
    ),
    Use(
        "vllm.v1.core.sched.output",
        "KVConnectorBlockState",
        members=("boundary_state_offloads", "get_block_ids"),
    ),
    Use("vllm.v1.core.sched.output", "NewRequestData", members=("num_computed_tokens", "req_id")),
    Use(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        members=("num_computed_tokens", "req_ids"),
    ),
    Use("vllm.v1.outputs", "KVConnectorOutput", members=("kv_connector_worker_meta",)),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", members=("blocks", "get_block_ids")),
    Use(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        members=("block_pool", "reset_prefix_cache"),
    ),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.free", passes=("request",)),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_blocks", passes=("request_id",)),
    Use(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.record_blocks_for_zeroing",
        passes=("request_id", "start_token"),
    ),
    Use("vllm.v1.core.block_pool", "BlockPool", members=("blocks", "hash_block_size")),
    Use("vllm.v1.core.block_pool", "BlockPool.evict_blocks", passes=("block_ids",)),
    Use("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", passes=()),
    Use("vllm.v1.core.block_pool", "BlockPool.touch", passes=("blocks",)),
    Use("vllm.v1.core.block_pool", "BlockPool.unpin_blocks", passes=("blocks", "on_reuse")),
    Use(_CACHE, "KVCacheBlock", members=("block_id",)),
    Use(
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec",
        members=("data", "identifier", "mm_hash", "mm_position", "modality"),
    ),
    Use(
        "vllm.multimodal.inputs",
        "PlaceholderRange",
        members=("get_embeds_indices_in_range", "is_embed", "length", "offset"),
    ),
    Use(
        "vllm.lora.request",
        "LoRARequest",
        members=(
            "adapter_id",
            "is_3d_lora_weight",
            "load_inplace",
            "lora_int_id",
            "lora_name",
            "lora_path",
            "name",
        ),
    ),
)

_KV_EVENTS = (
    Use(
        _EVENTS,
        "BlockStored",
        members=(
            "block_hashes",
            "block_size",
            "extra_keys",
            "group_idx",
            "locality",
            "lora_id",
            "lora_name",
            "medium",
            "parent_block_hash",
            "token_ids",
        ),
        feature=Feature.KV_EVENTS,
    ),
    Use(
        _EVENTS,
        "BlockRemoved",
        members=("block_hashes", "group_idx", "locality", "medium"),
        feature=Feature.KV_EVENTS,
    ),
    Use(_EVENTS, "KVCacheEvent", feature=Feature.KV_EVENTS),
    Use(_CACHE, "BlockHash", feature=Feature.KV_EVENTS),
    Use(
        _CACHE,
        "generate_block_hash_extra_keys",
        passes=("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        feature=Feature.KV_EVENTS,
    ),
    Use(_CACHE, "maybe_convert_block_hash", passes=("hash_bytes",), feature=Feature.KV_EVENTS),
    Use(_CACHE, "to_event_extra_keys", passes=("extra_keys",), feature=Feature.KV_EVENTS),
)

# How the model is configured, and how its KV lies in memory.
_MODEL = (
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
            "dtype",
            "enable_sleep_mode",
            "get_total_num_hidden_layers",
            "get_total_num_kv_heads",
            "hf_config",
            "hf_text_config",
            "is_encoder_decoder",
            "max_model_len",
            "model",
            "multimodal_config",
            "revision",
            "seed",
            "trust_remote_code",
            "use_mla",
        ),
    ),
    Use(_CONFIG, "CacheConfig", members=("cache_dtype", "prefix_caching_hash_algo")),
    Use(_CONFIG, "LoadConfig", members=("download_dir", "load_format")),
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
    # For type checkers alone.
    Use("vllm.forward_context", "ForwardContext"),
    Use("vllm.v1.attention.backend", "AttentionMetadata"),
)

_LATE = (
    Use(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager",
        members=("list_adapters", "lora_config"),
        feature=Feature.ADAPTERS,
        late=True,
    ),
    Use(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager._load_adapter",
        takes=("lora_request",),
        feature=Feature.ADAPTERS,
        late=True,
    ),
    Use("vllm", "_custom_ops", feature=Feature.CPU, late=True),
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
        feature=Feature.CPU,
        late=True,
    ),
    Use(
        "vllm.v1.attention.backends.cpu_attn",
        "_get_attn_isa",
        passes=("dtype", "block_size", "head_size", "kv_cache_dtype"),
        feature=Feature.CPU,
        late=True,
    ),
)

VLLM: tuple[Use, ...] = (*_CONNECTOR, *_SCHEDULING, *_KV_EVENTS, *_MODEL, *_LATE)
