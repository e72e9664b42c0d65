"""Chunks waiting to be written, bounded in bytes.

When there is no room, the queue drops the chunk that is deepest in its prompt, and of several the
newest: a prefix without its end is still of use, an end without its prefix is not.

On a machine whose cores compute the model, a writer takes time from a forward pass. So the queue
can be told to hold its writes back while one runs, but not for long, and not when it fills up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

OnDone = Callable[[bool], None]

MAX_HOLD_SECONDS = 1.0
# How late a writer may notice that a hold has ended.
_HOLD_SLICE_SECONDS = 0.1


@dataclass(eq=False)
class PendingWrite:
    """A chunk to be written. ``buffer`` must not change before `finish`. ``order`` is the chunk's
    index in its prompt; ``queued_at`` is a reading of the queue's clock, in seconds."""

    key: bytes
    buffer: memoryview
    order: int
    callbacks: list[OnDone] = field(default_factory=list)
    queued_at: float = 0.0

    def finish(self, stored: bool) -> None:
        """Tell those who wait, which gives the buffer back to its owner."""
        for on_done in self.callbacks:
            try:
                on_done(stored)
            except Exception:  # a caller's bug must not stop everyone's writes
                logger.exception("on_done of a write failed")


class WriteQueue:
    """Holds up to ``max_bytes`` of chunks. Writes that were taken still count until they are
    finished. ``clock`` returns seconds. Thread-safe."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._hold_until = float("-inf")
        self._changed = threading.Condition()
        self._waiting: list[PendingWrite] = []
        self._taken: list[PendingWrite] = []
        self._num_bytes = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def room_bytes(self) -> int:
        return self._max_bytes - self._num_bytes

    def offer(self, write: PendingWrite) -> list[PendingWrite]:
        """Queue ``write``. Returns the writes for which there is no room, ``write`` itself or
        others; the caller finishes them. A chunk that is queued already only gets the callbacks."""
        with self._changed:
            if self._closed:
                return [write]
            for other in (*self._waiting, *self._taken):
                if other.key == write.key:
                    other.callbacks += write.callbacks
                    return []
            dropped = self._make_room(write)
            if write not in dropped:
                write.queued_at = self._clock()
                self._waiting.append(write)
                self._num_bytes += len(write.buffer)
                self._changed.notify()
            return dropped

    def hold(self, until: float) -> None:
        """Hand out nothing before ``until``, a reading of the clock in seconds.

        Writes that have waited for ``MAX_HOLD_SECONDS`` go out nevertheless, and so does everything
        while the queue is more than half full.
        """
        self._hold_until = until

    def take(self, max_bytes: int, timeout: float) -> list[PendingWrite]:
        """The oldest writes: up to ``max_bytes``, or one. Empty after ``timeout`` seconds."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout)
            end = self._clock() + timeout
            while (held := self._held_seconds()) > 0.0:
                left = end - self._clock()
                if left <= 0.0:
                    return []
                self._changed.wait(min(held, left, _HOLD_SLICE_SECONDS))
            size, taken = 0, list[PendingWrite]()
            while self._waiting and size < max_bytes:
                taken.append(self._waiting.pop(0))
                size += len(taken[-1].buffer)
            self._taken += taken
            return taken

    def finish(self, write: PendingWrite, stored: bool) -> None:
        """End a taken write: tell those who wait, then free its room."""
        with self._changed:
            self._taken.remove(write)  # from here on, `offer` adds no callback to it
        write.finish(stored)
        with self._changed:
            self._num_bytes -= len(write.buffer)
            self._changed.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until the queue is empty. False if that takes over ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, timeout)

    def close(self) -> list[PendingWrite]:
        """Accept no more writes. Returns those not yet taken; the caller finishes them."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._num_bytes -= sum(len(write.buffer) for write in left)
            self._changed.notify_all()
            return left

    def _held_seconds(self) -> float:
        if not self._waiting or self._closed or 2 * self._num_bytes > self._max_bytes:
            return 0.0
        until = min(self._hold_until, self._waiting[0].queued_at + MAX_HOLD_SECONDS)
        return until - self._clock()

    def _make_room(self, write: PendingWrite) -> list[PendingWrite]:
        """The writes dropped to make ``write`` fit, or ``write`` itself if it cannot fit."""
        excess = self._num_bytes + len(write.buffer) - self._max_bytes
        if excess <= 0:
            return []
        victims: list[PendingWrite] = []
        ages = {id(write): age for age, write in enumerate(self._waiting)}
        for victim in sorted(self._waiting, key=lambda w: (w.order, ages[id(w)]), reverse=True):
            if excess <= 0 or victim.order <= write.order:
                break
            victims.append(victim)
            excess -= len(victim.buffer)
        if excess > 0:
            return [write]
        for victim in victims:
            self._waiting.remove(victim)
            self._num_bytes -= len(victim.buffer)
        return victims
