"""The scheduler side plans saves and loads, and lets prompts wait for room."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_connector.keys.request_keys import RequestIdentity
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.plans import HandoverPlan, HandoverReport, HandoverResult, RankHost
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.scheduler.adapter import P2PSchedulerAdapter
from lmcache_connector.p2p.scheduler.routing import Router
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.requests.identifier import UNREAD, Bypass, NotYet
from lmcache_connector.weight_names import WeightNames
from tests.test_weight_names import Files

OWN = PeerAddress("127.0.0.1", 5)
BLOCK = 16
LATE = Cause(Reason.DEADLINE, "it did not come within 9 s")


@dataclass(eq=False)
class FakeRequest:
    """As much of vLLM's request as the scheduler side looks at."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlainRequests:
    """Identifies at once."""

    def identify(self, request: Any) -> RequestIdentity:
        return RequestIdentity()

    def forget(self, request: Any) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing runs."""


def make(
    role: str = "producer",
    buffer_blocks: int = 100,
    clock: Clock | None = None,
    identifier: Any = None,
) -> Any:
    settings = P2PSchedulerSettings(
        block_size=BLOCK,
        block_bytes=10,
        world_size=2,
        num_writers=2,
        tp_size=2,
        buffer_bytes=10 * buffer_blocks,
        largest_buffer_bytes=10 * buffer_blocks,
        buffer_wait_seconds=5.0,
        load_deadline_seconds=9.0,
        engine_id="e",
        address=OWN,
    )
    router = Router(
        own=OWN,
        produces=role == "producer",
        consumes=role == "consumer",
        pushes=True,
        may_talk_to=lambda _: True,
    )
    clock = clock or Clock()
    weights = WeightNames(2, Files(), {}, lambda found: None, lambda: "", clock)
    side = P2PSchedulerAdapter(
        settings, router, {"model": 1}, weights, {}, identifier or PlainRequests(), clock
    )
    answer_weights(side)
    return side


def answer_weights(side: P2PSchedulerAdapter, digest: str = "one", version: int = 0) -> None:
    """All ranks say which weights they have."""
    told = WeightsInMemory(version, side.weights._num_questions, digest, "one")
    side.update_from_reports([HandoverReport(weights=(rank, told)) for rank in range(2)])


def step(
    side: P2PSchedulerAdapter,
    scheduled: dict[FakeRequest, int],
    blocks: dict[str, list[int]],
    preempted: tuple[str, ...] = (),
) -> HandoverPlan:
    output: Any = SimpleNamespace(
        num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(preempted),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (blocks[name],)),
    )
    plan = side.build_plan(output)
    for request, count in scheduled.items():
        request.num_computed_tokens += count
    return plan


def asks_for_decode(name: str, num_tokens: int) -> FakeRequest:
    return FakeRequest(name, list(range(num_tokens)), {"do_remote_decode": True})


def begin(side: Any, request: FakeRequest) -> tuple[int | None, bool]:
    side.on_new_request(request)
    answer: tuple[int | None, bool] = side.get_num_new_matched_tokens(request, 0)
    return answer


class TestProducer:
    def test_only_blocks_that_are_full_are_saved_and_the_tail_at_the_end(self) -> None:
        side, request = make(), asks_for_decode("r", 100)
        assert begin(side, request) == (0, False)
        blocks = {"r": [10, 11, 12, 13, 14, 15, 16]}
        first = step(side, {request: 40}, blocks)
        assert first.announced == ("r",)
        (start,) = first.starts
        assert (start.num_tokens, start.target) == (100, None)
        assert [(s.first_block, s.block_ids, s.is_last) for s in first.saves] == [
            (0, (10, 11), False)
        ]
        second = step(side, {request: 40}, blocks)
        assert [(s.first_block, s.block_ids) for s in second.saves] == [(2, (12, 13, 14))]
        last = step(side, {request: 20}, blocks)
        assert [(s.first_block, s.block_ids, s.is_last) for s in last.saves] == [
            (5, (15, 16), True)
        ]
        assert step(side, {request: 1}, blocks).saves == ()
        holds, params = side.request_finished(request, blocks["r"], is_served=True)
        assert holds
        assert params["remote_request_id"] == "r"
        assert params["remote_block_ids"] == [[10, 11, 12, 13, 14, 15, 16]]
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5)
        assert step(side, {}, {}).holds[0].request_id == "r"
        side.check_integrity()

    def test_cached_blocks_are_saved_with_the_first_step(self) -> None:
        side, request = make(), asks_for_decode("r", 50)
        begin(side, request)
        request.num_computed_tokens = 32
        (save,) = step(side, {request: 18}, {"r": [1, 2, 3, 4]}).saves
        assert (save.first_block, save.block_ids, save.is_last) == (0, (1, 2, 3, 4), True)

    def test_a_preempted_prompt_begins_anew(self) -> None:
        side, request = make(), asks_for_decode("r", 50)
        begin(side, request)
        step(side, {request: 32}, {"r": [1, 2]})
        request.num_computed_tokens = 0
        assert step(side, {}, {}, preempted=("r",)).vacated == ("r",)
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        plan = step(side, {request: 50}, {"r": [5, 6, 7, 8]})
        assert len(plan.starts) == 1
        assert plan.saves[0].block_ids == (5, 6, 7, 8)

    def test_an_abort_is_told(self) -> None:
        side, request = make(), asks_for_decode("r", 50)
        begin(side, request)
        step(side, {request: 32}, {"r": [1, 2]})
        assert side.request_finished(request, [1, 2], is_served=False) == (True, None)
        plan = step(side, {}, {})
        assert [(d.transfer_id, d.cause.reason) for d in plan.drops] == [("r", Reason.ABORTED)]
        early = asks_for_decode("early", 50)
        begin(side, early)
        assert side.request_finished(early, [], is_served=False) == (False, None)
        assert [drop.transfer_id for drop in step(side, {}, {}).drops] == ["early"]
        side.check_integrity()

    def test_prompts_wait_for_room_and_then_go_without(self) -> None:
        clock = Clock()
        side = make(buffer_blocks=10, clock=clock)
        first, second = asks_for_decode("1", 7 * BLOCK), asks_for_decode("2", 5 * BLOCK)
        assert begin(side, first) == (0, False)
        assert begin(side, second) == (None, False)
        plan = step(side, {first: 7 * BLOCK}, {"1": list(range(7))})
        assert plan.waits_for_room
        for _ in range(2):  # room is there when all ranks have let go
            assert side.get_num_new_matched_tokens(second, 0) == (None, False)
            side.update_from_reports([HandoverReport(released=("1",))])
        assert side.get_num_new_matched_tokens(second, 0) == (0, False)
        third = asks_for_decode("3", 6 * BLOCK)
        assert begin(side, third) == (None, False)
        clock.now = 6.0
        assert side.get_num_new_matched_tokens(third, 0) == (0, False)
        plan = step(side, {third: 6 * BLOCK}, {"3": list(range(6))})
        assert (plan.starts, plan.saves) == ((), ())
        assert plan.drops[0].cause.reason is Reason.BUFFER_FULL
        assert side.tally.total("p2p_declined_handovers") == 1

    def test_what_is_larger_than_the_buffers_is_streamed(self) -> None:
        side, request = make(buffer_blocks=8), asks_for_decode("r", 30 * BLOCK)
        assert begin(side, request) == (0, False)
        assert side.reserved_bytes == 4 * 10  # half of the buffer
        step(side, {request: 30 * BLOCK}, {"r": list(range(30))})
        assert side.tally.total("p2p_streamed_handovers") == 1
        assert side.tally.total("p2p_declined_handovers") == 0

    def test_what_never_fits_does_not_wait(self) -> None:
        side, request = make(buffer_blocks=0), asks_for_decode("r", 3 * BLOCK)
        assert begin(side, request) == (0, False)
        assert side.tally.total("p2p_declined_handovers") == 1

    def test_a_reset_ends_what_is_being_saved(self) -> None:
        side, request = make(), asks_for_decode("r", 50)
        begin(side, request)
        step(side, {request: 32}, {"r": [1, 2]})
        side.reset_cache()
        plan = step(side, {request: 18}, {"r": [1, 2, 3, 4]})
        assert [(d.transfer_id, d.cause.reason) for d in plan.drops] == [("r", Reason.RESET)]
        assert plan.saves == ()


def wants(name: str, num_tokens: int) -> FakeRequest:
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 77,
        "remote_request_id": f"at the producer {name}",
    }
    return FakeRequest(name, list(range(num_tokens)), params)


class TestConsumer:
    def test_the_whole_prompt_is_loaded_once(self) -> None:
        side, request = make("consumer"), wants("r", 50)
        assert begin(side, request) == (50, True)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4, 5], 50)
        (load,) = step(side, {}, {}).loads
        assert (load.first_block, load.block_ids) == (0, (1, 2, 3, 4))
        assert (load.source, load.transfer_id) == (
            PeerAddress("127.0.0.1", 77),
            "at the producer r",
        )
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4, 5], 0)
        for result in (HandoverResult("r", 4, 0.1), HandoverResult("r", 3, 0.1, cause=LATE)):
            side.update_from_reports([HandoverReport((result,))])
        assert side.tally.total("p2p_hit_tokens") == 48
        assert side.tally.total("p2p_recomputed_tokens") == 2
        assert side.request_finished(request, [], is_served=True) == (False, None)
        plan = step(side, {}, {})
        assert (plan.releases, plan.cancelled_loads) == ((), ())
        side.check_integrity()

    def test_both_sides_give_a_prompt_the_same_name(self) -> None:
        producer, consumer = make(), make("consumer")
        sent, wanted, other = asks_for_decode("s", 50), wants("r", 50), wants("o", 50)
        other.all_token_ids = [*range(49), 7]
        digests = []
        begin(producer, sent)
        digests.append(step(producer, {sent: 50}, {"s": [1, 2, 3, 4]}).starts[0].digest)
        for request in (wanted, other):
            begin(consumer, request)
            consumer.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
            digests.append(step(consumer, {}, {}).loads[0].digest)
        assert digests[0] == digests[1] != digests[2]

    def test_the_producer_is_told_when_nothing_is_needed(self) -> None:
        side = make("consumer")
        cached, aborted = wants("cached", 50), wants("aborted", 50)
        side.on_new_request(cached)
        assert side.get_num_new_matched_tokens(cached, 48) == (0, False)
        side.update_state_after_alloc(cached, lambda: [1, 2, 3, 4], 0)
        begin(side, aborted)
        side.request_finished(aborted, [], is_served=False)
        assert {r.transfer_id for r in step(side, {}, {}).releases} == {
            "at the producer cached",
            "at the producer aborted",
        }

    def test_an_aborted_load_is_cancelled(self) -> None:
        side, request = make("consumer"), wants("r", 50)
        begin(side, request)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
        step(side, {}, {})
        assert side.request_finished(request, [1], is_served=False) == (False, None)
        assert step(side, {}, {}).cancelled_loads == ("r",)
        side.update_from_reports([HandoverReport((HandoverResult("r", 0, 0.0, cause=LATE),))])

    def test_a_request_that_waits_in_line_is_told_of_at_once(self) -> None:
        """So that the producer keeps the KV, however long the line is."""
        side, request = make("consumer"), wants("r", 50)
        side.on_new_request(request)
        (arrival,) = step(side, {}, {}).arrivals
        assert (arrival.transfer_id, arrival.source.port) == ("at the producer r", 77)
        assert step(side, {}, {}).arrivals == ()

    def test_several_answers_to_one_prompt_need_one_load(self) -> None:
        """vLLM makes one request for each of ``n``, all with the same parameters."""
        side, children = make("consumer"), [wants("r", 50) for _ in range(4)]
        for number, child in enumerate(children):
            child.request_id = f"{number}_r"
            side.on_new_request(child)
        assert len(step(side, {}, {}).arrivals) == 1
        first, second, third, aborted = children
        side.request_finished(aborted, [], is_served=False)  # the others still want it
        assert side.get_num_new_matched_tokens(first, 0) == (50, True)
        side.update_state_after_alloc(first, lambda: [1, 2, 3, 4], 50)
        for child in (second, third):
            assert side.get_num_new_matched_tokens(child, 0) == (None, False)
        plan = step(side, {}, {})
        assert (len(plan.loads), plan.releases) == (1, ())
        for _ in range(2):  # ranks
            side.update_from_reports([HandoverReport((HandoverResult("0_r", 4, 0.1),))])
        assert side.get_num_new_matched_tokens(second, 48) == (0, False)
        side.request_finished(first, [], is_served=True)
        assert side.get_num_new_matched_tokens(third, 48) == (0, False)
        for child in (second, third):
            side.update_state_after_alloc(child, lambda: [1, 2, 3, 5], 0)
            side.request_finished(child, [], is_served=True)
        assert step(side, {}, {}).loads == ()
        side.check_integrity()

    def test_ranks_on_other_machines_are_announced(self) -> None:
        side = make("producer")
        for rank, host in ((1, "10.0.0.2"), (0, "10.0.0.1")):
            assert step(side, {}, {}).rank_hosts == ()
            side.update_from_reports([HandoverReport(start=RankHost(rank, host))])
        assert step(side, {}, {}).rank_hosts == ("10.0.0.1", "10.0.0.2")
        request = asks_for_decode("r", 50)
        begin(side, request)
        step(side, {request: 50}, {"r": [1, 2, 3, 4]})
        _, params = side.request_finished(request, [1, 2, 3, 4], is_served=True)
        assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", OWN.port)

    def test_a_malformed_request_is_served_alone(self) -> None:
        side = make("consumer")
        bad = FakeRequest("___prefill_addr_nowhere", [1, 2, 3])
        assert begin(side, bad) == (0, False)
        assert side.tally.total("p2p_malformed_requests") == 1

    def test_a_reset_cancels_loads_on_the_way(self) -> None:
        """What they bring was computed before it."""
        side, request = make("consumer"), wants("r", 50)
        begin(side, request)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
        assert step(side, {}, {}).cancelled_loads == ()
        side.reset_cache()
        assert step(side, {}, {}).cancelled_loads == ("r",)

    def test_nothing_is_handed_over_before_the_weights_have_a_name(self) -> None:
        """A prompt waits for it a moment, then it is computed."""
        clock = Clock()
        side, request = make(clock=clock), asks_for_decode("r", 50)
        side.reset_cache()
        assert begin(side, request) == (None, False)
        clock.now = 1.0
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        assert step(side, {request: 50}, {"r": [1, 2, 3, 4]}).starts == ()
        answer_weights(side)
        begin_and_start(side, asks_for_decode("r", 40))

    @pytest.mark.parametrize("resets", [(1, 0), (0, 1), (1, 1), (2, 1)])
    @pytest.mark.parametrize("weights", [("one", "one"), ("two", "one"), ("two", "two")])
    def test_equal_weights_have_one_name_however_often_they_are_read(
        self, resets: tuple[int, int], weights: tuple[str, str]
    ) -> None:
        digests = set()
        for num_resets, digest in zip(resets, weights, strict=True):
            side = make()
            for _ in range(num_resets):
                side.reset_cache()
            if num_resets or digest != "one":
                side.reset_cache()
                answer_weights(side, digest)
            digests.add(begin_and_start(side, asks_for_decode("r", 40)).digest)
        assert len(digests) == len(set(weights))

    @pytest.mark.parametrize("is_reset_before", [False, True])
    def test_an_update_without_a_reset_ends_hand_overs(self, is_reset_before: bool) -> None:
        """vLLM's prefix cache has KV of the weights before."""
        side = make()
        if is_reset_before:
            side.reset_cache()
        plain = FakeRequest("plain", [1, 2, 3])
        step(side, {plain: 3}, {})
        answer_weights(side, "two", version=2)
        side.weights.settle({})
        request = asks_for_decode("r", 40)
        assert begin(side, request) == (0, False)
        assert step(side, {request: 40}, {"r": [1, 2, 3]}).starts == ()
        side.reset_cache()
        answer_weights(side, "two", version=2)
        begin_and_start(side, asks_for_decode("r", 40))

    def test_what_was_put_back_is_handed_over(self) -> None:
        """As after sleep: the weights were gone in between."""
        side = make()
        before = begin_and_start(side, asks_for_decode("r", 40)).digest
        side.request_finished(FakeRequest("r", []), [1, 2, 3], is_served=True)
        answer_weights(side, "one", version=4)
        assert begin_and_start(side, asks_for_decode("r", 40)).digest == before


