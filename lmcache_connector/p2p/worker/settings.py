"""What the worker side has to know of its rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.storage.geometry import ChunkGeometry


@dataclass(frozen=True, slots=True)
class P2PWorkerSettings:
    """``card`` without its transports, which are known once they listen. ``block_geometry``: this
    rank's part of one block. ``layer_widths``: content bytes of a token and KV head, by layer name.
    ``max_blocks``: of the longest prompt. ``first_rank``: ranks of data-parallel engines before
    this one."""

    config: P2PConfig
    card: Card
    own: RankTopology
    block_geometry: ChunkGeometry
    layer_widths: dict[str, int]
    num_kv_heads: int
    max_blocks: int
    produces: bool
    consumes: bool
    first_rank: int = 0

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.block_geometry.num_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def geometry(self, num_blocks: int) -> ChunkGeometry:
        """This rank's part of so many blocks."""
        return replace(self.block_geometry, num_tokens=num_blocks * self.block_size)
