"""What the worker side has to know of its rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.data.frame import BLAKE3_BYTES, NO_DIGEST, XXH3_BYTES
from lmcache_connector.p2p.ring import Ring
from lmcache_connector.storage.geometry import ChunkGeometry


@dataclass(frozen=True, slots=True)
class P2PWorkerSettings:
    """``card`` without its transports, which are known once they listen. ``block_geometry``: this
    rank's part of one block. ``layer_widths``: content bytes of a token and KV head, by layer name.
    ``max_block_bytes``: of one block on the rank that holds most. ``max_blocks``: of the longest
    prompt. ``first_rank``: ranks of data-parallel engines before this one. ``machine_host``: where
    a rank on another machine than the instance's ``host`` is reached; empty if there is only one.
    """

    config: P2PConfig
    card: Card
    own: RankTopology
    block_geometry: ChunkGeometry
    layer_widths: dict[str, int]
    num_kv_heads: int
    max_block_bytes: int
    max_blocks: int
    produces: bool
    consumes: bool
    first_rank: int = 0
    machine_host: str = ""

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.block_geometry.num_tokens

    @property
    def digest_bytes(self) -> int:
        """Of the digests that frames carry."""
        if self.config.secret is not None:
            return BLAKE3_BYTES
        return XXH3_BYTES if self.config.checksum else NO_DIGEST

    def ring(self, num_blocks: int) -> Ring:
        """How a prompt of so many blocks lies in memory."""
        return Ring.of(num_blocks, self.max_block_bytes, self.config.largest_buffer_bytes)

    def own_host(self, is_here: bool) -> str:
        """Where this rank is reached. ``is_here``: the instance's ``host`` is this machine's."""
        return self.config.host if is_here or not self.machine_host else self.machine_host

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def geometry(self, num_blocks: int) -> ChunkGeometry:
        """This rank's part of so many blocks."""
        return replace(self.block_geometry, num_tokens=num_blocks * self.block_size)
