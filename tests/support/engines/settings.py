"""``--kv-transfer-config`` of the connector, as benchmarks and the engine tests use it."""

from __future__ import annotations

from typing import Any

BLOCK_SIZE = 128
CHUNK_SIZE = 2 * BLOCK_SIZE  # so that a hit can begin inside a chunk


def tiered_transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The connector with the settings ``extra``, and its defaults for all others. It shares with
    other engines of this host only in a folder of its own."""
    if "host_folder" not in extra:
        extra.setdefault("host_sharing", False)
    return {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def kv_transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The connector of the engine tests, which loads every hit, whatever that costs, and all of it:
    audits have tests of their own."""
    settings = {
        "cpu_gib": 0.25,
        "chunk_size": CHUNK_SIZE,
        "compute_or_load": "always",
        "audit_share": 0.0,
    }
    return tiered_transfer(role, **settings | extra)


def together(*transfers: dict[str, Any]) -> dict[str, Any]:
    """Connectors that vLLM's ``MultiConnector`` runs, in the order in which it asks them."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(transfers)},
    }
