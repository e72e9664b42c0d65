"""What is read of a step, of vLLM's own cache, and of the events it publishes."""

from __future__ import annotations

from tests.contract.contract import Use, words

_EVENTS = "vllm.distributed.kv_events"
_CACHE = "vllm.v1.core.kv_cache_utils"

SCHEDULING: tuple[Use, ...] = (
    Use(
        "vllm.v1.request",
        "Request",
        members=words(
            "all_token_ids block_hashes cache_salt is_finished kv_hints kv_transfer_params "
            "lora_request mm_features num_computed_tokens num_in_flight_tokens "
            "num_prompt_tokens num_tokens pooling_params prompt_embeds prompt_is_token_ids "
            "request_id resumable sampling_params shared_prefix_boundary "
            "skip_reading_prefix_cache status trace_headers"
        ),
    ),
    Use(
        "vllm.v1.request",
        "RequestStatus",
        members=words("FINISHED_ABORTED FINISHED_LENGTH_CAPPED FINISHED_STOPPED"),
    ),
    Use(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        members=words(
            "free_encoder_mm_hashes has_sync_kv_loads kv_connector_block_state "
            "num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
            "scheduled_encoder_inputs scheduled_new_reqs total_num_scheduled_tokens"
        ),
    ),
    Use(
        "vllm.v1.core.sched.output",
        "KVConnectorBlockState",
        members=words("boundary_state_offloads get_block_ids"),
    ),
    Use("vllm.v1.core.sched.output", "NewRequestData", members=words("num_computed_tokens req_id")),
    Use(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        members=words("num_computed_tokens req_ids"),
    ),
    Use(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        members=words("finished_recving kv_connector_worker_meta"),
    ),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", members=words("blocks get_block_ids")),
    Use(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        members=words("block_pool reset_prefix_cache"),
    ),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.free", passes=("request",)),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_blocks", passes=("request_id",)),
    Use(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.record_blocks_for_zeroing",
        passes=words("request_id start_token"),
    ),
    Use("vllm.v1.core.block_pool", "BlockPool", members=words("blocks hash_block_size")),
    Use("vllm.v1.core.block_pool", "BlockPool.evict_blocks", passes=("block_ids",)),
    Use("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", passes=()),
    Use("vllm.v1.core.block_pool", "BlockPool.touch", passes=("blocks",)),
    Use("vllm.v1.core.block_pool", "BlockPool.unpin_blocks", passes=words("blocks on_reuse")),
    Use(_CACHE, "KVCacheBlock", members=("block_id",)),
    Use(
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec",
        members=words("data identifier mm_hash mm_position modality"),
    ),
    Use(
        "vllm.multimodal.inputs",
        "PlaceholderRange",
        members=words("get_embeds_indices_in_range is_embed length offset"),
    ),
    Use(
        "vllm.lora.request",
        "LoRARequest",
        members=words(
            "adapter_id is_3d_lora_weight load_inplace lora_int_id lora_name lora_path name"
        ),
    ),
)

KV_EVENTS: tuple[Use, ...] = (
    Use(
        _EVENTS,
        "BlockStored",
        members=words(
            "block_hashes block_size extra_keys group_idx locality lora_id lora_name medium "
            "parent_block_hash token_ids"
        ),
    ),
    Use(_EVENTS, "BlockRemoved", members=words("block_hashes group_idx locality medium")),
    Use(_EVENTS, "KVCacheEvent"),
    Use(_CACHE, "BlockHash"),
    Use(
        _CACHE,
        "generate_block_hash_extra_keys",
        passes=words("request start_token_idx end_token_idx start_mm_idx"),
    ),
    Use(_CACHE, "maybe_convert_block_hash", passes=("hash_bytes",)),
    Use(_CACHE, "to_event_extra_keys", passes=("extra_keys",)),
)
