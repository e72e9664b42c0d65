"""Reads prompts out of producers' paged caches into this rank's own, from block to block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import CacheForm
from lmcache_connector.p2p.control.peers import Overlap, overlap, ranks_of
from lmcache_connector.p2p.data.frame import BLAKE3_BYTES, digest_of
from lmcache_connector.p2p.data.nixl_agent import Nixl, Runs
from lmcache_connector.p2p.errors import PeerError, ReadError, RefusedError
from lmcache_connector.p2p.memory.cache_form import bytes_at, fits, in_order, runs
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.incoming import Waiting
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.session import PeerSession
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings

_PROOF_PAUSE_SECONDS = 0.001
_KEEP_SECONDS = 0.5
_DAMAGED = Cause(Reason.BAD_CHECKSUM, "bytes were damaged on the way")
_LET_GO = Cause(Reason.LOST, "the producer let the blocks go while they were read")


class _UnwantedError(PeerError):
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Place:
    """A producer rank whose cache can be read, and what there is for this rank. ``heads``: places
    of the part's heads there."""

    metadata: bytes
    form: CacheForm
    part: Overlap
    heads: tuple[int, ...]
    first_layer: int


@dataclass(frozen=True, slots=True)
class _LayerRuns:
    """Of one layer, in the order of its digest."""

    local: Runs
    remote: Runs


class Reader:
    """Belongs to no thread; a session does. ``form``: of this rank's paged cache."""

    def __init__(
        self,
        settings: P2PWorkerSettings,
        form: CacheForm,
        nixl: Nixl,
        buffer: ReceiveBuffer,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._form = form
        self._nixl = nixl
        self._buffer = buffer
        self._clock = clock

    def places(self, sessions: Sequence[PeerSession]) -> list[Place] | None:
        """How all these ranks can be read; ``None`` if one cannot. Raises ``PeerError``."""
        found = []
        for session in sessions:
            place = self._place(session) if session.has_link else None
            if place is None:
                return None
            found.append(place)
        return found

    def read(
        self,
        sessions: Sequence[PeerSession],
        places: Sequence[Place],
        held: Sequence[messages.Held],
        waiting: Waiting,
    ) -> None:
        """Fill the blocks of a request. Raises ``PeerError`` for a producer that was lost; the
        request has ended then too. Raises ``ReadError`` if it has to come otherwise."""
        if not self._buffer.take_to_read(waiting):
            return
        num_bytes, started = 0, self._clock()
        cause: Cause | None = Cause(Reason.OTHER, "reading failed")
        seconds, is_read = 0.0, True
        try:
            work = [
                self._layers(place, each, waiting) for place, each in zip(places, held, strict=True)
            ]
            for session, place, layers in zip(sessions, places, work, strict=True):
                num_bytes += self._fetch(session, place, layers, waiting)
            seconds = self._clock() - started
            causes = [
                self._disproof(session, layers, waiting)
                for session, layers in zip(sessions, work, strict=True)
            ]
            cause = next(filter(None, causes), None)
        except _UnwantedError as error:
            cause = error.cause
        except ReadError:
            is_read = False
            raise
        except PeerError as error:
            cause = error.cause
            raise
        finally:
            with self._buffer.changed:
                if is_read:
                    waiting.has_read(num_bytes, seconds, cause)
                else:
                    waiting.taken = False
                self._buffer.changed.notify_all()

    def forget(self, places: Sequence[Place]) -> None:
        """Nothing more is read there."""
        for place in places:
            self._nixl.forget(place.metadata)

    # -- details -------------------------------------------------------------------------------

    def _place(self, session: PeerSession) -> Place | None:
        own, card = self._settings.own, session.card
        peer = ranks_of(card)[card.rank]
        part = overlap(peer, own)
        try:
            shown = session.ask(messages.Show())
        except RefusedError:
            return None
        if part is None or not isinstance(shown, messages.Shown):
            return None
        heads = tuple(map(peer.read_shards.index, part.heads))
        place = Place(shown.metadata, shown.form, part, heads, peer.layer_start)
        if len(shown.form.layers) != peer.layer_end - peer.layer_start:
            return None
        num_heads = len(part.heads)
        pairs = [self._pair(place, layer) for layer in part.layers()]
        if not all(fits(self._form, mine, shown.form, its, num_heads) for mine, its in pairs):
            return None
        return place

    def _pair(self, place: Place, layer: int) -> tuple[messages.LayerForm, messages.LayerForm]:
        """A layer of the model, here and there."""
        mine = self._form.layers[layer - self._settings.own.layer_start]
        return mine, place.form.layers[layer - place.first_layer]

    def _layers(self, place: Place, held: messages.Held, waiting: Waiting) -> list[_LayerRuns]:
        """Raises ``PeerError`` for blocks that are not there."""
        ids, theirs = waiting.load.block_ids, held.block_ids
        if len(theirs) != len(ids) or max(theirs) >= place.form.num_blocks:
            raise PeerError("the producer names blocks that do not fit", Reason.PROTOCOL)
        heads = [self._settings.own.read_shards.index(head) for head in place.part.heads]
        return [
            _LayerRuns(
                runs(self._form, mine, ids, heads),
                runs(place.form, its, theirs, place.heads),
            )
            for mine, its in (self._pair(place, layer) for layer in place.part.layers())
        ]

    def _fetch(
        self,
        session: PeerSession,
        place: Place,
        layers: Sequence[_LayerRuns],
        waiting: Waiting,
    ) -> int:
        local = np.concatenate([layer.local for layer in layers])
        remote = np.concatenate([layer.remote for layer in layers])
        asked_at = self._clock()

        def go_on() -> None:
            nonlocal asked_at
            self._check_is_wanted(waiting)
            if self._clock() - asked_at >= _KEEP_SECONDS:
                session.ask(messages.Keep((waiting.load.transfer_id,)))
                asked_at = self._clock()

        mine, theirs = in_order(local, remote)
        self._nixl.read(place.metadata, mine, theirs, go_on)
        return int(local[:, 1].sum())

    def _disproof(
        self, session: PeerSession, layers: Sequence[_LayerRuns], waiting: Waiting
    ) -> Cause | None:
        """Why what was read may not be what the producer computed."""
        load = waiting.load
        answer = session.ask(messages.HaveRead(load.transfer_id, load.first_block))
        while isinstance(answer, messages.Coming):
            self._check_is_wanted(waiting)
            time.sleep(_PROOF_PAUSE_SECONDS)
            answer = session.ask(messages.HaveRead(load.transfer_id, load.first_block))
        if not isinstance(answer, messages.Proof):
            return _LET_GO
        digests = tuple(digest_of(bytes_at(layer.local), BLAKE3_BYTES) for layer in layers)
        return None if answer.digests == digests else _DAMAGED

    def _check_is_wanted(self, waiting: Waiting) -> None:
        if waiting.cause is not None:
            raise _UnwantedError(waiting.cause.text, waiting.cause.reason)
