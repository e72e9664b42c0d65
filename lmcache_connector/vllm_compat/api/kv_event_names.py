"""vLLM's names for events of its KV cache."""

from __future__ import annotations

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

__all__ = [
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "generate_block_hash_extra_keys",
    "maybe_convert_block_hash",
    "to_event_extra_keys",
]
