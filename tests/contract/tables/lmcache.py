"""Everything of LMCache's in-process engine that the connector uses, in ``worker/lmcache_*.py``."""

from __future__ import annotations

from tests.contract.contract import Use, words

_ENGINE = "lmcache.v1.cache_engine"
_GPU = "lmcache.v1.gpu_connector.gpu_connectors"
_POLICY = "lmcache.v1.storage_backend.cache_policy.base_policy"
_CPU = "lmcache.v1.storage_backend.local_cpu_backend"
_ALLOCATORS = "lmcache.v1.memory_allocators"
_PLUGIN = "lmcache.v1.storage_backend.abstract_backend"

LMCACHE: tuple[Use, ...] = (
    Use(
        _ENGINE,
        "LMCacheEngine.__init__",
        passes=words(
            "config metadata token_database gpu_connector broadcast_fn broadcast_object_fn"
        ),
    ),
    Use(_ENGINE, "LMCacheEngine", members=words("stats_monitor storage_manager")),
    Use(_ENGINE, "LMCacheEngine.close", passes=()),
    Use(_ENGINE, "LMCacheEngine.post_init", passes=()),
    Use(_ENGINE, "LMCacheEngine.retrieve", passes=words("tokens transfer")),
    Use(_ENGINE, "LMCacheEngine.store", passes=words("tokens transfer")),
    Use("lmcache.observability", "LMCStatsMonitor", members=("get_stats_and_clear",)),
    Use(
        "lmcache.v1.storage_backend.storage_manager",
        "StorageManager",
        members=("storage_backends",),
    ),
    # The methods of the settings' class are attached when its module is imported.
    Use("lmcache.v1.config", "LMCacheEngineConfig"),
    Use(
        "lmcache.v1.metadata",
        "LMCacheMetadata",
        members=words(
            "chunk_size kv_dtype kv_shape local_worker_id local_world_size model_name role "
            "use_mla worker_id world_size"
        ),
    ),
    Use(
        "lmcache.v1.token_database",
        "TokenDatabase",
        members=("_make_key_by_hash",),
        abstract=words("__init__ process_tokens"),
    ),
    Use("lmcache.utils", "CacheEngineKey", members=("chunk_hash",)),
    Use("lmcache.v1.cache_controller.message", "OpType", members=("ADMIT",)),
    Use(
        _GPU,
        "GPUConnectorInterface",
        abstract=words("batched_from_gpu batched_to_gpu from_gpu get_shape to_gpu"),
    ),
    Use(_GPU, "GPUConnectorInterface.batched_from_gpu", takes=words("memory_objs starts ends")),
    Use(_GPU, "GPUConnectorInterface.batched_to_gpu", takes=words("memory_objs starts ends")),
    Use(_GPU, "GPUConnectorInterface.get_shape", takes=("num_tokens",)),
    Use(
        "lmcache.v1.memory_management",
        "MemoryObj",
        members=words(
            "byte_array can_evict data_ptr get_physical_size ref_count_down ref_count_up"
        ),
    ),
    Use(
        _CPU,
        "LocalCPUBackend",
        members=words("batched_msg_sender cache_policy cpu_lock hot_cache memory_allocator"),
    ),
    Use(
        f"{_ALLOCATORS}.mixed_memory_allocator", "MixedMemoryAllocator", members=("pin_allocator",)
    ),
    Use(
        f"{_ALLOCATORS}.tensor_memory_allocator",
        "TensorMemoryAllocator",
        members=("total_allocated_size",),
    ),
    Use(_CPU, "LocalCPUBackend.allocate", passes=words("shapes dtypes busy_loop")),
    Use(_CPU, "LocalCPUBackend.contains", passes=("key",)),
    Use(_CPU, "LocalCPUBackend.get_blocking", passes=("key",)),
    Use(_CPU, "LocalCPUBackend.remove", passes=("key",)),
    Use(_CPU, "LocalCPUBackend.submit_put_task", passes=words("key memory_obj")),
    Use(
        _POLICY,
        "BaseCachePolicy",
        abstract=words(
            "get_evict_candidates init_mutable_mapping update_on_force_evict update_on_hit "
            "update_on_put"
        ),
    ),
    Use(_POLICY, "BaseCachePolicy.get_evict_candidates", takes=words("cache_dict num_candidates")),
    Use(_POLICY, "BaseCachePolicy.update_on_force_evict", takes=("key",)),
    Use(_POLICY, "BaseCachePolicy.update_on_hit", takes=words("key cache_dict")),
    Use(_POLICY, "BaseCachePolicy.update_on_put", takes=("key",)),
    Use(
        "lmcache.v1.storage_backend.batched_message_sender",
        "BatchedMessageSender.add_kv_op",
        takes=words("op_type key"),
    ),
    Use(
        _PLUGIN,
        "StoragePluginInterface",
        members=("local_cpu_backend",),
        abstract=words(
            "batched_submit_put_task close contains exists_in_put_tasks get_allocator_backend "
            "get_blocking pin remove unpin"
        ),
    ),
    Use(
        _PLUGIN,
        "StoragePluginInterface.__init__",
        passes=words("dst_device config metadata local_cpu_backend loop"),
    ),
    Use(_PLUGIN, "StoragePluginInterface.batched_contains", takes=words("keys pin")),
    Use(_PLUGIN, "StoragePluginInterface.batched_get_blocking", takes=("keys",)),
    Use(
        _PLUGIN,
        "StoragePluginInterface.batched_submit_put_task",
        takes=words("keys objs transfer_spec on_complete_callback"),
    ),
    Use(_PLUGIN, "StoragePluginInterface.contains", takes=words("key pin")),
    Use(_PLUGIN, "StoragePluginInterface.exists_in_put_tasks", takes=("key",)),
    Use(_PLUGIN, "StoragePluginInterface.get_blocking", takes=("key",)),
    Use(_PLUGIN, "StoragePluginInterface.pin", takes=("key",)),
    Use(_PLUGIN, "StoragePluginInterface.remove", takes=words("key force")),
    Use(_PLUGIN, "StoragePluginInterface.unpin", takes=("key",)),
)
