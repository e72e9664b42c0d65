"""A KV-cache offload and sharing connector for vLLM, backed by LMCache.

Enabled with ``--kv-transfer-config '{"kv_connector": "LMCacheTieredConnector", ...}'``, or
``LMCacheP2PConnector`` for disaggregated prefill.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_CONNECTORS = {
    "LMCacheTieredConnector": "lmcache_connector.connector",
    "LMCacheP2PConnector": "lmcache_connector.handover",
}


def register() -> None:
    """Entry point of ``vllm.general_plugins``: registers the connectors, and watches which weights
    are loaded. vLLM calls it before workers read the settings."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from lmcache_connector.vllm_compat.loaded_weights import watch_loading

    watch_loading()
    for name, module in _CONNECTORS.items():
        try:
            KVConnectorFactory.get_connector_class_by_name(name)
        except ValueError:
            KVConnectorFactory.register_connector(name, module, name)


def __getattr__(name: str) -> Any:
    """Supports ``kv_connector_module_path: lmcache_connector``; imports vLLM on use only."""
    if name in _CONNECTORS:
        return getattr(importlib.import_module(_CONNECTORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
