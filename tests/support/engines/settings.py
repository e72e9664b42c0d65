"""How benchmarks and tests start engines, and what they ask: settings, limits, random prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from lmcache_connector.config import limits

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
    if "redis_url" in extra:
        settings["redis_timeout_seconds"] = 10.0  # on a starved machine, writes are slow
    return tiered_transfer(role, **settings | extra)


def together(*transfers: dict[str, Any]) -> dict[str, Any]:
    """Connectors that vLLM's ``MultiConnector`` runs, in the order in which it asks them."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(transfers)},
    }


PATIENT: Mapping[str, float] = {"LOOKUP_DEADLINE_SECONDS": 10.0}
"""For tests, and figures, of what is loaded: not of how long a request waits to hear of it."""


def set_limits(values: Mapping[str, float]) -> None:
    """In this process, for good: for an engine that has a process to itself."""
    for name, value in values.items():
        getattr(limits, name)  # a name that is gone is the caller's mistake
        setattr(limits, name, value)


_VOCABULARY = 2000  # less than any model's here


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids for the tiny model, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(1, _VOCABULARY) for _ in range(num_tokens)]
