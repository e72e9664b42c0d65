"""Whether a step waits for Redis: after one slow answer, later steps wait again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace

import pytest

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.kv_events.log import KvEventLog
from lmcache_connector.kv_parts.part import Part, Rule, part_key, part_of
from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.lookup.background_lookup import (
    BackgroundLookup,
    PendingLookup,
    RequestLookup,
)
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import CacheEvent, Tier
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.threads import PENDING, Pending, StepWait
from tests.lookup.test_background_lookup import GatedLookup
from tests.support.clock import Clock
from tests.support.doubles.simulated_instance import calibrate
from tests.support.redis.chunks import PARTS, config
from tests.support.redis.servers import Server, free_port

CHUNK = 256
PROMPT_TOKENS = 4 * CHUNK
ONE_PART = (Part(Rule.PREFIX, (0,), 16),)


class SlowLookup(GatedLookup):
    """Each question takes the next of ``seconds`` on the test's clock. Redis holds all chunks, or
    the first ``num_held``."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._time = clock
        self.seconds: list[float] = []
        self.num_held: int | None = None
        self.gate.set()

    def find(
        self, keys: Sequence[bytes], deadline: float, gives_way: Callable[[], bool] | None = None
    ) -> dict[bytes, Tier]:
        if gives_way is not None:
            return {}
        assert self.gate.wait(30.0)
        self._time.now += self.seconds[0]
        self.last_seconds, self.answered = {Tier.REDIS: self.seconds.pop(0)}, [Tier.REDIS]
        return dict.fromkeys(keys[: self.num_held], Tier.REDIS)


class Told(KvEventLog):
    """Records chunks that are reported as missing in Redis."""

    def __init__(self) -> None:
        super().__init__(1)
        self.missing_keys: list[bytes] = []

    def missing(self, key: bytes) -> None:
        self.missing_keys.append(key)


class Scene:
    """Prefill of a prompt takes 1 s; 0.04 s of it may be spent waiting for Redis."""

    def __init__(
        self, lookup_wait_seconds: float = 1.0, parts: tuple[Part, ...] = ONE_PART
    ) -> None:
        self.clock = Clock()
        self.tier = SlowLookup(self.clock)
        self.remote = BackgroundLookup(self.tier, 5.0, self.clock)
        self.tally = Tally()
        self.index = ChunkIndex(1)
        model = CostModel(clock=self.clock, max_deadline_seconds=10.0)
        for _ in range(8):
            model.observe_prefill(PROMPT_TOKENS, 0, 1.0)
        self.policy = LoadPolicy(model, CHUNK, (1 << 20,), self.clock)
        self.finder = HitFinder(
            parts,
            CHUNK,
            self.index,
            self.tally,
            self.policy,
            KvEventLog(1, is_wanted=False),
            self.remote,
            self.clock,
        )
        self.wait = StepWait(lookup_wait_seconds, self.clock)
        self.wait.is_idle = False

    def new_request(self, seed: int, num_tokens: int = PROMPT_TOKENS) -> RequestLookup:
        rng = random.Random(seed)
        keys = RequestKeys(PrefixHasher({}, CHUNK), RequestIdentity())
        keys.extend([rng.randrange(100) for _ in range(num_tokens)])
        return RequestLookup(SimpleNamespace(num_tokens=num_tokens), keys)

    def request(self, seed: int) -> RequestLookup:
        """A new request, whose lookup has been sent."""
        asked = self.new_request(seed)
        self.wait.next_step()
        self.finder.ask(asked, 0)
        return asked

    def find(self, asked: RequestLookup, is_idle: bool = False) -> int | Pending:
        """The number of chunks that can be loaded."""
        self.wait.is_idle = is_idle
        hit = self.finder.find(asked, 0, self.wait)
        return hit if isinstance(hit, Pending) else hit.stop


def pending(asked: RequestLookup) -> PendingLookup:
    """The request's lookup under way."""
    assert asked.pending is not None
    return asked.pending


def num_found(question: PendingLookup) -> int:
    """The number of chunks found, once the answer is there."""
    answer = question.answer(4.0)
    assert answer is not None
    return len(answer)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.tier.gate.set()
    scene.remote.close()


def test_redis_is_waited_for_again_once_it_is_quick(scene: Scene) -> None:
    scene.tier.seconds = [0.5, 0.5, 0.0, 0.0]
    assert num_found(pending(scene.request(1))) == 4

    scene.tier.gate.clear()
    scene.remote.submit([])  # still under way when the next request is scheduled
    hasty = scene.request(2)
    given_up = pending(hasty)
    assert scene.find(hasty) == 0
    assert scene.tally.totals.total("lookups_given_up") == 1

    scene.tier.gate.set()
    assert num_found(given_up) == 4  # its request has gone on, but Redis is quick again
    patient = scene.request(3)
    assert num_found(pending(patient)) == 4
    assert scene.find(patient) == 4
    assert scene.remote.expected_seconds == {Tier.REDIS: 0.0}
    assert scene.tally.totals.total("lookups_given_up") == 1


