"""A sink that keeps what lands, and the session that may send to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from lmcache_connector.p2p.data.base import Landing, Session
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Cause

SESSION = Session(b"s" * 16, b"k" * 32)


@dataclass
class Collector:
    """A sink that keeps what lands. ``refuses``: tickets nobody wants. ``room``: memory for it."""

    room: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size))
    refuses: frozenset[int] = frozenset()
    frames: list[tuple[Frame, list[bytes]]] = field(default_factory=list)
    incomplete: int = 0
    losses: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def land(self, session: bytes, frame: Frame) -> Landing | None:
        assert session == SESSION.name
        if frame.ticket == 666:
            raise PeerError("a frame of something else")
        if frame.ticket in self.refuses:
            return None
        buffers = [self.room(frame.head_bytes) for _ in range(frame.num_heads)]
        return Landing(buffers, (frame, buffers))

    def landed(self, landing: Landing, *, complete: bool) -> None:
        frame, buffers = cast(tuple[Frame, list[memoryview]], landing.token)
        with self.changed:
            if complete:
                self.frames.append((frame, [bytes(b) for b in buffers]))
            else:
                self.incomplete += 1
            self.changed.notify_all()

    def lost(self, session: bytes, cause: Cause) -> None:
        with self.changed:
            self.losses.append(cause.text)
            self.changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, 10)


def frame_of(payload: list[bytes], ticket: int = 1, digests: tuple[bytes, ...] = ()) -> Frame:
    return Frame(ticket, 3, 2, len(payload), 5, 4, len(payload[0]), digests)


def key_of(session: bytes) -> bytes | None:
    return SESSION.key if session == SESSION.name else None
