"""Prompts that stay in the producer's blocks and are read there, from block to block."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.data.nixl_agent import Nixl, Runs
from lmcache_connector.p2p.errors import RefusedError
from lmcache_connector.p2p.plans import (
    OTHER_WEIGHTS,
    Arrival,
    Drop,
    HandoverHold,
    HandoverPlan,
    HeldPrompt,
    Release,
)
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker import adapter, producer
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    OTHERS,
    SECRET,
    SHUFFLED,
    WIDTH,
    FakeInstance,
    check_all_arrived,
    free_ports,
    running_instance,
)
from tests.support.nixl import needs_nixl

pytestmark = needs_nixl


@pytest.fixture(scope="module", params=["auto", "nixl"])
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"transport": request.param}


@pytest.fixture(scope="module")
def prefill(settings: dict[str, object]) -> Iterator[FakeInstance]:
    with running_instance(produces=True, **settings) as instance:  # type: ignore[arg-type]
        yield instance


@pytest.fixture(scope="module")
def decode(settings: dict[str, object]) -> Iterator[FakeInstance]:
    with running_instance(consumes=True, **settings) as instance:  # type: ignore[arg-type]
        yield instance


def test_it_is_read_where_it_lies(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.hold("held", SHUFFLED)
    assert prefill.sent == []
    decode.load("held", OTHERS, prefill.address)
    check_all_arrived(prefill, decode, "held")
    assert prefill.used_bytes == decode.used_bytes == 0
    prefill.until(lambda: "request of held" in prefill.sent)
    assert not prefill.unsent
    assert not prefill.released  # no host memory was taken for it


def test_only_what_is_missing_is_read(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.hold("rest", SHUFFLED, seed=2)
    decode.load("rest", OTHERS[3:], prefill.address, first_block=3)
    (result,) = decode.finish("request of rest")
    assert (result.num_blocks, result.cause) == (4, None)
    assert decode.content(OTHERS[3:]) == prefill.content(SHUFFLED[3:])
    assert result.wire_bytes == 4 * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
    prefill.until(lambda: "request of rest" in prefill.sent)


def test_it_is_wanted_before_it_is_held(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.step(HandoverPlan(announced=("early",)))
    decode.load("early", OTHERS, prefill.address)
    decode.step(HandoverPlan(idle=True))
    prefill.hold("early", SHUFFLED, seed=3)
    check_all_arrived(prefill, decode, "early")
    prefill.until(lambda: "request of early" in prefill.sent)


def test_who_needs_none_lets_the_blocks_go(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.hold("unneeded", SHUFFLED, seed=4)
    decode.step(HandoverPlan(releases=(Release("unneeded", prefill.address),)))
    prefill.until(lambda: "request of unneeded" in prefill.sent)
    assert ("unneeded", Reason.NOT_NEEDED) in prefill.unsent


def test_another_prompt_under_its_name(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.hold("other", SHUFFLED, seed=5, digest=bytes(32))
    decode.load("other", OTHERS, prefill.address)
    (result,) = decode.finish("request of other")
    assert result.num_blocks == 0
    assert result.cause is not None
    assert result.cause.reason == Reason.OTHER_PROMPT
    prefill.until(lambda: "request of other" in prefill.sent)


def test_blocks_of_other_weights_are_read_by_nobody(
    prefill: FakeInstance, decode: FakeInstance
) -> None:
    """The plan was made before the scheduler side had heard that they changed."""
    weights: Any = prefill.ranks[0].worker._weights
    decode.load("outdated", OTHERS, prefill.address)
    prompt = HeldPrompt(bytes(range(32)), len(SHUFFLED) * BLOCK_SIZE, tuple(SHUFFLED))
    hold = HandoverHold("request of outdated", "outdated", prompt)
    weights.version = 1
    computing = HandoverPlan(announced=("outdated",), heard_weights=(0,))
    prefill.step(computing, prefill.compute(SHUFFLED, 40))
    prefill.step(HandoverPlan(holds=(hold,), heard_weights=(0,)))
    weights.version = 0
    assert prefill.sent[-1] == "request of outdated"
    (result,) = decode.finish("request of outdated")
    assert result.num_blocks == 0
    assert result.cause is not None
    assert result.cause.text.endswith(OTHER_WEIGHTS.text)


def test_a_drop_lets_the_blocks_go(prefill: FakeInstance, decode: FakeInstance) -> None:
    prefill.hold("dropped", SHUFFLED, seed=6)
    prefill.step(HandoverPlan(drops=(Drop("dropped", Cause(Reason.RESET, "a reset")),)))
    prefill.until(lambda: "request of dropped" in prefill.sent)
    decode.load("dropped", OTHERS, prefill.address)
    (result,) = decode.finish("request of dropped")
    assert result.cause is not None
    assert result.cause.reason == Reason.RESET


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2), (2, 8), (8, 2)])
def test_other_tensor_parallel_sizes(sizes: tuple[int, int]) -> None:
    with (
        running_instance(produces=True, tp_size=sizes[0], transport="nixl") as prefill,
        running_instance(consumes=True, tp_size=sizes[1], transport="nixl") as decode,
    ):
        prefill.hold("t", SHUFFLED)
        decode.load("t", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "t")
        assert prefill.used_bytes == decode.used_bytes == 0
        prefill.until(lambda: prefill.sent.count("request of t") == sizes[0])


def test_a_consumer_without_nixl_gets_frames() -> None:
    with (
        running_instance(produces=True, transport="auto") as prefill,
        running_instance(consumes=True, secret=SECRET) as decode,
    ):
        prefill.hold("staged", SHUFFLED)
        decode.load("staged", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "staged")
        prefill.until(lambda: "request of staged" in prefill.sent)
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


def test_blocks_do_not_wait_long_for_who_is_in_no_hurry() -> None:
    """The prompt waits in host memory, and is sent in frames."""
    with (
        running_instance(produces=True, transport="nixl") as prefill,
        running_instance(consumes=True, transport="nixl") as decode,
    ):
        prefill.hold("slow", SHUFFLED)
        prefill.until(lambda: "request of slow" in prefill.sent)
        assert prefill.used_bytes > 0
        decode.load("slow", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "slow")
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


def test_who_waits_in_line_keeps_no_blocks_however_short_the_lease() -> None:
    """Leases are renewed more often than blocks are looked at."""
    brief: dict[str, Any] = {"transport": "nixl", "lease_seconds": 2.0}
    with (
        running_instance(produces=True, **brief) as prefill,
        running_instance(consumes=True, **brief) as decode,
    ):
        prefill.hold("in line", SHUFFLED)
        decode.step(HandoverPlan(arrivals=(Arrival("in line", prefill.address),)))
        prefill.until(lambda: "request of in line" in prefill.sent, 10.0)
        assert prefill.used_bytes > 0
        decode.load("in line", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "in line")


def test_a_prompt_stays_in_its_blocks_while_there_is_no_room_for_frames() -> None:
    num_bytes = len(SHUFFLED) * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
    full = {"transport": "auto", "kv_buffer_size": num_bytes, "overflow_bytes": 0}
    with (
        running_instance(produces=True, **full) as prefill,  # type: ignore[arg-type]
        running_instance(consumes=True, secret=SECRET) as decode,
    ):
        prefill.prefill("first", SHUFFLED)
        assert prefill.used_bytes == num_bytes
        prefill.hold("second", OTHERS, seed=2)
        decode.load("second", SHUFFLED, prefill.address)
        end = time.monotonic() + 1.0  # in which it asks some times
        prefill.until(lambda: time.monotonic() > end)
        prefill.step(HandoverPlan(drops=(Drop("first", Cause(Reason.RESET, "a reset")),)))
        check_all_arrived(prefill, decode, "second", OTHERS, SHUFFLED)
        prefill.until(lambda: "request of second" in prefill.sent)


def test_a_reset_lets_all_blocks_go(prefill: FakeInstance) -> None:
    prefill.hold("reset", SHUFFLED, seed=10)
    prefill.step(HandoverPlan(reset=True))
    prefill.until(lambda: "request of reset" in prefill.sent)
    assert ("reset", Reason.RESET) in prefill.unsent


def test_a_lease_ends() -> None:
    with running_instance(produces=True, transport="nixl", lease_seconds=0.2) as prefill:
        prefill.hold("forgotten", SHUFFLED)
        prefill.until(lambda: "request of forgotten" in prefill.sent)
        assert ("forgotten", Reason.EXPIRED) in prefill.unsent


class Meddler:
    """Does something right after the bytes of a read have come."""

    def __init__(self, nixl: Nixl, then: Callable[[Runs], object]) -> None:
        self._read, self._then = nixl.read, then

    def __call__(
        self, metadata: bytes, local: Runs, remote: Runs, go_on: Callable[[], None]
    ) -> None:
        self._read(metadata, local, remote, go_on)
        self._then(local)


def meddle(
    decode: FakeInstance, monkeypatch: pytest.MonkeyPatch, then: Callable[[Runs], object]
) -> None:
    nixl = decode.ranks[0].worker._nixl
    assert nixl is not None
    monkeypatch.setattr(nixl, "read", Meddler(nixl, then))


def test_blocks_that_were_let_go_meanwhile_are_no_hit(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read of them. Without digests too."""
    prefill.hold("raced", SHUFFLED, seed=7)
    reset = HandoverPlan(drops=(Drop("raced", Cause(Reason.RESET, "a reset")),))
    meddle(decode, monkeypatch, lambda _: prefill.step(reset))
    decode.load("raced", OTHERS, prefill.address)
    (result,) = decode.finish("request of raced")
    assert (result.num_blocks, result.cause and result.cause.reason) == (0, Reason.LOST)
    prefill.until(lambda: "request of raced" in prefill.sent)


