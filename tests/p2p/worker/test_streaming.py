"""Prompts larger than the buffers of one side or both pass through them, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.p2p.plans import Arrival, HandoverHold, HandoverPlan, Release
from lmcache_connector.p2p.reasons import Reason
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    WIDTH,
    FakeInstance,
    check_all_arrived,
    running_instance,
)
from tests.support.engines.p2p_relay import Relay

BLOCK_BYTES = NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
SMALL: dict[str, Any] = {"kv_buffer_size": 16 * BLOCK_BYTES, "overflow_bytes": 0}
SENT = [(7 * i + 3) % 64 for i in range(45)]
RECEIVED = [(11 * i + 5) % 64 for i in range(45)]


def check(prefill: FakeInstance, decode: FakeInstance, name: str) -> None:
    check_all_arrived(prefill, decode, name, SENT, RECEIVED)
    prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)
    assert not prefill.unsent


@pytest.mark.parametrize("small", ["both", "producer", "consumer"])
@pytest.mark.parametrize("secret", [None, "known to both of them"])
def test_every_way_to_hand_over(small: str, secret: str | None) -> None:
    shared: dict[str, Any] = {} if secret is None else {"secret": secret}
    with (
        running_instance(produces=True, **shared, **(SMALL if small != "consumer" else {})) as p,
        running_instance(consumes=True, **shared, **(SMALL if small != "producer" else {})) as d,
    ):
        d.load("awaited", RECEIVED, p.address)
        p.prefill("awaited", SENT, d.address, per_step=13, seed=1)
        check(p, d, "awaited")
        p.prefill("pushed", SENT, d.address, seed=2)
        p.until(lambda: d.used_bytes > 0)
        d.load("pushed", RECEIVED, p.address)
        check(p, d, "pushed")
        p.prefill("fetched", SENT, per_step=20, seed=3)
        d.load("fetched", RECEIVED, p.address)
        check(p, d, "fetched")
        p.prefill("rest", SENT, seed=4)
        d.load("rest", RECEIVED[21:], p.address, first_block=21)
        assert d.finish("request of rest")[0].num_blocks == 24
        assert d.content(RECEIVED[21:]) == p.content(SENT[21:])
        p.until(lambda: p.used_bytes == d.used_bytes == 0)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("pushes", [True, False])
def test_other_tensor_parallel_sizes(sizes: tuple[int, int], pushes: bool) -> None:
    """The segments of the two sides differ as well."""
    small: dict[str, Any] = {"kv_buffer_size": 10 * BLOCK_BYTES, "overflow_bytes": 0}
    with (
        running_instance(produces=True, tp_size=sizes[0], **SMALL) as prefill,
        running_instance(consumes=True, tp_size=sizes[1], **small) as decode,
    ):
        prefill.prefill("t", SENT, decode.address if pushes else None, per_step=9)
        decode.load("t", RECEIVED, prefill.address)
        check(prefill, decode, "t")


def test_several_at_once_share_the_buffers() -> None:
    with (
        running_instance(produces=True, **SMALL) as prefill,
        running_instance(consumes=True, **SMALL) as decode,
    ):
        for name in ("a", "b"):  # neither fits, both get half of the buffer
            prefill.prefill(name, SENT[:20], seed=5)
        assert prefill.used_bytes == 16 * BLOCK_BYTES
        for name in ("b", "a"):
            decode.load(name, RECEIVED[:20], prefill.address)
        for name in ("a", "b"):
            check_all_arrived(prefill, decode, name, SENT[:20], RECEIVED[:20])
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


def test_blocks_are_held_until_they_have_left_and_no_longer_than_the_lease() -> None:
    with (
        running_instance(produces=True, lease_seconds=0.5, **SMALL) as prefill,
        running_instance(consumes=True, **SMALL) as decode,
    ):
        prefill.prefill("nobody's", SENT)
        prefill.step(HandoverPlan(holds=(HandoverHold("a request", "nobody's"),), idle=True))
        assert "a request" not in prefill.sent
        prefill.until(lambda: "a request" in prefill.sent, 5.0)
        assert prefill.unsent == [("nobody's", Reason.EXPIRED)]
        # Preempted: what has no place yet cannot be waited for.
        prefill.prefill("vacated", SENT)
        prefill.step(HandoverPlan(vacated=("vacated",)))
        prefill.until(lambda: prefill.used_bytes == 0)
        decode.load("vacated", RECEIVED, prefill.address)
        (result,) = decode.finish("request of vacated")
        assert result.cause is not None
        assert result.cause.reason is Reason.PREEMPTED


def test_what_came_before_a_break_is_used() -> None:
    """The second half of the prompt is never computed."""
    with (
        running_instance(produces=True, **SMALL) as prefill,
        running_instance(consumes=True, unknown_grace_seconds=1.0, **SMALL) as decode,
    ):
        prefill.prefill("cut", SENT[:23], num_tokens=45 * BLOCK_SIZE)
        decode.load("cut", RECEIVED, prefill.address)
        (result,) = decode.finish("request of cut")
        assert result.cause is not None
        assert (result.num_blocks, result.cause.reason) == (23, Reason.NOT_ARRIVED)
        assert decode.content(RECEIVED[:23]) == prefill.content(SENT[:23])
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


def test_a_lease_is_renewed_from_the_arrival_of_the_request() -> None:
    lease: dict[str, Any] = {"lease_seconds": 0.4}
    with (
        running_instance(produces=True, **lease) as prefill,
        running_instance(consumes=True, **lease) as decode,
    ):
        arrivals = []
        for name, target in (("fetched", None), ("pushed", decode.address)):
            prefill.prefill(name, SENT, target)
            arrivals.append(Arrival(name, prefill.address))
        decode.step(HandoverPlan(arrivals=tuple(arrivals)))
        prefill.prefill("nobody's", SENT)
        prefill.until(lambda: "nobody's" in prefill.released, 5.0)
        prefill.prefill("nobody's either", SENT)
        prefill.until(lambda: "nobody's either" in prefill.released, 5.0)
        for name in ("fetched", "pushed"):
            decode.load(name, RECEIVED, prefill.address)
            check_all_arrived(prefill, decode, name, SENT, RECEIVED)
        # Nobody renews what was let go of.
        prefill.prefill("left", SENT)
        decode.step(HandoverPlan(arrivals=(Arrival("left", prefill.address),)))
        decode.step(HandoverPlan(releases=(Release("left", prefill.address),)))
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0, 5.0)


def test_a_full_consumer_does_not_hold_up_the_steps_of_its_producer() -> None:
    """In ``PUT`` mode a step waits for what can be sent, for 30 seconds at most."""
    patient: dict[str, Any] = {"send_type": "PUT", "stall_seconds": 30.0}
    with (
        running_instance(produces=True, **patient) as prefill,
        running_instance(consumes=True, **SMALL) as decode,
    ):
        for name in ("first", "second", "third"):  # the consumer has room for two
            prefill.prefill(name, SENT[:8], decode.address)
        decode.until(lambda: decode.used_bytes == 16 * BLOCK_BYTES)
        decode.load("first", RECEIVED[:8], prefill.address)
        check_all_arrived(prefill, decode, "first", SENT[:8], RECEIVED[:8])


def test_who_is_named_by_another_address_is_reached_at_its_own() -> None:
    """The request names a relay. Nothing but the first handshake passes it."""
    secret: dict[str, Any] = {"secret": "known to both of them"}
    with (
        running_instance(produces=True, **secret) as prefill,
        running_instance(consumes=True, **secret) as decode,
        Relay(prefill.address) as before_prefill,
        Relay(decode.address) as before_decode,
    ):
        decode.load("fetched", RECEIVED, before_prefill.address)
        prefill.prefill("fetched", SENT, seed=1)
        check_all_arrived(prefill, decode, "fetched", SENT, RECEIVED)
        prefill.prefill("pushed", SENT, before_decode.address, seed=2)
        decode.load("pushed", RECEIVED, before_prefill.address)
        check_all_arrived(prefill, decode, "pushed", SENT, RECEIVED)
        for relay in (before_prefill, before_decode):
            assert 0 < relay.num_bytes < 20_000
        assert decode.results["request of pushed"][0].cause is None


def test_requests_dial_nobody_outside_peer_hosts() -> None:
    with running_instance(consumes=True, peer_hosts=("10.0.0.1",)) as decode:
        with running_instance(produces=True) as prefill:
            decode.load("x", RECEIVED, prefill.address)
            (result,) = decode.finish("request of x", 5.0)
        assert result.cause is not None
        assert result.cause.reason is Reason.REFUSED
        assert "not among the peers" in result.cause.text


@pytest.mark.parametrize(
    ("hosts", "is_let_in"),
    [
        (("10.0.0.1",), False),
        (("10.0.0.0/8", "::1"), False),
        (("10.0.0.0/8", "127.0.0.0/8"), True),
    ],
)
def test_nobody_dials_in_from_outside_peer_hosts(hosts: tuple[str, ...], is_let_in: bool) -> None:
    with (
        running_instance(produces=True, peer_hosts=hosts) as prefill,
        running_instance(consumes=True) as decode,
    ):
        prefill.prefill("x", SENT)
        decode.load("x", RECEIVED, prefill.address)
        (result,) = decode.finish("request of x")
        assert result.num_blocks == (len(SENT) if is_let_in else 0)
        assert result.cause is None or result.cause.reason is Reason.LOST
