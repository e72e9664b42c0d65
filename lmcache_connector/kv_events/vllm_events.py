"""Converts vLLM's requests to descriptions of blocks, and events to vLLM's format."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_connector.kv_events.log import BlockRun, KvEvent
from lmcache_connector.plans import Tier
from lmcache_connector.vllm_compat.api.names import (
    BlockHash,
    BlockRemoved,
    BlockStored,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheEvent, Request

_MEDIUM = {Tier.CPU: "CPU", Tier.REDIS: "STORAGE"}
_GROUP = 0  # events report the first part of each chunk, whatever groups a model has


def describe_chunk(
    request: Request,
    index: int,
    keys: Sequence[bytes],
    chunk_size: int,
    block_size: int,
    *,
    shared: bool,
) -> BlockRun:
    """The blocks of chunk ``index`` of a request with chunk keys ``keys``. Sizes in tokens.
    ``shared``: other instances use these keys too.

    Without vLLM's prefix caching blocks have no hashes: the chunk then counts as one block, named
    by its key.
    """
    start, per_chunk = index * chunk_size, chunk_size // block_size
    hashes = request.block_hashes[index * per_chunk : (index + 1) * per_chunk]
    parent = request.block_hashes[index * per_chunk - 1] if index and hashes else None
    if len(hashes) < per_chunk:
        hashes, block_size = [BlockHash(keys[index])], chunk_size
        parent = BlockHash(keys[index - 1]) if index else None
    borders = range(start, start + chunk_size, block_size)
    lora = request.lora_request
    return BlockRun(
        hashes=tuple(hashes),
        parent_hash=parent,
        token_ids=array("I", request.all_token_ids[start : start + chunk_size]),
        block_size=block_size,
        lora=(lora.adapter_id, lora.name) if lora else None,
        extra_keys=tuple(
            generate_block_hash_extra_keys(request, at, at + block_size, 0)[0] for at in borders
        ),
        shared=shared,
    )


def to_vllm(event: KvEvent) -> KVCacheEvent:
    """The event in vLLM's format."""
    medium, locality, blocks = _MEDIUM[event.tier], _locality(event), event.blocks
    hashes = [maybe_convert_block_hash(BlockHash(name)) for name in blocks.hashes]
    if not event.is_stored:
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=_GROUP, locality=locality)
    lora_id, lora_name = blocks.lora or (None, None)
    parent = blocks.parent_hash
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(BlockHash(parent)) if parent else None,
        token_ids=list(blocks.token_ids),
        block_size=blocks.block_size,
        lora_id=lora_id,
        medium=medium,
        lora_name=lora_name,
        extra_keys=to_event_extra_keys(blocks.extra_keys),
        group_idx=_GROUP,
        locality=locality,
    )


def _locality(event: KvEvent) -> str:
    """Routers credit every instance for ``REMOTE`` blocks. Chunks in Redis whose keys only this
    instance uses are ``LOCAL``: others cannot load them."""
    return "REMOTE" if event.tier is Tier.REDIS and event.blocks.shared else "LOCAL"