def test_a_lookup_past_its_deadline_is_given_up(scene: Scene) -> None:
    scene.tier.gate.clear()
    late = scene.request(1)
    scene.clock.now += 6.0
    assert scene.find(late) == 0
    assert scene.tally.totals.total("lookups_given_up") == 1


def test_a_queued_request_is_looked_up_once_more(scene: Scene) -> None:
    """Meanwhile another request stored their common prefix."""
    scene.tier.seconds = [0.0, 0.0]
    scene.tier.num_held = 1
    asked = scene.request(1)
    first = pending(asked)
    assert num_found(first) == 1
    scene.tier.num_held = 4
    scene.clock.now += 0.1
    scene.finder.ask(asked, 0)
    assert pending(asked) is first, "asked a moment ago"
    scene.clock.now += 1.0
    scene.finder.ask(asked, 0)
    assert pending(asked) is not first
    assert num_found(pending(asked)) == 4
    assert scene.find(asked) == 4
    scene.clock.now += 1.0
    scene.finder.ask(asked, 0)
    assert asked.pending is None, "it has been decided"


@pytest.mark.parametrize(("source_stop", "is_awaited"), [(0, True), (3, False), (4, False)])
def test_beside_a_source_a_request_waits_for_what_that_lacks(
    scene: Scene, source_stop: int, is_awaited: bool
) -> None:
    """A quarter of the prompt is worth a wait of 0.01 s, the whole of it 0.04 s."""
    scene.tier.gate.clear()
    scene.tier.seconds = [0.0]
    asked = scene.request(1)
    found = [scene.finder.find_elsewhere(asked, 0, source_stop, scene.wait)]
    scene.clock.now += 0.02
    scene.wait.next_step()
    found.append(scene.finder.find_elsewhere(asked, 0, source_stop, scene.wait))
    assert found == [None if source_stop == 4 else PENDING, PENDING if is_awaited else None]


def asked_without_a_turn(scene: Scene, *seconds: float) -> RequestLookup:
    """A request whose lookup expired behind another one. ``seconds``: Redis' times per lookup."""
    scene.tier.gate.clear()
    scene.tier.seconds = list(seconds)
    first, second = scene.request(1), scene.request(2)
    no_turn = pending(second)
    scene.tier.gate.set()
    assert num_found(pending(first)) == 4
    no_turn.wait(10.0)
    return second


def test_an_expired_look_up_tells_of_no_missing_chunk(scene: Scene) -> None:
    told = scene.finder.kv_events = Told()
    second = asked_without_a_turn(scene, 6.0)
    scene.clock.now -= 6.0
    assert scene.find(second) == 0
    assert told.missing_keys == []


@pytest.mark.parametrize("answers", [False, True])
def test_only_a_redis_that_answers_tells_of_a_missing_chunk(
    scene: Scene, valkey: Server, answers: bool
) -> None:
    url = valkey.url if answers else f"redis://127.0.0.1:{free_port()}"
    told = scene.finder.kv_events = Told()
    redis = AnyLookup({Tier.REDIS: RedisLookup(config(url), [PARTS])}, time.monotonic)
    with closing(BackgroundLookup(redis, 5.0, time.monotonic)) as lookup:
        scene.finder.lookup = lookup
        asked = scene.request(1)
        assert num_found(pending(asked)) == 0
        assert scene.find(asked) == 0
    assert told.missing_keys == list(asked.keys.keys[:answers])


def test_chunks_evicted_while_a_request_queued_come_from_redis(scene: Scene) -> None:
    """Redis was asked only for the chunks that memory lacked then; it has all."""
    scene.tier.seconds = [0.0, 0.0]
    asked = scene.new_request(1)
    scene.index.apply(0, [CacheEvent(key, True) for key in asked.keys.keys[:2]])
    scene.finder.ask(asked, 0)
    assert num_found(pending(asked)) == 2
    scene.index.apply(0, [CacheEvent(asked.keys.keys[1], False)])
    scene.clock.now += 1.0
    assert scene.find(asked) == 4


def test_a_long_step_is_lost_only_for_a_likely_hit() -> None:
    """Another step takes a quarter of the prompt's compute, hit or miss."""
    scene = Scene(lookup_wait_seconds=0.0)
    scene.tier.seconds = [0.0] * 20
    calibrate(scene.policy.model, Tier.REDIS, 1e9, 0.0)
    for _ in range(8):
        scene.policy.step_planned(4, 0, has_prefill=False)
        scene.clock.now += 0.25
    scene.tier.gate.clear()
    hopeful = scene.request(1)
    assert scene.find(hopeful) is PENDING
    scene.tier.gate.set()
    assert num_found(pending(hopeful)) == 4
    assert scene.find(hopeful) == 4

    scene.tier.gate.clear()
    first = scene.new_request(1).keys.keys[:3]
    scene.index.apply(0, [CacheEvent(key, True) for key in first])
    assert scene.find(scene.request(1)) == 3, "the last chunk alone is quickly computed"
    scene.tier.gate.set()

    scene.tier.num_held = 0
    for seed in range(2, 12):
        assert num_found(pending(scene.request(seed))) == 0
    scene.tier.gate.clear()
    assert scene.find(scene.request(12)) == 0
    assert scene.tally.totals.total("lookups_given_up") == 2
    scene.tier.gate.set()
    scene.remote.close()


