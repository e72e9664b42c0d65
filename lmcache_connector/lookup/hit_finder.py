"""Finds where a request's hit may end, from the chunks that the tiers hold.

The index of the CPU tiers answers at once. Redis and peers are asked when a request arrives; when
it is scheduled, it waits for their answers if that is worth the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.kv_events.log import KvEventLog
from lmcache_connector.kv_parts.hit import Hit, chunks_to_load, find_hit, is_prefix_only
from lmcache_connector.kv_parts.part import Part, Rule, keys_of_part
from lmcache_connector.lookup.background_lookup import MISS, BackgroundLookup, RequestLookup
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.threads import PENDING, Pending, StepWait

# An older answer is renewed before a request is scheduled: while the request queued, other requests
# may have stored shared chunks, and the CPU tier may have evicted some.
_STALE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class HitElsewhere:
    """The hit in memory, Redis and other peers, for a request that names an instance to load from:
    it ends before chunk ``stop``; the keys that memory lacks, and the tiers that hold these."""

    stop: int
    missing: tuple[bytes, ...]
    tiers: frozenset[Tier]


@dataclass(eq=False)
class HitFinder:
    """Finds hits in the CPU tiers, and in Redis and peers through ``lookup``.

    ``chunk_size`` is in tokens. Owns the :class:`RequestLookup` of every request.
    """

    parts: tuple[Part, ...]
    chunk_size: int
    index: ChunkIndex
    tally: Tally
    policy: LoadPolicy
    kv_events: KvEventLog
    lookup: BackgroundLookup | None = None
    clock: Callable[[], float] = time.monotonic

    def find(self, asked: RequestLookup, num_computed_tokens: int, wait: StepWait) -> Hit | Pending:
        """The hit from token ``num_computed_tokens`` on. ``PENDING``: call in the next step."""
        places: Mapping[bytes, Tier] | Pending
        places = dict.fromkeys(asked.offered_keys, Tier.PEER)
        if not places:
            self.ask(asked, num_computed_tokens // self.chunk_size)
            places = self._places(asked, num_computed_tokens, wait)
        if isinstance(places, Pending):
            return PENDING
        keys, are_in_cpu, hit = self._hit(asked, num_computed_tokens, places)
        while hit and self.index.needed is not None:
            stored = self._up_to_stores(asked, num_computed_tokens, keys, hit)
            if stored is hit:
                break
            if self._waits_for_stores(asked, num_computed_tokens, stored.stop, hit.stop):
                return PENDING
            hit = stored
        if not asked.is_counted:
            asked.is_counted = True
            tally, num_tokens = self.tally, asked.request.num_tokens - num_computed_tokens
            tally.count("lookups", Tier.CPU.value)
            tally.count("queried_tokens", amount=max(0, num_tokens))
            loaded = self._to_load(asked, num_computed_tokens, keys, are_in_cpu, hit)
            for tier in {Tier.CPU if in_cpu else places[key] for *_, key, in_cpu in loaded}:
                tally.count("lookup_hits", tier.value)
        return hit

    def _hit(
        self, asked: RequestLookup, num_computed_tokens: int, places: Mapping[bytes, Tier]
    ) -> tuple[list[Sequence[bytes]], list[list[bool]], Hit]:
        """From the chunk of token ``num_computed_tokens`` on: the keys of each part, which of them
        are in memory, and the hit that memory and ``places`` make."""
        loadable = asked.keys.loadable[num_computed_tokens // self.chunk_size :]
        num_parts, tail = len(self.parts), asked.keys.loaded_tail
        keys = [keys_of_part(loadable, number, num_parts) for number in range(num_parts)]
        held = are_in_cpu = [self.index.has_each(each) for each in keys]
        if places:
            held = [
                [in_cpu or key in places for key, in_cpu in zip(*pair, strict=True)]
                for pair in zip(keys, are_in_cpu, strict=True)
            ]
        hit = find_hit(
            self.parts,
            self.chunk_size,
            num_computed_tokens,
            asked.request.num_tokens,
            held,
            tail.end if tail is not None else None,
        )
        return keys, are_in_cpu, hit

    def _to_load(
        self,
        asked: RequestLookup,
        num_computed_tokens: int,
        keys: list[Sequence[bytes]],
        are_in_cpu: list[list[bool]],
        hit: Hit,
    ) -> list[tuple[int, int, bytes, bool]]:
        """What a load of the whole hit reads, in load order: part, index of the chunk, key, and
        whether it is in memory."""
        end_token, first = asked.keys.end_of(hit.stop), hit.first
        return [
            (number, i, keys[number][i - first], are_in_cpu[number][i - first])
            for number, part in reversed(list(enumerate(self.parts if hit else ())))
            for i in chunks_to_load(part, self.chunk_size, num_computed_tokens, end_token)
        ]

    def ask(self, asked: RequestLookup, first: int) -> None:
        """Look up chunks that the index lacks, from chunk ``first`` on, ahead of :meth:`find`. Asks
        once, and again for a request that has queued for long if the answer may have changed. Until
        the new answer comes, the former one counts."""
        if self.lookup is None or (asked.asked_keys and not self._is_old(asked)):
            return
        missing, known = self._missing(asked, first), asked.pending
        asked.asked_at = self.clock()
        if asked.asked_keys:
            # A used answer is final; an unused one is final only if it found every chunk.
            is_final = known is None or (
                known.value is not None and known.value.keys() == set(asked.asked_keys)
            )
            if is_final and frozenset(asked.asked_keys).issuperset(missing):
                return
        if missing:
            if known is not None and known.value is not None:
                asked.places = known.value
            asked.asked_keys = missing
            asked.pending = self.lookup.submit(missing)
            for tier in self.policy.remote_tiers:
                self.tally.count("lookups", tier.value)

    def find_elsewhere(
        self, asked: RequestLookup, num_computed_tokens: int, source_stop: int, wait: StepWait
    ) -> HitElsewhere | Pending | None:
        """The hit of memory, Redis and peers, if it ends later than the hit from the request's
        source, which ends before chunk ``source_stop``. ``PENDING``: call in the next step."""
        if source_stop >= len(asked.keys.loadable):
            return None
        places = self._places(asked, num_computed_tokens, wait, source_stop)
        if isinstance(places, Pending):
            return PENDING
        keys, are_in_cpu, hit = self._hit(asked, num_computed_tokens, places)
        if hit.stop <= source_stop:
            return None
        loaded = self._to_load(asked, num_computed_tokens, keys, are_in_cpu, hit)
        missing = tuple(key for *_, key, in_cpu in loaded if not in_cpu)
        return HitElsewhere(hit.stop, missing, frozenset(places[key] for key in missing))

    def close(self) -> None:
        """Close connections and threads."""
        if self.lookup is not None:
            self.lookup.close()

    def _missing(self, asked: RequestLookup, first: int) -> tuple[bytes, ...]:
        """Keys from chunk ``first`` on that memory lacks and that would make the hit longer."""
        size = self.chunk_size
        keys, are_in_cpu, hit = self._hit(asked, first * size, {})
        last = first + len(keys[0])
        if not is_prefix_only(self.parts) and asked.keys.loaded_tail is None:
            last = min(last, (asked.request.num_tokens - 1) // size)
        if hit.stop >= last:
            return ()
        end = asked.keys.end_of(hit.stop + 1)
        begins = [chunks_to_load(part, size, first * size, end).start for part in self.parts]
        return tuple(
            each[i]
            for each, in_cpu, begin in zip(keys, are_in_cpu, begins, strict=True)
            for i in range(begin - first, last - first)
            if not in_cpu[i]
        )

    def _is_old(self, asked: RequestLookup) -> bool:
        """Whether to look up again: the last answer is old, the request does not wait for one now,
        and it still has time to."""
        if asked.wait_until is not None or asked.wait_seconds == 0.0:
            return False
        if self.clock() - asked.asked_at < _STALE_SECONDS:
            return False
        return asked.pending is None or asked.pending.is_done

    def _places(
        self, asked: RequestLookup, num_computed_tokens: int, wait: StepWait, known_stop: int = 0
    ) -> Mapping[bytes, Tier] | Pending:
        """The answer of the remote tiers, after a short wait if that is worth it. Chunks before
        ``known_stop`` can be loaded anyway."""
        pending, lookup = asked.pending, self.lookup
        if pending is None or lookup is None:
            return asked.places
        num_tokens, end_of = asked.request.num_tokens, asked.keys.end_of
        num_known = min(max(num_computed_tokens, end_of(known_stop)), num_tokens - 1)
        remaining = self._remaining_seconds(asked, num_known, lookup.expected_seconds)
        answer = wait.on(lambda seconds: pending.answer(min(seconds, max(0.0, remaining))))
        if answer is None:
            if remaining > 0:
                wait.end()
                _, _, known = self._hit(asked, num_computed_tokens, asked.places)
                if self.policy.is_worth_a_step(
                    min(max(num_known, end_of(known.stop)), num_tokens - 1),
                    num_tokens,
                    self.policy.bytes_of(asked.asked_keys),
                    lookup.found_share,
                    remaining,
                ):
                    return PENDING  # the answer may bring more than the known chunks
            # The lookup goes on: its duration tells whether to wait for the next one.
            self.tally.count("lookups_given_up")
            answer = asked.places
        elif answer is MISS:
            self.tally.count("lookups_given_up")
        elif pending.absent is not None:
            self.kv_events.missing(pending.absent)
        asked.places = answer
        asked.end_wait(self.clock())
        return asked.places

    def _up_to_stores(
        self, asked: RequestLookup, num_computed_tokens: int, keys: list[Sequence[bytes]], hit: Hit
    ) -> Hit:
        """``hit``, cut short before a chunk that another rank is still storing. Call it until it
        returns the same hit."""
        for part, of_part in zip(self.parts, keys, strict=True):
            end = asked.keys.end_of(hit.stop)
            chunks = chunks_to_load(part, self.chunk_size, num_computed_tokens, end)
            loaded = [of_part[chunk - hit.first] for chunk in chunks]
            if (at := self.index.first_stored_elsewhere(loaded)) < len(loaded):
                return hit.up_to(chunks[at] if part.rule is Rule.PREFIX else hit.stop - 1)
        return hit

    def _waits_for_stores(
        self, asked: RequestLookup, num_computed_tokens: int, there: int, stop: int
    ) -> bool:
        """Whether to wait for chunks ``[there, stop)``; no longer than computing them takes."""
        now, start = self.clock(), max(num_computed_tokens, there * self.chunk_size)
        if asked.stores_until is None:
            seconds = self.policy.compute_seconds(start, asked.keys.end_of(stop))
            asked.stores_until = now + seconds
        return now < asked.stores_until

    def _remaining_seconds(
        self, asked: RequestLookup, num_known_tokens: int, expected: Mapping[Tier, float]
    ) -> float:
        """Seconds for which this request may still wait for answers, all together: a share of the
        time to compute the tokens that are not known to be in a tier."""
        now = self.clock()
        if asked.wait_until is None:
            if asked.wait_seconds is None:
                asked.wait_seconds = self.policy.lookup_seconds(
                    num_known_tokens, asked.request.num_tokens, expected
                )
            asked.wait_until = now + asked.wait_seconds
        return asked.wait_until - now
