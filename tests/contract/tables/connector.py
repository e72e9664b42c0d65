"""What vLLM calls of a connector, and what a connector calls of its base."""

from __future__ import annotations

from tests.contract.contract import Use, words

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_CONNECTORS}.base"
_METRICS = f"{_CONNECTORS}.metrics"
_KV_TRANSFER = "vllm.distributed.kv_transfer"


def _override(method: str, *takes: str) -> Use:
    return Use(_BASE, f"KVConnectorBase_V1.{method}", takes=takes)


CONNECTOR: tuple[Use, ...] = (
    Use(
        _BASE,
        "KVConnectorBase_V1",
        members=words(
            "_kv_cache_config _kv_cache_manager _kv_transfer_config _vllm_config "
            "clear_connector_metadata get_transfer_results requires_kv_delivery"
        ),
        abstract=words(
            "build_connector_meta get_num_new_matched_tokens save_kv_layer start_load_kv "
            "update_state_after_alloc wait_for_layer_load wait_for_save"
        ),
    ),
    Use(_BASE, "KVConnectorBase_V1.__init__", passes=words("vllm_config role kv_cache_config")),
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
        takes=words("request num_external_tokens"),
        since="0.32",
    ),
    Use(
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        members=words("EXTERNAL_UNSPECIFIED HOST"),
        since="0.32",
    ),
    Use(_BASE, "KVConnectorBase_V1.unregister_kv_caches", takes=(), since="0.33"),
    Use(_BASE, "SupportsHMA", abstract=("request_finished_all_groups",)),
    Use(_BASE, "SupportsHMA.request_finished_all_groups", takes=words("request block_ids")),
    Use(_BASE, "KVConnectorRole", members=("SCHEDULER",)),
    Use(_BASE, "KVConnectorHandshakeMetadata"),
    Use(_BASE, "KVConnectorMetadata", abstract=()),
    Use(_BASE, "KVConnectorWorkerMetadata", abstract=("aggregate",)),
    Use(_BASE, "KVConnectorWorkerMetadata.aggregate", takes=("other",)),
    Use(
        _METRICS,
        "KVConnectorStats",
        members=("data",),
        abstract=words("aggregate is_empty reduce reset"),
    ),
    Use(_METRICS, "KVConnectorStats.aggregate", takes=("other",)),
    Use(_METRICS, "KVConnectorStats.is_empty", takes=()),
    Use(_METRICS, "KVConnectorStats.reduce", takes=()),
    Use(_METRICS, "KVConnectorStats.reset", takes=()),
    Use(
        _METRICS,
        "KVConnectorPromMetrics",
        members=words("_counter_cls _gauge_cls _histogram_cls _labelnames per_engine_labelvalues"),
        abstract=("observe",),
    ),
    Use(
        _METRICS,
        "KVConnectorPromMetrics.__init__",
        passes=words("vllm_config metric_types labelnames per_engine_labelvalues"),
    ),
    Use(_METRICS, "KVConnectorPromMetrics.observe", takes=words("transfer_stats_data engine_idx")),
    Use(
        f"{_KV_TRANSFER}.kv_connector.factory",
        "KVConnectorFactory",
        members=words("get_connector_class_by_name register_connector"),
    ),
    Use(_KV_TRANSFER, "get_kv_transfer_group", passes=()),
    Use(_KV_TRANSFER, "has_kv_transfer_group", passes=()),
    Use(f"{_CONNECTORS}.multi_connector", "MultiConnector", members=("sub_connectors",)),
)
