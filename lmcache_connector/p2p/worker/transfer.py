"""One prompt's KV on its way to a consumer, and one request that waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmcache_connector.p2p.control.messages import Offer
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.plans import HandoverLoad
from lmcache_connector.p2p.worker.host_buffer import Region
from lmcache_connector.storage.geometry import ChunkGeometry


@dataclass(frozen=True, slots=True)
class Check:
    """What the producer says of a run of bytes."""

    run: slice
    first_block: int
    last_block: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Ticket:
    number: int
    part: Overlap


@dataclass(eq=False)
class Incoming:
    """Memory in the same form as the producer's (``[head][layer][block]``, this rank's heads and
    layers), and a map of what has arrived. Guarded by the receive_buffer's lock.

    ``received``: bool ``[heads, layers, blocks]``.
    """

    offer: Offer
    geometry: ChunkGeometry
    region: Region
    received: npt.NDArray[np.bool_]
    expires_at: float
    tickets: dict[bytes, Ticket] = field(default_factory=dict)  # by session
    checks: dict[tuple[int, int, int], Check] = field(default_factory=dict)
    first_byte_at: float | None = None
    last_byte_at: float = 0.0
    num_bytes: int = 0
    pins: int = 0
    dropped: bool = False
    freed: bool = False

    @property
    def num_blocks(self) -> int:
        return int(self.received.shape[2])

    def num_usable(self, first_block: int) -> int:
        """Blocks from ``first_block`` on that are there in all layers and heads."""
        there = np.asarray(self.received[:, :, first_block:].all(axis=(0, 1)))
        return len(there) if there.all() else int(there.argmin())

    def part_of(self, part: Overlap) -> npt.NDArray[np.bool_]:
        """The view of ``received`` that one producer rank fills."""
        first = self.geometry.shards.index(part.heads[0])
        start = self.geometry.layer_start
        layers = slice(part.first_layer - start, part.last_layer - start)
        return self.received[first : first + len(part.heads), layers]


@dataclass(eq=False)
class Waiting:
    """A request, its blocks allocated. ``end``: why it waits no longer, empty while it does."""

    load: HandoverLoad
    since: float
    end: str = ""
    cancelled: bool = False
    taken: bool = False

    @property
    def deadline(self) -> float:
        return self.since + self.load.deadline_seconds


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that is over, for the loader. ``incoming`` is pinned if there is one."""

    waiting: Waiting
    incoming: Incoming | None
    num_blocks: int
    checks: Sequence[Check] = ()
