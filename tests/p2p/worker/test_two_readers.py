"""Two decode instances fetch one prompt: a retry, a hedged request, parameters that come twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_connector.p2p.plans import HandoverHold, HandoverPlan, Release
from lmcache_connector.p2p.worker.producer import Producer
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    WIDTH,
    FakeInstance,
    running_instance,
)

BLOCK_BYTES = NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
SECRET: dict[str, Any] = {"secret": "known to all three of them"}
SMALL: dict[str, Any] = {"kv_buffer_size": 16 * BLOCK_BYTES, "overflow_bytes": 0}
FILLER, SENT, OTHER = list(range(16)), list(range(1, 21)), list(range(30, 50))
FIRST, SECOND = list(range(2, 22)), list(range(23, 43))


@contextmanager
def a_full_and_a_free_reader(
    **producer: Any,
) -> Iterator[tuple[FakeInstance, FakeInstance, FakeInstance]]:
    """The first has no room until the filler is released there."""
    with (
        running_instance(produces=True, **SECRET, **producer) as prefill,
        running_instance(consumes=True, **SECRET, **SMALL) as full,
        running_instance(consumes=True, **SECRET) as free,
    ):
        prefill.prefill("filler", FILLER, full.address, seed=5)
        full.until(lambda: full.used_bytes == len(FILLER) * BLOCK_BYTES)
        prefill.until(lambda: "filler" in prefill.released)
        yield prefill, full, free


def wait_for_readers(prefill: FakeInstance, count: int, *, blocked: int) -> None:
    """Until so many have asked, ``blocked`` of them in vain."""
    (role,) = prefill.ranks[0].worker._roles
    assert isinstance(role, Producer)
    outgoing = role._buffer.get("prompt")
    assert outgoing is not None
    readers = outgoing.deliveries
    prefill.until(
        lambda: len(readers) == count and sum(d.blocked for d in list(readers.values())) == blocked
    )


def make_room(full: FakeInstance, prefill: FakeInstance) -> None:
    full.step(HandoverPlan(releases=(Release("filler", prefill.address),)))


@pytest.mark.parametrize("first_block", [0, 1])
def test_the_second_reader_leaves_the_prompt_to_the_first(first_block: int) -> None:
    """A block less is needed where the first has a prefix in its cache: then the producer cuts what
    it has saved."""
    with a_full_and_a_free_reader() as (prefill, full, free):
        prefill.prefill("prompt", SENT, seed=7)
        right = prefill.content(SENT)
        full.load("prompt", FIRST[first_block:], prefill.address, first_block=first_block)
        wait_for_readers(prefill, 1, blocked=1)
        free.load("prompt", SECOND, prefill.address)
        (result,) = free.finish("request of prompt")
        assert (result.num_blocks, result.cause) == (len(SECOND), None)
        assert free.content(SECOND) == right
        prefill.prefill("other", OTHER, seed=99)  # takes the lowest memory that is free
        make_room(full, prefill)
        (result,) = full.finish("request of prompt")
        assert (result.num_blocks, result.cause) == (len(SENT) - first_block, None)
        theirs = full.content(FIRST[first_block:])
        assert theirs == {
            (layer, head, place): right[layer, head, place + first_block]
            for layer, head, place in theirs
        }
        prefill.until(lambda: "prompt" in prefill.released)


def test_a_segment_stays_until_both_readers_have_it() -> None:
    with a_full_and_a_free_reader(**SMALL) as (prefill, full, free):
        prefill.prefill("prompt", SENT, seed=7)
        right = prefill.content(SENT)
        full.load("prompt", FIRST, prefill.address)
        wait_for_readers(prefill, 1, blocked=1)
        free.load("prompt", SECOND, prefill.address)
        wait_for_readers(prefill, 2, blocked=1)
        make_room(full, prefill)
        for reader, ids in ((full, FIRST), (free, SECOND)):
            (result,) = reader.finish("request of prompt")
            assert (result.num_blocks, result.cause) == (len(ids), None)
            assert reader.content(ids) == right
        prefill.until(lambda: prefill.used_bytes == 0)


@pytest.mark.parametrize("first_block", [0, 1])
def test_memory_that_changed_after_the_save_is_no_hit(first_block: int) -> None:
    with (
        running_instance(produces=True, **SECRET) as prefill,
        running_instance(consumes=True, **SECRET) as decode,
    ):
        prefill.prefill("prompt", SENT)
        prefill.step(HandoverPlan(holds=(HandoverHold("a request", "prompt"),)))
        prefill.until(lambda: "a request" in prefill.sent)  # all is copied
        prefill.ranks[0].worker._host_buffer._memory.fill_(7)
        ids = FIRST[first_block:]
        decode.load("prompt", ids, prefill.address, first_block=first_block, seconds=1.0)
        (result,) = decode.finish("request of prompt")
        assert result.num_blocks == 0
        assert result.cause is not None
        assert not any(any(data) for data in decode.content(ids).values())
