"""KV transfers that requests wait for, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import KEY_PREFIX_BYTES
from lmcache_connector.threads import Task


class Cause(StrEnum):
    """Why nothing can be read. The values are labels of a metric."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    UNKNOWN = "unknown"
    DEADLINE = "deadline"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Offered:
    """What can be read: chunks whose keys begin so. ``cause``: why that is nothing."""

    key_prefixes: frozenset[bytes] = frozenset()
    num_ranks: int = 1
    engine_id: str = ""
    cause: Cause | None = None

    def holds(self, key: bytes) -> bool:
        return key[:KEY_PREFIX_BYTES] in self.key_prefixes


@dataclass(eq=False)
class Awaited(Task[Offered]):
    """A transfer that a request waits for, until ``until`` by the clock; without a ``transfer_id``:
    as many of the chunks ``keys`` as there are."""

    source: Address
    transfer_id: str
    until: float
    asked_at: float
    keys: Sequence[bytes] = ()
    by_rank: list[frozenset[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
