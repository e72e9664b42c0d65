"""Where a layer's blocks of one KV head lie in the memory of a transfer: one run of bytes."""

from __future__ import annotations

from lmcache_connector.storage.geometry import ChunkGeometry


def run_of(
    geometry: ChunkGeometry, num_blocks: int, layer: int, head: int, first: int, last: int
) -> slice:
    """Bytes of blocks ``[first, last)`` in ``[head][layer][block]`` memory.

    ``layer`` and ``head`` count over the model; ``num_blocks`` is the transfer's. Raises
    ``ValueError`` for what is not in there.
    """
    if not geometry.layer_start <= layer < geometry.layer_end or head not in geometry.shards:
        raise ValueError(f"layer {layer}, head {head} are not in this part of the model")
    if not 0 <= first < last <= num_blocks:
        raise ValueError(f"no blocks {first} to {last} among {num_blocks}")
    index = layer - geometry.layer_start
    start = geometry.shards.index(head) * geometry.shard_bytes + geometry.layer_offsets[index]
    block = geometry.layer_widths[index] * (geometry.num_tokens // num_blocks)
    return slice(start + first * block, start + last * block)
