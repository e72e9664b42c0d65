"""What vLLM itself reads of ``--kv-transfer-config``, before any connector does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.report import BAD_INPUT
from lmcache_connector.config.strict import unknown_key
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.p2p.config import P2PConfig

TIERED = "LMCacheTieredConnector"
P2P = "LMCacheP2PConnector"
DEFAULT_KV_PORT = 14579
# Of vLLM's KVTransferConfig, which refuses any other; a test compares the two.
TRANSFER_KEYS = (
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_port", "engine_id"),
    *("kv_buffer_device", "kv_connector_module_path", "enable_permute_local_kv"),
    "kv_load_failure_policy",
)
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_SETTINGS = {TIERED: ConnectorConfig.model_fields, P2P: P2PConfig.model_fields}


def connector_meant(document: Mapping[str, Any]) -> str:
    """Whose settings these are, also where the name is not quite right."""
    return P2P if "p2p" in str(document.get("kv_connector")).lower() else TIERED


def kv_port(document: Mapping[str, Any]) -> int | None:
    """As vLLM understands it; ``None`` if it is no port."""
    try:
        port = TypeAdapter(int).validate_python(document.get("kv_port", DEFAULT_KV_PORT))
    except ValidationError:
        return None
    return port if 0 < port < 65536 else None


def check_transfer(document: Mapping[str, Any]) -> Finding:
    """Connector, role and keys, as vLLM itself would take them."""
    meant = connector_meant(document)
    problems, hints = [], []
    if document.get("kv_connector") not in (TIERED, P2P):
        problems.append(f"kv_connector must be {TIERED!r} or {P2P!r}")
    if document.get("kv_role") not in _ROLES:
        problems.append(f"kv_role must be one of {', '.join(_ROLES)}")
    if problems:
        hints.append(f'"kv_connector": "{meant}", "kv_role": "kv_both"')
        if "kv_connector_extra_config" not in document:
            hints.append("and the connector's own settings inside kv_connector_extra_config")
    if meant == P2P and kv_port(document) is None:
        problems.append("kv_port must be a port between 1 and 65535")
    problems += [_unknown_key(key, meant) for key in document if key not in TRANSFER_KEYS]
    if problems:
        text, hint = "; ".join(problems), ", ".join(hints)
        return Finding("kv-transfer-config", "error", text, hint, code=BAD_INPUT)
    detail = f"{document['kv_connector']} as {document['kv_role']}"
    return Finding("kv-transfer-config", "ok", detail)


def _unknown_key(key: str, connector: str) -> str:
    if key in _SETTINGS[connector]:
        return f"{key!r} belongs inside kv_connector_extra_config"
    return unknown_key(key, TRANSFER_KEYS, "vLLM knows")
