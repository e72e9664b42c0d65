"""Prompts that stay in the producer's paged cache until their consumers have read them there.

A consumer asks where a prompt lies, reads it, and then asks for the proof: digests of what it read,
which it gets only if the blocks have held the prompt all the time. So what is read while blocks are
let go, at the end of a lease or of this instance, is never used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import CacheForm, Message
from lmcache_connector.p2p.control.peers import Overlap, Peer, overlap, ranks_of
from lmcache_connector.p2p.crew import Crew
from lmcache_connector.p2p.data.frame import BLAKE3_BYTES, digest_of
from lmcache_connector.p2p.data.nixl_agent import Nixl
from lmcache_connector.p2p.memory.cache_form import bytes_at, runs
from lmcache_connector.p2p.plans import HandoverHold, HeldPrompt
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings

logger = logging.getLogger(__name__)

OTHER_PROMPT = Cause(Reason.OTHER_PROMPT, "the prompt there was another one")
_BEGUN_ANEW = Cause(Reason.PREEMPTED, "it was begun anew")
_EXPIRED = Cause(Reason.EXPIRED, "nobody fetched it in time")
_NOT_DIGESTED = Cause(Reason.COPY_FAILED, "its digests could not be made")
_MAX_DIGESTS = 64

_Reader = tuple[str, int]
"""Engine and rank."""
_Asked = tuple[Overlap, int]
"""What a reader wants, and from which block on."""


@dataclass(eq=False)
class _Held:
    """``digests``: by what is read; ``None`` while they are made. ``told``: sessions that know
    where it lies. ``done``: who has read it. ``touched_at``: when a consumer last asked for it, or
    it was computed."""

    hold: HandoverHold
    prompt: HeldPrompt
    expires_at: float
    touched_at: float
    digests: dict[_Asked, tuple[bytes, ...] | None] = field(default_factory=dict)
    num_digesting: int = 0
    told: set[bytes] = field(default_factory=set)
    done: set[_Reader] = field(default_factory=set)
    over: bool = False


class HeldPrompts:
    """All of one rank. Thread-safe. ``ended(transfer_id, cause)``: called, under the lock, when one
    is over; without a cause all have read it. ``changed``: notified when blocks are free."""

    def __init__(
        self,
        settings: P2PWorkerSettings,
        form: CacheForm,
        nixl: Nixl,
        changed: threading.Condition,
        ended: Callable[[str, Cause | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._form = form
        self._nixl = nixl
        self._changed = changed
        self._ended = ended
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._leaving: list[_Held] = []
        self._crew = Crew("lmc-p2p-digest", 1, 1 << 16)

    # -- the engine's step thread --------------------------------------------------------------

    def hold(self, hold: HandoverHold, prompt: HeldPrompt) -> None:
        """The blocks are complete. Their digests are made ahead, as most consumers want them."""
        own = self._settings.own
        with self._changed:
            now = self._clock()
            held = _Held(hold, prompt, now + self._settings.config.lease_seconds, now)
            if not own.write_shards:  # another rank holds a replica
                self._leaving.append(held)
                return
            former = self._held.get(hold.transfer_id)
            if former is not None:
                self._end(former, _BEGUN_ANEW)
            self._held[hold.transfer_id] = held
            everything = Overlap(tuple(own.write_shards), own.layer_start, own.layer_end)
            self._digest(held, (everything, 0))

    def take_free(self) -> frozenset[str]:
        """Requests whose blocks nobody needs any more."""
        with self._changed:
            now = self._clock()
            for held in [h for h in self._held.values() if now >= h.expires_at]:
                self._end(held, _EXPIRED)
            free = [held for held in self._leaving if not held.num_digesting]
            self._leaving = [held for held in self._leaving if held.num_digesting]
            return frozenset(held.hold.request_id for held in free)

    @property
    def is_empty(self) -> bool:
        with self._changed:
            return not self._held and not self._leaving

    def end_all(self, cause: Cause, seconds: float) -> bool:
        """Whether nothing reads the blocks here within ``seconds``; peers that still do get no
        proof."""
        with self._changed:
            for held in list(self._held.values()):
                self._end(held, cause)
            return self._changed.wait_for(
                lambda: not any(held.num_digesting for held in self._leaving), seconds
            )

    def close(self) -> None:
        self._crew.close()

    # -- the control server's thread -----------------------------------------------------------

    def show(self) -> Message:
        """Raises ``PeerError``."""
        return messages.Shown(self._nixl.metadata(), self._form)

    def wanted(self, peer: Peer, want: messages.Want) -> Message | None:
        """``None``: it is not held."""
        with self._changed:
            held = self._held.get(want.transfer_id)
            if held is None:
                return None
            if held.prompt.digest != want.digest:
                return messages.Gone(OTHER_PROMPT.to_wire())
            asked = self._asked(peer, want.first_block)
            if asked is not None:
                self._digest(held, asked)
            self._renew(held)
            held.told.add(peer.session)
            return messages.Held(held.prompt.block_ids[want.first_block :])

    def proof(self, peer: Peer, read: messages.HaveRead) -> Message:
        """The answer to a consumer that has read; ``Coming``: a moment later."""
        with self._changed:
            held = self._held.get(read.transfer_id)
            asked = self._asked(peer, read.first_block)
            # Another prompt may be held under its name by now, in other blocks.
            if held is None or asked is None or peer.session not in held.told:
                return messages.Unknown()
            self._renew(held)
            digests = held.digests.get(asked)
            if digests is None:
                self._digest(held, asked)
                return messages.Coming()
            held.done.add((peer.card.engine_id, peer.card.rank))
            if self._audience(peer) <= held.done:
                self._end(held, None)
            return messages.Proof(digests)

    def find(self, transfer_id: str) -> HandoverHold | None:
        """What is held under this name."""
        with self._changed:
            held = self._held.get(transfer_id)
            return held.hold if held is not None else None

    def keep(self, peer: Peer, transfer_ids: Iterable[str], *, in_blocks: bool) -> None:
        """Their requests read, or wait in line: ``in_blocks`` says whether that is enough."""
        with self._changed:
            for held in filter(None, map(self._held.get, transfer_ids)):
                is_read = peer.session in held.told
                if is_read or in_blocks:
                    self._renew(held, is_read=is_read)

    def end(self, transfer_id: str, cause: Cause) -> HandoverHold | None:
        """Let the blocks go; who had them."""
        with self._changed:
            held = self._held.get(transfer_id)
            if held is not None:
                self._end(held, cause)
            return held.hold if held is not None else None

    def untouched(self, seconds: float) -> list[HandoverHold]:
        """Those that nobody has asked for, for so long, to be kept elsewhere."""
        with self._changed:
            before = self._clock() - seconds
            return [held.hold for held in self._held.values() if held.touched_at <= before]

    def take(self, hold: HandoverHold) -> None:
        """No longer to be read here: the caller keeps the blocks from now on."""
        with self._changed:
            del self._held[hold.transfer_id]

    # -- details, under the lock ---------------------------------------------------------------

    def _asked(self, peer: Peer, first_block: int) -> _Asked | None:
        part = overlap(self._settings.own, ranks_of(peer.card)[peer.card.rank])
        return (part, first_block) if part is not None else None

    def _audience(self, peer: Peer) -> set[_Reader]:
        """The ranks of an instance that need something of this one."""
        ranks = ranks_of(peer.card)
        return {(peer.card.engine_id, r.rank) for r in ranks if overlap(self._settings.own, r)}

    def _renew(self, held: _Held, *, is_read: bool = True) -> None:
        now = self._clock()
        held.expires_at = now + self._settings.config.lease_seconds
        if is_read:
            self._nixl.wake()
            held.touched_at = now

    def _digest(self, held: _Held, asked: _Asked) -> None:
        """Have the digests made, once."""
        if asked in held.digests or held.over:
            return
        if len(held.digests) < _MAX_DIGESTS and self._crew.submit(partial(self._make, held, asked)):
            held.digests[asked] = None
            held.num_digesting += 1

    def _end(self, held: _Held, cause: Cause | None) -> None:
        held.over = True
        if self._held.get(held.hold.transfer_id) is held:  # it may have been taken, and held anew
            del self._held[held.hold.transfer_id]
            self._leaving.append(held)
            self._ended(held.hold.transfer_id, cause)
            self._changed.notify_all()

    # -- the digests' thread -------------------------------------------------------------------

    def _make(self, held: _Held, asked: _Asked) -> None:
        digests: tuple[bytes, ...] | None = None
        try:
            if not held.over:
                digests = self._digests(held.prompt, *asked)
        except Exception:  # it costs this hand-over
            logger.exception("No digests of %s", held.hold.transfer_id)
        with self._changed:
            held.num_digesting -= 1
            held.digests[asked] = digests
            if digests is None and not held.over:
                self._end(held, _NOT_DIGESTED)
            self._changed.notify_all()

    def _digests(self, prompt: HeldPrompt, part: Overlap, first_block: int) -> tuple[bytes, ...]:
        own = self._settings.own
        heads = [own.read_shards.index(head) for head in part.heads]
        ids = prompt.block_ids[first_block:]
        layers = self._form.layers[
            part.first_layer - own.layer_start : part.last_layer - own.layer_start
        ]
        return tuple(
            digest_of(bytes_at(runs(self._form, layer, ids, heads)), BLAKE3_BYTES)
            for layer in layers
        )
