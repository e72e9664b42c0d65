"""Prompts and transfer settings of the engine tests and benchmarks."""

from __future__ import annotations

import random
from typing import Any

BLOCK_SIZE = 128
CHUNK_SIZE = 2 * BLOCK_SIZE  # so that a hit can begin inside a chunk


def kv_transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The JSON of ``--kv-transfer-config``. Hits are loaded, whatever that costs."""
    return {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "cpu_gib": 0.25,
            "chunk_size": CHUNK_SIZE,
            "compute_or_load": "always",
            **extra,
        },
    }


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 2000) for _ in range(num_tokens)]