class Unanswered:
    """A lookup without an answer that records how long it was waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def answer(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.mark.parametrize(
    ("setting", "is_idle", "waits"),
    [(0.001, False, [0.001, 0.0]), (0.001, True, [0.005, 0.0]), (0.0, True, [0.0, 0.0])],
)
def test_a_step_waits_once_and_longer_if_the_engine_is_idle(
    setting: float, is_idle: bool, waits: list[float]
) -> None:
    scene = Scene(lookup_wait_seconds=setting)
    scene.tier.seconds = [0.0]
    asked = scene.request(1)
    question = Unanswered()
    asked.pending = question  # type: ignore[assignment]
    for _ in waits:
        assert scene.find(asked, is_idle) is PENDING
    assert question.waits == waits
    scene.remote.close()


# -- models with windows ---------------------------------------------------------------------------

WINDOWED = (Part(Rule.PREFIX, (0,), 16), Part(Rule.WINDOW, (1,), 16, CHUNK + 2))


@pytest.fixture
def windowed() -> Iterator[Scene]:
    """A window reaches into two chunks."""
    scene = Scene(parts=WINDOWED)
    yield scene
    scene.remote.close()


def admit(scene: Scene, asked: RequestLookup, part: int, *chunks: int) -> None:
    keys = [part_key(asked.keys.keys[chunk], part, 2) for chunk in chunks]
    scene.index.apply(0, [CacheEvent(key, True) for key in keys])


def asked_for(scene: Scene, asked: RequestLookup) -> list[tuple[int, int]]:
    """The part and the chunk of each key that is looked up."""
    scene.finder.ask(asked, 0)
    chunks = [key[:-1] for key in asked.keys.keys]
    return [(part_of(key, 2), chunks.index(key[:-1])) for key in asked.asked_keys]


def test_chunks_of_both_parts_missing_in_memory_are_looked_up(windowed: Scene) -> None:
    windowed.tier.seconds = [0.0]
    asked = windowed.new_request(1)
    admit(windowed, asked, 0, 0, 1, 3)
    admit(windowed, asked, 1, 1)
    assert asked_for(windowed, asked) == [(0, 2), (1, 0), (1, 2)]
    assert num_found(pending(asked)) == 3
    assert windowed.find(asked) == 3, "the last token is left to compute"


def storing(scene: Scene) -> tuple[RequestLookup, Sequence[bytes]]:
    """A request of four chunks: another rank has two of them and stores the third."""
    asked = scene.new_request(1)
    keys = asked.keys.keys
    scene.tier.seconds, scene.tier.num_held = [0.0] * 4, 0
    scene.index = scene.finder.index = ChunkIndex(2)
    scene.index.needed = lambda key: 2
    scene.index.apply(1, [CacheEvent(key, True) for key in keys[:2]])
    scene.index.plan(keys[2:3], 1)
    return asked, keys


def test_a_hit_waits_for_a_store_no_longer_than_its_chunks_take_to_compute() -> None:
    scene = Scene()
    asked, _ = storing(scene)
    assert scene.find(asked) is PENDING
    scene.clock.now += 0.2
    assert scene.find(asked) is PENDING
    scene.clock.now += 0.1
    assert scene.find(asked) == 2
    scene.remote.close()


def test_a_hit_waits_for_another_ranks_store() -> None:
    scene = Scene()
    asked, keys = storing(scene)
    assert scene.find(asked) is PENDING
    scene.index.apply(1, [CacheEvent(keys[2], True)])
    scene.index.settle(keys[2:3], 1)
    assert scene.find(asked) == 3


@pytest.mark.parametrize(
    ("part", "held", "stored"),
    [
        (Part(Rule.WINDOW, (1,), 16, 2 * CHUNK), range(1, 8), 0),
        (Part(Rule.STATE, (1,), 16), range(6, 7), 2),
    ],
    ids=["window", "state"],
)
def test_a_hit_ignores_stores_of_chunks_outside_it(part: Part, held: range, stored: int) -> None:
    scene = Scene(parts=(Part(Rule.PREFIX, (0,), 16), part))
    asked = scene.new_request(1, 8 * CHUNK)
    scene.tier.seconds, scene.tier.num_held = [0.0] * 6, 0
    scene.index = scene.finder.index = ChunkIndex(2)
    scene.index.needed = lambda key: 2
    shared, own = ([part_key(key, p, 2) for key in asked.keys.keys] for p in range(2))
    scene.index.apply(1, [CacheEvent(key, True) for key in [*shared, *(own[i] for i in held)]])
    scene.index.plan([own[stored]], 1)
    assert scene.find(asked) == 7
    scene.remote.close()
