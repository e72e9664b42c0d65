"""Prompts that stay in the producer's blocks and are read there, from block to block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_connector.p2p.plans import Drop, HandoverPlan, Release
from lmcache_connector.p2p.reasons import Cause, Reason
from tests.support.engines.nixl_engines import needs_nixl
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

pytestmark = needs_nixl


@pytest.fixture(
    scope="module", params=["auto", "nixl", "nixl with a secret", "nixl without digests"]
)
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    transport, _, rest = request.param.partition(" ")
    more: dict[str, dict[str, object]] = {
        "with a secret": {"secret": "known to both of them"},
        "without digests": {"checksum": False},
    }
    return {"transport": transport, **more.get(rest, {})}


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
        running_instance(consumes=True, transport="tcp") as decode,
    ):
        prefill.hold("staged", SHUFFLED)
        decode.load("staged", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "staged")
        prefill.until(lambda: "request of staged" in prefill.sent)
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


def test_a_lease_ends() -> None:
    with running_instance(produces=True, transport="nixl", lease_seconds=0.2) as prefill:
        prefill.hold("forgotten", SHUFFLED)
        prefill.until(lambda: "request of forgotten" in prefill.sent)
        assert ("forgotten", Reason.EXPIRED) in prefill.unsent
