"""KV transfers that requests wait for, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from math import inf

from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import KEY_PREFIX_BYTES
from lmcache_connector.threads import Task


class Cause(StrEnum):
    """Why nothing can be loaded. The values are labels of a metric."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    UNKNOWN = "unknown"
    DEADLINE = "deadline"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Offered:
    """Key prefixes of the chunks that can be loaded. ``cause``: why there are none."""

    key_prefixes: frozenset[bytes] = frozenset()
    num_ranks: int = 1
    engine_id: str = ""
    cause: Cause | None = None

    def holds(self, key: bytes) -> bool:
        return key[:KEY_PREFIX_BYTES] in self.key_prefixes


@dataclass(eq=False)
class Awaited(Task[Offered]):
    """A transfer that a request waits for, until ``until`` on the clock. Without a ``transfer_id``:
    whichever of the chunks ``keys`` the source has. ``by_rank``: the chunks of complete ranks.
    ``unknown_since``: when a rank first answered that it does not know the transfer."""

    source: Address
    transfer_id: str
    until: float
    keys: Sequence[bytes] = ()
    known_by: set[int] = field(default_factory=set)  # ranks
    by_rank: dict[int, frozenset[bytes]] = field(default_factory=dict)
    unknown_since: float = inf

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def first_incomplete_rank(self) -> int:
        return next(rank for rank in count() if rank not in self.by_rank)

    def forget_answers(self) -> None:
        self.known_by.clear()
        self.by_rank.clear()
        self.unknown_since = inf
