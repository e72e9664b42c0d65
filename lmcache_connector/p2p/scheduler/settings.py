"""What the scheduler side has to know of its instance."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.ring import Ring


@dataclass(frozen=True, slots=True)
class P2PSchedulerSettings:
    """``block_size``: tokens. ``block_bytes``: of the rank that holds most. ``num_writers``: ranks
    that send something. ``buffer_bytes``: per rank, with the overflow; ``largest_buffer_bytes``:
    what one prompt can have of it at most."""

    block_size: int
    block_bytes: int
    world_size: int
    num_writers: int
    tp_size: int
    buffer_bytes: int
    largest_buffer_bytes: int
    buffer_wait_seconds: float
    load_deadline_seconds: float
    engine_id: str
    address: PeerAddress

    def ring(self, num_tokens: int) -> Ring:
        """How a prompt lies in the buffers of the rank that holds most."""
        num_blocks = self.num_blocks(num_tokens)
        return Ring.of(num_blocks, self.block_bytes, self.largest_buffer_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)
