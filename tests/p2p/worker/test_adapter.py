"""Prefill and decode instances hand over: every mode and topology, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.memory.outgoing import Outgoing
from lmcache_connector.p2p.plans import (
    OTHER_WEIGHTS,
    Drop,
    HandoverHold,
    HandoverPlan,
    Release,
    Save,
    Start,
)
from lmcache_connector.p2p.reasons import Cause, Reason
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

ABORTED = Cause(Reason.ABORTED, "its request was aborted")


@pytest.fixture(scope="module")
def prefill() -> Iterator[FakeInstance]:
    with running_instance(produces=True) as instance:
        yield instance


@pytest.fixture(scope="module")
def decode() -> Iterator[FakeInstance]:
    with running_instance(consumes=True) as instance:
        yield instance


class TestModes:
    def test_pushed_before_it_is_wanted(self, prefill: FakeInstance, decode: FakeInstance) -> None:
        prefill.prefill("pushed", SHUFFLED, decode.address)
        prefill.until(lambda: "pushed" in prefill.released)
        decode.load("pushed", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "pushed")
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_pushed_while_it_is_waited_for(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        decode.load("awaited", OTHERS, prefill.address)
        prefill.prefill("awaited", SHUFFLED, decode.address, per_step=2, seed=2)
        check_all_arrived(prefill, decode, "awaited")

    def test_fetched(self, prefill: FakeInstance, decode: FakeInstance) -> None:
        prefill.prefill("fetched", SHUFFLED, seed=3)
        assert decode.used_bytes == 0
        decode.load("fetched", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "fetched")
        prefill.until(lambda: "fetched" in prefill.released)
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_fetched_while_it_is_computed(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        ids = tuple(SHUFFLED)
        start = Start("early", DIGEST, len(ids) * BLOCK_SIZE, None)
        first = HandoverPlan(starts=(start,), saves=(Save("early", 0, ids[:3], False),))
        prefill.step(first, prefill.compute(ids[:3], 4))
        decode.load("early", OTHERS, prefill.address)
        rest = HandoverPlan(saves=(Save("early", 3, ids[3:], True),))
        prefill.step(rest, prefill.compute(ids[3:], 4))
        check_all_arrived(prefill, decode, "early")

    def test_only_what_is_missing_is_fetched(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        prefill.prefill("rest", SHUFFLED, seed=5)
        decode.load("rest", OTHERS[3:], prefill.address, first_block=3)
        (result,) = decode.finish("request of rest")
        assert (result.num_blocks, result.cause) == (4, None)
        assert decode.content(OTHERS[3:]) == prefill.content(SHUFFLED[3:])
        assert result.wire_bytes == 4 * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH

    def test_put_has_sent_all_when_the_step_ends(self, decode: FakeInstance) -> None:
        with running_instance(produces=True, send_type="PUT", stall_seconds=10.0) as prefill:
            prefill.prefill("warm-up", SHUFFLED, decode.address)  # finds the peer
            prefill.until(lambda: "warm-up" in prefill.released)
            prefill.prefill("waited", SHUFFLED, decode.address, seed=6)
            assert "waited" in prefill.released
            decode.load("waited", OTHERS, prefill.address)
            check_all_arrived(prefill, decode, "waited")
            decode.step(HandoverPlan(releases=(Release("warm-up", prefill.address),)))

    def test_a_request_that_needs_none_frees_the_producers_memory(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        prefill.prefill("unneeded", SHUFFLED, seed=7)
        assert prefill.used_bytes > 0
        decode.step(HandoverPlan(releases=(Release("unneeded", prefill.address),)))
        prefill.until(lambda: "unneeded" in prefill.released)
        assert ("unneeded", Reason.NOT_NEEDED) in prefill.unsent
        assert prefill.used_bytes == 0


class TestTopologies:
    @pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2), (2, 8), (8, 2)])
    @pytest.mark.parametrize("pushes", [True, False])
    def test_other_tensor_parallel_sizes(self, sizes: tuple[int, int], pushes: bool) -> None:
        with (
            running_instance(produces=True, tp_size=sizes[0]) as prefill,
            running_instance(consumes=True, tp_size=sizes[1]) as decode,
        ):
            prefill.prefill("t", SHUFFLED, decode.address if pushes else None, per_step=3)
            decode.load("t", OTHERS, prefill.address)
            check_all_arrived(prefill, decode, "t")
            writers = sum(bool(rank.topology.write_shards) for rank in prefill.ranks)
            prefill.until(lambda: prefill.released.count("t") == writers)
            prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)


class TestRequestsThatEndEarly:
    def test_blocks_are_held_until_they_are_copied(self, prefill: FakeInstance) -> None:
        ids = tuple(SHUFFLED)
        start = Start("held", DIGEST, len(ids) * BLOCK_SIZE, None)
        prefill.step(
            HandoverPlan(starts=(start,), saves=(Save("held", 0, ids, True),)),
            prefill.compute(ids, 1),
        )
        prefill.step(HandoverPlan(holds=(HandoverHold("a request", "held"),), idle=True))
        prefill.until(lambda: "a request" in prefill.sent)
        prefill.step(HandoverPlan(drops=(Drop("held", ABORTED),)))
        prefill.until(lambda: prefill.used_bytes == 0)

    def test_preempted_and_computed_again(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        """The second run's bytes arrive, although the first run's were under way."""
        ids = tuple(SHUFFLED)
        start = Start("again", DIGEST, len(ids) * BLOCK_SIZE, decode.address)
        decode.load("again", OTHERS, prefill.address)
        prefill.step(
            HandoverPlan(starts=(start,), saves=(Save("again", 0, ids[:4], False),)),
            prefill.compute(ids[:4], 10),
        )
        prefill.step(HandoverPlan(vacated=("again",)))
        elsewhere = tuple(reversed(ids))
        prefill.step(
            HandoverPlan(starts=(start,), saves=(Save("again", 0, elsewhere[:2], False),)),
            prefill.compute(elsewhere[:2], 11),
        )
        prefill.step(
            HandoverPlan(saves=(Save("again", 2, elsewhere[2:], True),)),
            prefill.compute(elsewhere[2:], 11),
        )
        check_all_arrived(prefill, decode, "again", sent=list(elsewhere))
        prefill.until(lambda: "again" in prefill.released)
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_begun_anew_just_when_it_is_asked_for(
        self, prefill: FakeInstance, decode: FakeInstance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever asks finds the first run, which ends before he is answered."""
        ids = tuple(SHUFFLED)
        start = Start("anew", DIGEST, len(ids) * BLOCK_SIZE, None)
        first = HandoverPlan(starts=(start,), saves=(Save("anew", 0, ids[:4], False),))
        prefill.step(first, prefill.compute(ids[:4], 20))
        producer = prefill.ranks[0].worker._roles[0]
        assert isinstance(producer, Producer)
        find = producer._buffer.find

        def find_and_begin_anew(transfer_id: str) -> Outgoing | Message:
            found = find(transfer_id)
            monkeypatch.undo()
            prefill.step(HandoverPlan(vacated=("anew",)))
            prefill.prefill("anew", ids, seed=21)
            return found

        monkeypatch.setattr(producer._buffer, "find", find_and_begin_anew)
        decode.load("anew", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "anew")
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_an_aborted_prefill_ends_the_wait_at_once(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        ids = tuple(SHUFFLED)
        start = Start("aborted", DIGEST, len(ids) * BLOCK_SIZE, decode.address)
        decode.load("aborted", OTHERS, prefill.address)
        prefill.step(
            HandoverPlan(starts=(start,), saves=(Save("aborted", 0, ids[:4], False),)),
            prefill.compute(ids[:4], 12),
        )
        prefill.step(HandoverPlan(drops=(Drop("aborted", ABORTED),)))
        (result,) = decode.finish("request of aborted", 5.0)
        assert result.cause is not None
        assert result.cause.reason is Reason.ABORTED
        assert "its request was aborted" in result.cause.text
        assert decode.content(OTHERS[: result.num_blocks]) == prefill.content(
            SHUFFLED[: result.num_blocks]
        )
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_an_aborted_decode_frees_both_sides(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        decode.load("left", OTHERS, prefill.address)
        prefill.prefill("left", SHUFFLED[:3], num_tokens=len(SHUFFLED) * BLOCK_SIZE)
        decode.step(HandoverPlan(cancelled_loads=("request of left",)))
        (result,) = decode.finish("request of left")
        cancelled = Cause(Reason.CANCELLED, "the load was cancelled")
        assert (result.num_blocks, result.cause) == (0, cancelled)
        prefill.until(lambda: "left" in prefill.released)
        prefill.until(lambda: prefill.used_bytes == decode.used_bytes == 0)

    def test_what_other_weights_computed_is_not_handed_over_under_their_name(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        """The plan was made before the scheduler side had heard that they changed."""
        ids = tuple(SHUFFLED)
        start, cut = Start("outdated", DIGEST, len(ids) * BLOCK_SIZE, None), 3
        for version, save in ((0, Save("outdated", 0, ids[:cut], False)),
                              (1, Save("outdated", cut, ids[cut:], True))):  # fmt: skip
            prefill.ranks[0].worker._weights.version = version
            starts = () if version else (start,)
            plan = HandoverPlan(starts=starts, saves=(save,), heard_weights=(0,))
            prefill.step(plan, prefill.compute(save.block_ids, 30 + version))
        prefill.ranks[0].worker._weights.version = 0
        decode.load("outdated", OTHERS, prefill.address)
        (result,) = decode.finish("request of outdated")
        assert result.num_blocks == 0
        assert result.cause is not None
        assert result.cause.text.endswith(OTHER_WEIGHTS.text)
        prefill.until(lambda: prefill.used_bytes == 0)

    def test_only_one_request_takes_a_handover(
        self, prefill: FakeInstance, decode: FakeInstance
    ) -> None:
        prefill.prefill("once", SHUFFLED, decode.address, seed=13)
        decode.load("once", OTHERS, prefill.address)
        decode.load("once", SHUFFLED, prefill.address, request_id="second")
        check_all_arrived(prefill, decode, "once")
        (second,) = decode.finish("second")
        taken = Cause(Reason.TAKEN, "another request has taken this hand-over")
        assert (second.num_blocks, second.cause) == (0, taken)
