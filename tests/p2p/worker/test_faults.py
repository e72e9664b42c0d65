"""Peers that die, stall, lie or have no room: a recompute within bounds, never a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.data.base import KeyOf, Sink
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.plans import HandoverResult
from lmcache_connector.p2p.reasons import Reason
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    OTHERS,
    SHUFFLED,
    WIDTH,
    FakeInstance,
    check_all_arrived,
    running_instance,
)
from tests.support.redis.fault_proxy import Direction, Fault, FaultProxy, Kind, fault_proxy

PROMPT_BYTES = len(OTHERS) * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH


class ProxiedTcp(TcpTransport):
    """Tells its peers the port of a proxy in front of it."""

    def __init__(self, stall_seconds: float, stack: ExitStack) -> None:
        super().__init__(stall_seconds)
        self._stack = stack
        self.proxy: FaultProxy

    def listen(self, host: str, port: int, sink: Sink, key_of: KeyOf) -> int:
        self.proxy = self._stack.enter_context(
            fault_proxy(super().listen(host, port, sink, key_of))
        )
        return self.proxy.port


@contextmanager
def faulty_pair(
    **config: object,
) -> Iterator[tuple[FakeInstance, FakeInstance, FaultProxy]]:
    with ExitStack() as stack:
        transports: list[ProxiedTcp] = []

        def make(settings: P2PConfig) -> TcpTransport:
            transports.append(ProxiedTcp(settings.stall_seconds, stack))
            return transports[-1]

        with (
            running_instance(produces=True, **config) as prefill,  # type: ignore[arg-type]
            running_instance(consumes=True, make_transport=make, **config) as decode,  # type: ignore[arg-type]
        ):
            yield prefill, decode, transports[0].proxy


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FakeInstance, FakeInstance, FaultProxy]]:
    with faulty_pair(stall_seconds=2.0, unknown_grace_seconds=2.0) as pair:
        yield pair


Pair = tuple[FakeInstance, FakeInstance, FaultProxy]


def check_partial(
    prefill: FakeInstance, decode: FakeInstance, transfer_id: str, seconds: float
) -> HandoverResult:
    """What is said to have arrived is right; the rest is reported for recompute in time."""
    (result,) = decode.finish(f"request of {transfer_id}", seconds)
    assert result.num_blocks < len(OTHERS)
    assert result.cause is not None
    arrived = result.num_blocks
    assert decode.content(OTHERS[:arrived]) == prefill.content(SHUFFLED[:arrived])
    decode.until(lambda: decode.used_bytes == 0)
    return result


def check_cause(result: HandoverResult, reason: Reason, words: str) -> None:
    assert result.cause is not None
    assert (result.cause.reason, words in result.cause.text) == (reason, True), result.cause


@pytest.mark.parametrize("kind", [Kind.CLOSE, Kind.RESET, Kind.STALL, Kind.FLIP])
@pytest.mark.parametrize(
    ("mode", "share"), [("pushed", 0.4), ("fetched", 0.0), ("fetched", 0.4), ("fetched", 0.99)]
)
def test_the_data_connection_breaks(pair: Pair, mode: str, kind: Kind, share: float) -> None:
    prefill, decode, proxy = pair
    name = f"{mode} {kind} {share}"
    struck = proxy.num_struck
    # A fault strikes a fresh connection only: make the last one end.
    _end_connections(proxy)
    offset = 200 + int(share * PROMPT_BYTES)
    proxy.arm(Fault(kind, offset=offset, direction=Direction.REQUEST))
    decode.load(name, OTHERS, prefill.address)
    prefill.prefill(name, SHUFFLED, decode.address if mode == "pushed" else None, per_step=2)
    result = check_partial(prefill, decode, name, 10.0)
    assert proxy.num_struck > struck, result
    assert result.cause is not None
    cut = {Reason.LOST, Reason.NOT_ARRIVED}
    assert result.cause.reason in ({Reason.BAD_CHECKSUM} if kind is Kind.FLIP else cut)
    proxy.arm(None)
    # And the next hand-over goes through.
    prefill.prefill(f"{name} after", SHUFFLED, seed=3)
    decode.load(f"{name} after", OTHERS, prefill.address)
    check_all_arrived(prefill, decode, f"{name} after")


def _end_connections(proxy: FaultProxy) -> None:
    from tests.support.redis.fault_proxy import _cut

    proxy.arm(None)
    with proxy._lock:
        connections = list(proxy._open)
    for connection in connections:
        _cut(connection)
    time.sleep(0.05)  # for both ends to see it; a later fault would only strike the old connection


def test_without_checksums_a_broken_connection_is_noticed_all_the_same() -> None:
    with faulty_pair(checksum=False) as (prefill, decode, proxy):
        proxy.arm(Fault(Kind.CLOSE, offset=PROMPT_BYTES // 2, direction=Direction.REQUEST))
        decode.load("x", OTHERS, prefill.address)
        prefill.prefill("x", SHUFFLED)
        check_partial(prefill, decode, "x", 10.0)


def test_a_producer_that_is_not_there() -> None:
    with running_instance(consumes=True) as decode:
        with running_instance(produces=True) as prefill:
            pass
        decode.load("x", OTHERS, prefill.address)
        result = decode.finish("request of x", 3.0)[0]
        check_cause(result, Reason.UNREACHABLE, "cannot be reached")
        assert result.num_blocks == 0


def test_a_producer_that_never_heard_of_it(pair: Pair) -> None:
    prefill, decode, _ = pair
    decode.load("never", OTHERS, prefill.address)
    (result,) = decode.finish("request of never", 5.0)
    check_cause(result, Reason.UNKNOWN, "never heard of it")


def test_another_prompt_is_not_taken(pair: Pair) -> None:
    prefill, decode, _ = pair
    for mode, target in (("a", decode.address), ("b", None)):
        prefill.prefill(f"other {mode}", SHUFFLED, target)
        if target is not None:
            decode.until(lambda: decode.used_bytes > 0)  # the push comes first
        decode.load(f"other {mode}", OTHERS, prefill.address, digest=bytes(32))
        (result,) = decode.finish(f"request of other {mode}", 5.0)
        assert result.num_blocks == 0
        check_cause(result, Reason.OTHER_PROMPT, "another")


@pytest.mark.parametrize(
    ("settings", "reason", "words"),
    [
        ({"model": "another"}, Reason.MISMATCH, "the models differ in weights"),
        ({"block_size": 32}, Reason.MISMATCH, "--block-size"),
        ({"secret": "not what the other one has"}, Reason.REFUSED, "secret"),
    ],
)
def test_instances_that_do_not_fit(settings: dict[str, object], reason: Reason, words: str) -> None:
    with (
        running_instance(produces=True) as prefill,
        running_instance(consumes=True, **settings) as decode,  # type: ignore[arg-type]
    ):
        prefill.prefill("x", SHUFFLED, decode.address)
        decode.load("x", OTHERS, prefill.address)
        (result,) = decode.finish("request of x", 5.0)
        assert result.num_blocks == 0
        check_cause(result, reason, words)


def test_the_deadline_holds_whatever_the_producer_says() -> None:
    with (
        running_instance(produces=True) as prefill,
        running_instance(consumes=True) as decode,
    ):
        prefill.prefill("slow", SHUFFLED[:2], num_tokens=7 * BLOCK_SIZE, per_step=0)
        started = time.monotonic()
        decode.load("slow", OTHERS, prefill.address, seconds=0.5)
        result = check_partial(prefill, decode, "slow", 3.0)
        check_cause(result, Reason.DEADLINE, "within 0.5 s")
        assert time.monotonic() - started < 2.0
        assert result.num_blocks == 2  # what came is used
        prefill.until(lambda: prefill.used_bytes == 0)  # told that nobody needs the rest


def test_a_full_consumer_holds_the_producer_back() -> None:
    """Room for one and a half prompts: the second push waits until the first was taken."""
    with (
        running_instance(produces=True) as prefill,
        running_instance(
            consumes=True, kv_buffer_size=PROMPT_BYTES, overflow_bytes=PROMPT_BYTES // 2
        ) as decode,
    ):
        contents = {}
        for name in ("first", "second"):
            prefill.prefill(name, SHUFFLED, decode.address, seed=ord(name[0]))
            contents[name] = prefill.content(SHUFFLED)
        # Two deliveries race for the room.
        prefill.until(lambda: bool(prefill.released))
        faster = prefill.released[0]
        slower = "second" if faster == "first" else "first"
        decode.load(faster, OTHERS, prefill.address)
        decode.finish(f"request of {faster}")
        decode.load(slower, OTHERS, prefill.address)
        decode.finish(f"request of {slower}")
        assert decode.content(OTHERS) == contents[slower]
        assert not prefill.unsent


def test_the_overflow_is_used_before_anybody_waits() -> None:
    with (
        running_instance(
            produces=True, kv_buffer_size=PROMPT_BYTES, overflow_bytes=PROMPT_BYTES
        ) as prefill,
        running_instance(consumes=True) as decode,
    ):
        for seed, name in enumerate(("buffer", "overflow", "none")):
            prefill.prefill(name, SHUFFLED, seed=seed)
        assert prefill.used_bytes == 2 * PROMPT_BYTES
        assert prefill.released == ["none"]
        decode.load("none", SHUFFLED, prefill.address)
        (result,) = decode.finish("request of none")
        check_cause(result, Reason.BUFFER_FULL, "buffer is full")
        for name in ("overflow", "buffer"):
            decode.load(name, OTHERS, prefill.address)
            assert decode.finish(f"request of {name}")[0].num_blocks == len(OTHERS)
        prefill.until(lambda: prefill.used_bytes == 0)


def test_nothing_is_kept_longer_than_the_lease() -> None:
    with (
        running_instance(produces=True, lease_seconds=0.3) as prefill,
        running_instance(consumes=True, lease_seconds=0.3) as decode,
    ):
        prefill.prefill("nobody", SHUFFLED)
        prefill.until(lambda: prefill.used_bytes == 0, 3.0)
        assert prefill.unsent == [("nobody", Reason.EXPIRED)]
        prefill.prefill("unclaimed", SHUFFLED, decode.address)
        decode.until(lambda: decode.used_bytes > 0, 3.0)
        decode.until(lambda: decode.used_bytes == 0, 3.0)


def test_a_restarted_decode_instance_is_found_again() -> None:
    with running_instance(produces=True) as prefill:
        for name in ("before", "after"):
            with running_instance(consumes=True) as decode:
                prefill.prefill(name, SHUFFLED, decode.address)
                decode.load(name, OTHERS, prefill.address)
                check_all_arrived(prefill, decode, name)


def test_shutdown_is_bounded_while_bytes_are_missing() -> None:
    with running_instance(produces=True) as prefill:
        with running_instance(consumes=True) as decode:
            prefill.prefill("open", SHUFFLED[:2], decode.address, num_tokens=7 * BLOCK_SIZE)
            decode.load("open", OTHERS, prefill.address)
            started = time.monotonic()
        assert time.monotonic() - started < 5.0
