"""The interface of the data plane: frames leave by an :class:`Outlet` and land in a `Sink`.

A transport listens on every rank that receives, and connects from every rank that sends. A
connection belongs to a session of the control plane and proves it, and no frame lands that was
changed, repeated, left out or moved on its way; of payloads the sink checks the digests that their
frames carry. Memory is host memory, which may be pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.reasons import Cause


@dataclass(frozen=True, slots=True)
class Session:
    """What a connection proves itself with. ``name`` is public, ``key`` is not."""

    name: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the payload of a frame goes, head by head. ``token`` is the sink's own."""

    views: Sequence[memoryview]
    token: object


class Sink(Protocol):
    """Takes frames. Called from the transport's threads, one per connection."""

    def land(self, session: bytes, frame: Frame) -> Landing | None:
        """Where to put it. ``None``: nobody wants it any more, so its bytes are discarded.

        Every landing is given back by :meth:`landed`. Raises ``PeerError`` to end the connection.
        """

    def landed(self, landing: Landing, *, complete: bool) -> None:
        """The bytes are there, or (not ``complete``) never will be."""

    def lost(self, session: bytes, cause: Cause) -> None:
        """The session's connection is gone."""


class Outlet(Protocol):
    """A connection to one peer rank. Belongs to one thread."""

    def send(self, frame: Frame, views: Sequence[memoryview]) -> None:
        """Returns when the memory may be used again. Raises ``PeerError``; then it is of no use.

        Bounded: a peer that takes no byte for the transport's stall time is given up.
        """

    def close(self) -> None: ...


KeyOf = Callable[[bytes], bytes | None]
"""The key of a session by its name; ``None`` if there is no such session."""


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def listen(self, host: str, port: int, sink: Sink, key_of: KeyOf) -> int:
        """Start receiving; returns the port (``port`` 0: any). Raises ``PeerError``."""

    def connect(self, host: str, port: int, session: Session, seconds: float) -> Outlet:
        """Raises ``PeerError`` within ``seconds``."""

    def close(self, seconds: float) -> None:
        """Cut all connections that were accepted and stop listening. Bounded by ``seconds``."""
