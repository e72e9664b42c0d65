"""A KV-cache offload and sharing connector for vLLM, backed by LMCache.

Switched on with ``--kv-transfer-config '{"kv_connector": "LMCacheTieredConnector", ...}'``.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``: makes the connector known by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name("LMCacheTieredConnector")
    except ValueError:
        KVConnectorFactory.register_connector(
            "LMCacheTieredConnector", "lmcache_connector.connector", "LMCacheTieredConnector"
        )


def __getattr__(name: str) -> Any:
    """For ``kv_connector_module_path: lmcache_connector``; vLLM is imported only when asked."""
    if name == "LMCacheTieredConnector":
        from lmcache_connector.connector import LMCacheTieredConnector

        return LMCacheTieredConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
