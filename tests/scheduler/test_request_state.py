"""What a preemption and a reset leave of a request's state."""

from __future__ import annotations

from types import SimpleNamespace

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.lookup.background_lookup import PendingLookup, RequestLookup
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.request_state import RequestState, WitnessState


def keys(salt: str) -> RequestKeys:
    return RequestKeys(PrefixHasher({}, 256), RequestIdentity(cache_salt=salt))


def busy_state() -> RequestState:
    """Of a request that was asked for, offered a load of two chunks, and has stored three."""
    state = RequestState(SimpleNamespace(), keys("before"))
    state.witness.num_tokens, state.witness.num_vouched = 800, 800
    state.lookup.pending = PendingLookup((b"k",), 10.0, lambda: 0.0)
    state.lookup.asked_keys, state.lookup.places = (b"0", b"1"), {b"0": Tier.REDIS}
    state.lookup.is_counted = True
    state.load.end = 2
    state.store.next_chunk = state.store.num_sighted = 3
    return state


def test_after_a_reset_a_request_goes_on_as_one_of_its_own() -> None:
    state = busy_state()
    question = state.lookup.pending
    assert question is not None
    after = keys("after")
    state.reset(after)
    assert state.keys is after
    assert question.is_cancelled
    assert state.lookup == RequestLookup(state.request, after, is_counted=True)
    assert (state.load.is_allowed, state.load.end) == (False, None)
    assert state.witness == WitnessState(), "what it has was computed before the reset"
    assert (state.store.next_chunk, state.store.num_sighted) == (0, 3)


def test_a_preempted_request_is_planned_from_its_first_chunk_again() -> None:
    state = busy_state()
    before = state.keys
    state.restart()
    assert state.keys is before
    assert (state.load.is_allowed, state.load.end) == (True, None)
    assert state.witness == WitnessState()
    assert (state.store.next_chunk, state.store.num_sighted) == (0, 3)
    assert state.lookup.places == {b"0": Tier.REDIS}
