"""Instances that hand over to each other: what each waits for, and what it keeps others from."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lmcache_connector.p2p.plans import Arrival, HandoverHold, HandoverPlan, HeldPrompt
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.p2p.worker.producer import Producer
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    DIGEST,
    NUM_HEADS,
    NUM_LAYERS,
    OTHERS,
    SHUFFLED,
    WIDTH,
    FakeInstance,
    check_all_arrived,
    running_instance,
)
from tests.support.nixl import needs_nixl

_FULL: dict[str, Any] = {"kv_buffer_size": 4096, "overflow_bytes": 0, "lease_seconds": 1.0}


def _line_up(instance: FakeInstance, name: str, source: FakeInstance) -> None:
    instance.step(HandoverPlan(arrivals=(Arrival(name, source.address),)))


def _steps(instance: FakeInstance, seconds: float) -> None:
    end = time.monotonic() + seconds
    instance.until(lambda: time.monotonic() > end)


@needs_nixl
@pytest.mark.parametrize("has_line", [True, False])
def test_blocks_wait_for_a_line_only_where_none_waits_for_blocks(has_line: bool) -> None:
    """Two whose lines wait for what each holds for the other would wait for ever."""
    both: dict[str, Any] = {"produces": True, "consumes": True, "transport": "nixl", **_FULL}
    with running_instance(**both) as first, running_instance(**both) as second:
        first.hold("for the second", SHUFFLED)
        _line_up(second, "for the second", first)
        if not has_line:
            _steps(first, 2.5)
            assert first.sent == []
            second.load("for the second", OTHERS, first.address)
            check_all_arrived(first, second, "for the second")
            return
        _line_up(first, "for the first", second)
        first.until(lambda: "request of for the second" in first.sent, 10.0)
        assert ("for the second", Reason.EXPIRED) in first.unsent


@needs_nixl
@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_that_waits_in_blocks_on_one_rank_and_in_host_memory_on_the_other(
    rank: int,
) -> None:
    """Ranks look at their blocks and at their memory each for itself."""
    with (
        running_instance(produces=True, tp_size=2, transport="nixl") as prefill,
        running_instance(consumes=True, transport="nixl") as decode,
    ):
        prefill.hold("split", SHUFFLED)
        (role,) = prefill.ranks[rank].worker._roles
        assert isinstance(role, Producer)
        role._stage("split")
        decode.load("split", OTHERS, prefill.address, seconds=8.0)
        check_all_arrived(prefill, decode, "split")
        prefill.until(lambda: prefill.sent.count("request of split") == 2)
        prefill.until(lambda: prefill.used_bytes == 0)


@needs_nixl
def test_what_another_instance_has_read_is_not_waited_for() -> None:
    """A router sent the request once more, to a second decode instance."""
    slow: dict[str, Any] = {"transport": "nixl", "unknown_grace_seconds": 30.0}
    with (
        running_instance(produces=True, **slow) as prefill,
        running_instance(consumes=True, **slow) as first,
        running_instance(consumes=True, **slow) as second,
    ):
        prefill.hold("once", SHUFFLED)
        first.load("once", OTHERS, prefill.address)
        check_all_arrived(prefill, first, "once")
        second.load("once", OTHERS, prefill.address)
        (result,) = second.finish("request of once", 10.0)
        assert (result.num_blocks, result.cause and result.cause.reason) == (0, Reason.TAKEN)


@needs_nixl
def test_a_push_whose_room_a_waiting_prompt_has_is_counted() -> None:
    """Its room was promised before the other one left its blocks."""
    size = len(SHUFFLED) * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
    one: dict[str, Any] = {"kv_buffer_size": size, "overflow_bytes": 0, "transport": "nixl"}
    with running_instance(produces=True, **one) as prefill:
        prefill.hold("waits", SHUFFLED)
        prefill.until(lambda: "request of waits" in prefill.sent)
        assert prefill.used_bytes == size
        prefill.prefill("pushed", OTHERS, prefill.address)
        assert prefill.unsent == [("pushed", Reason.BUFFER_FULL)]
        assert prefill.released == ["pushed"]


@needs_nixl
def test_digests_that_fail_late_end_no_other_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends an engine that is told twice that a request's blocks are free."""
    with running_instance(produces=True, transport="nixl") as prefill:
        (role,) = prefill.ranks[0].worker._roles
        assert isinstance(role, Producer)
        held, fails = role._held, threading.Event()
        assert held is not None

        def fail(*args: object) -> tuple[bytes, ...]:
            assert fails.wait(30)
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(held, "_digests", fail)
            prefill.hold("taken", SHUFFLED)
            role._stage("taken")
            prefill.until(lambda: "request of taken" in prefill.sent)
            patch.undo()
        prompt = HeldPrompt(DIGEST, len(OTHERS) * BLOCK_SIZE, tuple(OTHERS))
        prefill.step(HandoverPlan(holds=(HandoverHold("another", "taken", prompt),)))
        fails.set()
        _steps(prefill, 0.5)
        prefill.step(HandoverPlan(reset=True))
        prefill.until(lambda: held.is_empty)
        assert prefill.sent == ["request of taken", "another"]


@needs_nixl
def test_an_instance_may_hand_over_to_itself() -> None:
    with running_instance(produces=True, consumes=True, transport="nixl") as both:
        both.hold("mine", SHUFFLED)
        both.load("mine", OTHERS, both.address)
        check_all_arrived(both, both, "mine")
        both.until(lambda: "request of mine" in both.sent)
