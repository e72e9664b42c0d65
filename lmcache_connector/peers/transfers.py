"""KV transfers from this rank: which chunks of its CPU tier another instance will load.

::

    announced -> coming: stores in progress -> complete: chunks known -> read, or lease expired

A transfer pins its chunks, within a limit that all transfers share, until no instance that asked
for it needs it any more. A complete one expires once nobody has asked for ``lease_seconds``. The
engine's step and its job lanes report stores; the peer server's thread answers readers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmcache_connector.peers.commands import KEY_PREFIX_BYTES, Chunks, IncompleteTransfer, Lease
from lmcache_connector.plans import TransferUpdate

logger = logging.getLogger(__name__)

_MAX_TRANSFERS = 4096
_MAX_READERS, _MAX_READER_BYTES = 64, 256
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(slots=True)
class _Transfer:
    """``leases`` by key, ``None`` for a chunk that is not pinned. ``open_jobs``: store jobs that
    complete the transfer; ``None``: more may follow. ``until``: expiry, on the clock.
    ``is_wanted``: not every reader is done; chunks are pinned only then."""

    until: float
    leases: dict[bytes, Lease | None] = field(default_factory=dict)
    open_jobs: set[int] | None = None
    readers: set[bytes] = field(default_factory=set)
    is_wanted: bool = True
    refused: set[bytes] = field(default_factory=set)  # keys that count in `Transfers.num_refused`

    @property
    def is_complete(self) -> bool:
        return self.open_jobs is not None and not self.open_jobs


class Transfers:
    """``max_bytes``: pinned chunks of all transfers. ``on_change`` is called, from any thread, when
    a transfer is complete. ``has_updates``: `finished` would return something; a plain
    attribute, polled every step. ``num_refused``: chunks beyond ``max_bytes``. Thread-safe."""

    def __init__(
        self,
        chunks: Chunks,
        max_bytes: int,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._open_jobs: set[int] = set()
        self._held: dict[str, set[int]] = {}  # by request: store jobs that read its blocks
        self._finished: set[str] = set()
        self._leased_bytes = 0
        self._next_look = 0.0
        self.has_updates = False
        self.num_refused = 0
        self.on_change: Callable[[], None] = lambda: None
        self.seal: Callable[[Iterable[bytes]], None] = lambda keys: None
        """Called with keys of chunks that readers will ask for: on the lane of stores or audits, or
        on the step's thread for a refused store."""

    # -- the engine's step, and its job lanes ---------------------------------------------------

    def store_begins(self, job_id: int) -> None:
        with self._lock:
            self._open_jobs.add(job_id)

    def store_ended(self, job_id: int, keys: Sequence[bytes]) -> None:
        """The store job succeeded or failed on this rank; ``keys``: of its chunks."""
        with self._lock:
            wanted = [each for each in self._transfers.values() if each.is_wanted]
            coming = [each for each in wanted if not each.is_complete]
            promised = [key for key in keys if any(key in each.leases for each in coming)]
        try:
            self.seal(promised)  # slow: outside the lock, which the step takes
        except Exception:  # the first read seals them; blocks and readers must not wait forever
            logger.exception("Chunks of a KV transfer cannot be sealed ahead of its readers")
        with self._lock:
            self._open_jobs.discard(job_id)
            for request_id, job_ids in list(self._held.items()):
                job_ids.discard(job_id)
                self._finish_if_stored(request_id)
            for transfer in self._transfers.values():
                if transfer.is_complete:
                    continue
                self._lease(transfer, [key for key in keys if key in transfer.leases])
                if transfer.open_jobs is not None:
                    transfer.open_jobs.discard(job_id)
                    self._settle_if_complete(transfer)

    def apply(self, updates: Iterable[TransferUpdate]) -> None:
        """Called after the store jobs of the same plan have begun. Idempotent."""
        with self._lock:
            for update in updates:
                self._apply(update)

    def finished(self) -> frozenset[str]:
        """Requests whose blocks no store reads any more, until `forget_finished`."""
        with self._lock:
            return frozenset(self._finished)

    def forget_finished(self, told: frozenset[str]) -> None:
        """vLLM is told of these requests: a second time would end its engine."""
        with self._lock:
            self._finished -= told
            self.has_updates = bool(self._finished)

    # -- readers --------------------------------------------------------------------------------

    def state(self, reader: bytes, transfer_id: str) -> bytes | IncompleteTransfer:
        """Concatenated key prefixes of the pinned chunks of a complete transfer, which stay pinned
        until `done` or expiry."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return IncompleteTransfer.UNKNOWN
            if len(transfer.readers) < _MAX_READERS and len(reader) <= _MAX_READER_BYTES:
                transfer.readers.add(reader)
            transfer.until = self._clock() + self._lease_seconds
            if transfer.is_complete or not transfer.is_wanted:
                transfer.is_wanted = True
                self._lease(transfer, list(transfer.leases))  # `done` may have unpinned them
            if not transfer.is_complete:
                return IncompleteTransfer.COMING
            is_read_from_owner = self._chunks.is_read_from_owner  # pinned and reported there
            kept = (
                key
                for key, lease in transfer.leases.items()
                if lease is not None or is_read_from_owner(key)
            )
            return b"".join(key[:KEY_PREFIX_BYTES] for key in kept)

    def done(self, reader: bytes, transfer_id: str) -> None:
        """The reader no longer needs the transfer, complete or not. It may not have asked this rank
        yet."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.readers.discard(reader)
                transfer.is_wanted = bool(transfer.readers)
                if not transfer.is_wanted:
                    self._release(transfer)

    def maintain(self) -> None:
        """End expired transfers. Cheap to call often."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        with self._lock:
            for name, transfer in list(self._transfers.items()):
                if transfer.is_complete and transfer.until < now:
                    self._release(self._transfers.pop(name))

    def close(self) -> None:
        with self._lock:
            while self._transfers:
                self._release(self._transfers.popitem()[1])

    # -- under the lock -------------------------------------------------------------------------

    def _apply(self, update: TransferUpdate) -> None:
        if update.held_request:
            self._held[update.held_request] = self._open_jobs & (update.ends_after or set())
            self._finish_if_stored(update.held_request)
        transfer = self._transfers.get(update.transfer_id)
        is_announced = update == TransferUpdate(update.transfer_id)
        if transfer is not None and transfer.is_complete and is_announced:  # a new one of that name
            self._release(self._transfers.pop(update.transfer_id))
            transfer = None
        if transfer is None:
            if len(self._transfers) >= _MAX_TRANSFERS:
                self._release(self._transfers.pop(next(iter(self._transfers))))
            transfer = _Transfer(self._clock() + self._lease_seconds)
            self._transfers[update.transfer_id] = transfer
        for key in update.keys:
            transfer.leases.setdefault(key, None)
        self._lease(transfer, update.keys)
        if update.ends_after is not None:
            transfer.open_jobs = (transfer.open_jobs or set()) | self._open_jobs & update.ends_after
            self._settle_if_complete(transfer)

    def _settle_if_complete(self, transfer: _Transfer) -> None:
        if transfer.is_complete:
            transfer.until = self._clock() + self._lease_seconds
            self.on_change()

    def _finish_if_stored(self, request_id: str) -> None:
        if not self._held[request_id]:
            del self._held[request_id]
            self._finished.add(request_id)
            self.has_updates = True

    def _lease(self, transfer: _Transfer, keys: Iterable[bytes]) -> None:
        """Pin the chunks that are cached, within ``max_bytes``."""
        for key in keys if transfer.is_wanted else ():
            if transfer.leases[key] is not None:
                continue
            try:
                lease = self._chunks.lease(key)
            except Exception:  # blocks and stores must not wait forever
                logger.exception("A chunk cannot be pinned for a KV transfer")
                return
            if lease is None:
                continue
            if self._leased_bytes + len(lease.view) > self._max_bytes:
                lease.release()
                self.num_refused += key not in transfer.refused
                transfer.refused.add(key)
                continue
            self._leased_bytes += len(lease.view)
            transfer.leases[key] = lease

    def _release(self, transfer: _Transfer) -> None:
        for key, lease in transfer.leases.items():
            if lease is not None:
                self._leased_bytes -= len(lease.view)
                lease.release()
                transfer.leases[key] = None