class BeingRead(PlainRequests):
    """Has an image, or an adapter."""

    def __init__(self) -> None:
        self.found: RequestIdentity | Bypass | NotYet = UNREAD
        self.forgotten: list[str] = []

    def identify(self, request: Any) -> Any:
        return self.found

    def forget(self, request: Any) -> None:
        self.forgotten.append(request.request_id)


class TestContent:
    """It is read in the background: nothing of a hand-over begins before it has a name."""

    def test_a_prompt_waits_until_it_is_read(self) -> None:
        identifier = BeingRead()
        side, request = make(identifier=identifier), asks_for_decode("r", 40)
        assert begin(side, request) == (None, False)
        assert side.get_num_new_matched_tokens(request, 0) == (None, False)
        identifier.found = RequestIdentity(lora="its files")
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        (start,) = step(side, {request: 40}, {"r": [1, 2, 3]}).starts
        plain = begin_and_start(make(), asks_for_decode("r", 40))
        assert start.digest != plain.digest

    def test_one_that_cannot_be_read_is_computed_without_a_hand_over(self) -> None:
        identifier = BeingRead()
        side, request = make(identifier=identifier), asks_for_decode("r", 40)
        begin(side, request)
        identifier.found = Bypass.ADAPTER
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        assert step(side, {request: 40}, {"r": [1, 2, 3]}).starts == ()
        side.request_finished(request, [1, 2, 3], is_served=True)
        assert identifier.forgotten == ["r"]
        side.check_integrity()

    def test_an_aborted_one_is_forgotten(self) -> None:
        identifier = BeingRead()
        side, request = make(identifier=identifier), asks_for_decode("r", 40)
        begin(side, request)
        side.request_finished(request, [], is_served=False)
        side.check_integrity()


def begin_and_start(side: Any, request: FakeRequest) -> Any:
    begin(side, request)
    (start,) = step(side, {request: 40}, {"r": [1, 2, 3]}).starts
    return start