def test_damaged_bytes_are_no_hit(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill.hold("damaged", SHUFFLED, seed=8)

    def damage(local: Runs) -> None:
        ctypes.c_ubyte.from_address(int(local[-1].sum()) - 1).value ^= 1

    meddle(decode, monkeypatch, damage)
    decode.load("damaged", OTHERS, prefill.address)
    (result,) = decode.finish("request of damaged")
    assert (result.num_blocks, result.cause and result.cause.reason) == (0, Reason.BAD_CHECKSUM)
    prefill.until(lambda: "request of damaged" in prefill.sent)


def test_an_abort_while_it_is_read_waits_for_the_read(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are not given away before."""
    prefill.hold("aborted", SHUFFLED, seed=9)
    read, go_on = threading.Event(), threading.Event()

    def pause(_: Runs) -> None:
        read.set()
        assert go_on.wait(30)

    meddle(decode, monkeypatch, pause)
    decode.load("aborted", OTHERS, prefill.address)
    assert read.wait(30)
    decode.step(HandoverPlan(cancelled_loads=("request of aborted",), idle=True))
    assert "request of aborted" not in decode.results
    go_on.set()
    (result,) = decode.finish("request of aborted")
    assert result.num_blocks == 0
    prefill.until(lambda: "request of aborted" in prefill.sent)


@pytest.mark.parametrize("host", ["10.9.8.7", "127.0.0.1"])
@pytest.mark.parametrize("secret", [None, "known to both of them"])
def test_strangers_are_not_let_into_memory(host: str, secret: str | None) -> None:
    """Who is let in by NIXL reads and writes all of it. Any user of a machine reaches loopback."""
    where: dict[str, Any] = {"host": host, "bind_host": "127.0.0.1", "insecure": True}
    with running_instance(produces=True, transport="auto", secret=secret, **where) as instance:
        worker = instance.ranks[0].worker
        assert (worker._nixl is not None) is (secret is not None)
        card = msgspec.structs.replace(worker._dialer.card, engine_id="a stranger's")
        with pytest.raises(RefusedError):
            ControlClient(instance.address, card, b"", 5.0).ask(messages.Show())


def test_who_shares_no_link_gets_frames_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_instance(produces=True, transport="auto") as prefill:
        monkeypatch.setattr(adapter, "links", lambda **_: ("another machine",))
        with running_instance(consumes=True, transport="auto") as decode:
            nixl = decode.ranks[0].worker._nixl
            assert nixl is not None
            monkeypatch.setattr(nixl, "read", None)
            prefill.hold("far", SHUFFLED)
            decode.load("far", OTHERS, prefill.address)
            check_all_arrived(prefill, decode, "far")


def test_the_same_name_once_more_lets_the_first_blocks_go(
    prefill: FakeInstance, decode: FakeInstance
) -> None:
    prefill.hold("twice", SHUFFLED, seed=11)
    prefill.hold("twice", OTHERS, seed=12)
    prefill.until(lambda: prefill.sent.count("request of twice") == 1)
    decode.load("twice", SHUFFLED, prefill.address)
    check_all_arrived(prefill, decode, "twice", OTHERS, SHUFFLED)
    prefill.until(lambda: prefill.sent.count("request of twice") == 2)


def test_blocks_of_the_same_name_once_more_are_others(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router asks once more while the first answer is read; the first blocks get others' KV.
    Without digests too."""
    prefill.hold("again", SHUFFLED, seed=13)

    def again(_: Runs) -> None:
        prefill.hold("again", OTHERS, seed=14)

    meddle(decode, monkeypatch, again)
    decode.load("again", OTHERS, prefill.address)
    (result,) = decode.finish("request of again")
    assert (result.num_blocks, result.cause and result.cause.reason) == (0, Reason.LOST)
    (role,) = prefill.ranks[0].worker._roles
    assert isinstance(role, producer.Producer)
    held = role._held
    prefill.until(lambda: held is not None and held.is_empty)  # one step may tell of both


def test_digests_that_take_long_are_waited_for(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the proof still reads: the blocks are not taken from it."""
    (role,) = prefill.ranks[0].worker._roles
    assert isinstance(role, producer.Producer)
    held = role._held
    assert held is not None
    digests, go_on = held._digests, threading.Event()

    def late(*args: Any) -> tuple[bytes, ...]:
        assert go_on.wait(30)
        return digests(*args)

    monkeypatch.setattr(held, "_digests", late)
    monkeypatch.setattr(producer, "_HOLD_SECONDS", 0.3)
    prefill.hold("proof", SHUFFLED, seed=15)
    read = threading.Event()
    meddle(decode, monkeypatch, lambda _: read.set())
    decode.load("proof", OTHERS, prefill.address)
    assert read.wait(30)
    end = time.monotonic() + 1.0
    prefill.until(lambda: time.monotonic() > end)
    assert prefill.used_bytes == 0
    go_on.set()
    check_all_arrived(prefill, decode, "proof")
    prefill.until(lambda: "request of proof" in prefill.sent)


def test_a_producer_in_the_place_of_another_is_read_at_once(
    decode: FakeInstance, settings: dict[str, object]
) -> None:
    """Nothing is lost to a connection that ended with the one before."""
    port = free_ports(1)
    for name in ("before", "after"):
        with running_instance(produces=True, port=port, **settings) as prefill:  # type: ignore[arg-type]
            prefill.hold(name, SHUFFLED)
            decode.load(name, OTHERS, prefill.address)
            check_all_arrived(prefill, decode, name)
            prefill.until(lambda: f"request of {name}" in prefill.sent)  # noqa: B023


def test_reads_that_nixl_does_not_do_cost_no_hand_over(
    prefill: FakeInstance, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt comes in frames, and their payload on the connection itself."""

    def fail(*args: object) -> None:
        raise RuntimeError("NIXL_ERR_NOT_ALLOWED")

    with running_instance(consumes=True, **settings) as decode:  # type: ignore[arg-type]
        nixl = decode.ranks[0].worker._nixl
        assert nixl is not None
        monkeypatch.setattr(nixl, "_post", fail)
        for name in ("unread", "unread too"):
            prefill.hold(name, SHUFFLED, seed=16)
            decode.load(name, OTHERS, prefill.address)
            check_all_arrived(prefill, decode, name)
        prefill.until(lambda: prefill.used_bytes == 0)


def test_a_producer_is_asked_seldom_however_many_prompts_wait(
    prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is computed yet."""
    (role,) = prefill.ranks[0].worker._roles
    answer, num_asked = role.answer, 0

    def count(peer: Peer, message: messages.Message) -> messages.Message | None:
        nonlocal num_asked
        num_asked += isinstance(message, messages.Want)
        return answer(peer, message)

    monkeypatch.setattr(role, "answer", count)
    names = [f"waits {i}" for i in range(100)]
    prefill.step(HandoverPlan(announced=tuple(names)))
    started = time.monotonic()
    for name in names:
        decode.load(name, [1], prefill.address)
    decode.until(lambda: num_asked > 500)
    assert num_asked <= 200 + 600 * (time.monotonic() - started)
    decode.step(HandoverPlan(cancelled_loads=tuple(f"request of {name}" for name in names)))
    for name in names:
        decode.finish(f"request of {name}")
