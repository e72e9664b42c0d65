"""Nothing is stored but what its key names, whatever vLLM, other connectors and clients do.

vLLM's real scheduler drives our real scheduler side through long random lives of an engine; see
:mod:`tests.support.doubles.shadow_worker` for the oracle. It computes what each chunk's tokens,
adapter and images imply, and compares every chunk that is stored or loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.scheduler.request_state import RequestState
from tests.scheduler.test_tails import CONSUMED, PRODUCED
from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import VOCABULARY, Faults, Image, WrongKV

SHAPES = {
    "alone": Shape(),
    "zeroed": Shape(zeroes=True, num_blocks=18),
    "zeroed, async": Shape(zeroes=True, depth=2, num_blocks=18, redis=True),
    "audited": Shape(audit_share=1.0, depth=2, redis=True),
    "first of two": Shape(beside=0, redis=True),
    "second of two": Shape(beside=1),
    "second of two, async": Shape(beside=1, depth=2, redis=True),
    "second of two, deep, zeroed": Shape(beside=1, depth=3, zeroes=True, num_blocks=20),
    "second of two, two ranks": Shape(beside=1, world_size=2),
    "without prefix caching": Shape(prefix_caching=False, zeroes=True, depth=2),
    "second of two, without prefix caching": Shape(beside=1, prefix_caching=False),
    "three blocks a chunk": Shape(beside=1, chunk_size=3 * BLOCK_SIZE, depth=2, num_blocks=26),
    "windows": Shape(groups=("w40", "full", "w40"), num_blocks=50, tier_chunks=30),
    "windows, async, redis": Shape(
        groups=("full", "w24", "c64"), num_blocks=50, tier_chunks=30, depth=2, redis=True
    ),
    "windows, zeroed, without prefix caching": Shape(
        groups=("w40", "full"), num_blocks=36, tier_chunks=30, zeroes=True, prefix_caching=False
    ),
    "one window": Shape(groups=("w40",)),
    "a drafter's head": Shape(lookahead=1, redis=True),
    "a drafter's head, async, zeroed": Shape(lookahead=1, depth=2, zeroes=True, num_blocks=26),
    "a drafter's head, windows": Shape(
        groups=("w40", "full"), lookahead=1, num_blocks=60, tier_chunks=30
    ),
}

IMAGES = {"cat": 3, "dog": 20, "owl": 20}  # content: how many tokens it takes


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


class Life:
    """One engine, and all that may happen to it."""

    def __init__(self, engine: ShadowEngine, chance: random.Random) -> None:
        self.engine = engine
        self.chance = chance
        self.weights: dict[Callable[[], None], int] = {
            self.add: 16,
            self.step: 50,
            self.abort: 6,
            self.next_turn: 8,
            self.evict: 3,
            self.forget_prefix_cache: 3,
            self.reset: 1,
            self.reload_adapter: 3,
            self.sleep: 1,
        }

    def live(self, num_acts: int) -> None:
        acts, weights = list(self.weights), list(self.weights.values())
        for _ in range(num_acts):
            self.chance.choices(acts, weights)[0]()
        self.engine.run_until_idle()
        self.engine.check_whole()

    def add(self) -> None:
        if len(self.engine.live) > 8:
            return
        chance, size = self.chance, self.engine.shape.chunk_size
        shared = prompt(chance.randrange(2), chance.choice([0, size + 5, 3 * size]))
        tokens = shared + prompt(chance.randrange(2), chance.choice([1, size - 1, size, 2 * size]))
        self._add(tokens, chance.choice([None, None, None, "tenant"]))

    def next_turn(self) -> None:
        """The whole of an earlier request, and a little more."""
        done = [r for r in self.engine.requests.values() if r.is_finished() and r.num_tokens < 200]
        if done and len(self.engine.live) <= 8:
            before = self.chance.choice(done[-4:])
            self._add([*before.all_token_ids, *prompt(self.chance.randrange(9), 9)], None)

    def _add(self, tokens: list[int], salt: str | None) -> None:
        chance = self.chance
        self.engine.add(
            tokens,
            chance.choice([1, 1, 3, self.engine.shape.chunk_size]),
            salt,
            adapter=chance.choice([None, None, "lora-a", "lora-b"]),
            images=self._images(len(tokens)),
            offer=self._offer(len(tokens)),
            sends=chance.random() < 0.2,
            bypasses=chance.random() < 0.15,
            transfer=chance.choice([None, None, PRODUCED, CONSUMED, PRODUCED | CONSUMED]),
        )

    def _images(self, num_tokens: int) -> list[Image]:
        """The client names them, and uses few names."""
        if self.chance.random() < 0.6 or num_tokens < 30:
            return []
        start = self.chance.choice([0, num_tokens // 2])
        name, content = self.chance.choice("ab"), self.chance.choice(list(IMAGES))
        return [Image(name, content, start, start + IMAGES[content])]

    def _offer(self, num_tokens: int) -> Offer | None:
        blocks = (num_tokens - 1) // BLOCK_SIZE
        if self.chance.random() < 0.5 or not blocks:
            return None
        offered = self.chance.randint(1, blocks) * BLOCK_SIZE
        return Offer(offered, self.chance.random() < 0.6, self.chance.choice(list(Arrival)))

    def step(self) -> None:
        self.engine.step()

    def abort(self) -> None:
        if self.engine.live:
            loading = [r for r in self.engine.live if self.engine.is_loading(r)]
            self.engine.abort(self.chance.choice(loading or self.engine.live))

    def evict(self) -> None:
        for rank in self.engine.ranks:
            rank.evict(self.chance.randrange(4))

    def forget_prefix_cache(self) -> None:
        """vLLM's own, and not ours: the next request finds what was stored."""
        self.engine.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        self.engine.reset(preempt=self.chance.random() < 0.5)

    def reload_adapter(self) -> None:
        """Other weights under the same name and path. Nobody is computing with the old ones."""
        name = self.chance.choice(list(self.engine.adapters))
        if not any(self.engine.uses(request_id, name) for request_id in self.engine.live):
            self.engine.adapters[name] += 1

    def sleep(self) -> None:
        self.engine.sleep()


def a_life(
    model: Path,
    shape: Shape,
    chance: random.Random,
    spoil: Callable[[ShadowEngine], None] = lambda engine: None,
    num_acts: int = 60,
) -> ShadowEngine:
    """Raises :class:`WrongKV` if a chunk is stored or loaded that is not what its key names."""
    faults = Faults(
        failed_load=chance.choice([0.0, 0.3]),
        no_memory=chance.choice([0.0, 0.1]),
        slow=chance.choice([0.0, 0.5, 0.9]),
        others_lie=True,
    )
    engine = ShadowEngine(model, shape, chance.randrange(1 << 32), faults)
    spoil(engine)
    Life(engine, chance).live(num_acts)
    return engine


LIVES = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@given(name=st.sampled_from(list(SHAPES)), seed=st.integers(0, 2**32 - 1))
@settings(LIVES, max_examples=300)
def test_what_is_stored_is_what_its_key_names(model: Path, name: str, seed: int) -> None:
    a_life(model, SHAPES[name], random.Random(seed))


@pytest.mark.soak  # 10,000 lives take 15 to 25 minutes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_nor_in_ten_thousand_lives(model: Path, name: str) -> None:
    num_stored = num_loaded = num_dropped = 0.0
    for seed in range(10_000 // len(SHAPES) + 1):
        engine = a_life(model, SHAPES[name], random.Random(f"{name} {seed}"))
        num_stored += engine.ranks[0].num_stored_chunks
        num_loaded += engine.ranks[0].num_loaded_chunks
        num_dropped += engine.adapter.tally.total("dropped_stores")
    assert min(num_stored, num_loaded, num_dropped) > 0


# -- one rule at a time ---------------------------------------------------------------------------

PROMPT = prompt(5, 4 * BLOCK_SIZE + 1)
CALM = Faults(slow=0.0, others_lie=True)


def num_stores(engine: ShadowEngine) -> int:
    engine.run_until_idle()
    engine.check_whole()
    return int(engine.adapter.tally.total("store_jobs"))


@pytest.mark.parametrize("beside", [0, 1])
def test_a_client_that_leaves_while_another_connector_loads_leaves_nothing_to_store(
    model: Path, beside: int
) -> None:
    """vLLM counts the whole prompt as computed by then, and its blocks are not filled."""
    engine = ShadowEngine(model, Shape(beside=beside), 0, CALM)
    offer = Offer(4 * BLOCK_SIZE, True, Arrival.RIGHT)
    request_id = engine.add(PROMPT, 1, offer=offer, sends=True)
    engine.step()
    assert engine.is_loading(request_id)
    engine.abort(request_id)
    assert engine.requests[request_id].num_computed_tokens == 4 * BLOCK_SIZE
    assert num_stores(engine) == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_what_another_connector_brought_is_not_stored_nor_what_follows(
    model: Path, is_async: bool
) -> None:
    engine = ShadowEngine(model, Shape(beside=1), 0, CALM)
    engine.add(PROMPT, 6 * BLOCK_SIZE, offer=Offer(2 * BLOCK_SIZE, is_async, Arrival.RIGHT))
    assert num_stores(engine) == 0
    engine.add(PROMPT, 1)  # whose first blocks vLLM's prefix cache supplies
    assert num_stores(engine) == 0
    assert engine.scheduler.reset_prefix_cache()
    engine.add(PROMPT, 1)
    assert num_stores(engine) == 1


@pytest.mark.parametrize("resets", [False, True])
def test_a_reset_does_not_close_the_gap_another_connector_left(model: Path, resets: bool) -> None:
    """vLLM computes again what was missing, and with asynchronous scheduling the last of it from a
    token that it has dropped."""
    engine = ShadowEngine(model, Shape(beside=1, depth=3), 0, CALM)
    tokens = PROMPT[: engine.shape.chunk_size - 1]
    engine.add(tokens, 1, offer=Offer(BLOCK_SIZE, False, Arrival.FAILED))
    engine.step()
    if resets:
        engine.reset()
    assert num_stores(engine) == 0


def test_a_request_that_bypasses_the_cache_leaves_nothing_to_store(model: Path) -> None:
    engine = ShadowEngine(model, Shape(), 0, CALM)
    engine.add(PROMPT, 1, bypasses=True)
    engine.add(PROMPT, 1)
    assert num_stores(engine) == 0


def test_blocks_that_a_bypassing_request_took_over_do_not_count_any_more(model: Path) -> None:
    engine = ShadowEngine(model, Shape(num_blocks=8), 0, CALM)
    engine.add(PROMPT, 1)
    assert num_stores(engine) == 1
    assert len(engine.adapter.witness) == 4
    engine.add(prompt(6, 7 * BLOCK_SIZE - 1), 1, bypasses=True)
    engine.run_until_idle()
    assert len(engine.adapter.witness) == 0


def test_an_adapter_that_was_loaded_again_does_not_inherit_blocks(model: Path) -> None:
    engine = ShadowEngine(model, Shape(), 0, CALM)
    for version, stores in enumerate([1, 1]):  # the second finds the blocks of the first
        engine.adapters["lora-a"] = version
        engine.add(PROMPT, 1, adapter="lora-a")
        assert num_stores(engine) == stores


def test_blocks_of_prompts_that_went_on_differently_are_not_stored_for_a_head(model: Path) -> None:
    """vLLM's own cache knows a block by the tokens up to its end. A head's KV there follows from
    the next one, and the first prompt's was another."""
    engine = ShadowEngine(model, Shape(lookahead=1, num_blocks=60), 0, CALM)
    shared, own = prompt(5, 6 * BLOCK_SIZE), prompt(6, 3 * BLOCK_SIZE)
    for tokens in ([*shared, (own[0] + 1) % VOCABULARY, 1, 2], [*shared, *own]):
        engine.add(tokens, max_tokens=1)
        engine.run_until_idle()
    engine.ranks[0].evict(100)
    engine.step()
    again = engine.requests[engine.add([*shared, *own], max_tokens=1)]
    engine.step()
    # It has the block from the first of the two, after which the second computed one of its own.
    assert again.num_computed_tokens > 6 * BLOCK_SIZE
    engine.run_until_idle()
    engine.check_whole()
    # Of the second, all three chunks were stored; of the third, two.
    assert engine.ranks[0].num_stored_chunks == 3 + 2 + 2


def test_blocks_of_an_answer_are_stored_again_for_a_head(model: Path) -> None:
    """While they were computed the token after each was not known yet. They are in vLLM's cache
    when the tier has let go of them, and the conversation goes on."""
    engine = ShadowEngine(model, Shape(lookahead=1, num_blocks=60), 0, CALM)
    request = engine.requests[engine.add(prompt(5, 4 * BLOCK_SIZE), max_tokens=4 * BLOCK_SIZE + 2)]
    engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 4
    engine.ranks[0].evict(100)
    engine.step()
    again = engine.requests[engine.add([*request.all_token_ids, 1, 2], max_tokens=1)]
    engine.step()
    assert again.num_computed_tokens > 8 * BLOCK_SIZE > again.num_tokens - BLOCK_SIZE
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == 4 + 4


def test_steps_without_the_drafter_leave_nothing_to_store(model: Path) -> None:
    """vLLM runs it for all requests of a step, or for none."""
    shape = Shape(lookahead=1, drafted_len=100, num_blocks=60, tier_chunks=30)
    engine = ShadowEngine(model, shape, 0, CALM)
    for seed, length in ((1, 200), (2, 90)):  # the step budget is 64
        engine.add(prompt(seed, length), max_tokens=1)
    engine.run_until_idle()
    assert engine.ranks[0].num_stored_chunks == 2 + 0


# -- the oracle notices when one of the rules is switched off -------------------------------------


def count_intentions(engine: ShadowEngine) -> None:
    """A request that is aborted while another connector loads it has all its tokens "computed"."""
    vars(engine.adapter.witness).update(finished=lambda state, num_tokens: num_tokens)


def trust_whatever_is_there(engine: ShadowEngine) -> None:
    """What vLLM's prefix cache and other connectors supply is as good as what we saw computed."""
    vars(engine.adapter.witness).update(_begin=lambda state, start: start)


def trust_block_hashes(engine: ShadowEngine) -> None:
    """A block that vLLM found by its own hash is the request's, if only we saw it computed."""
    vars(engine.adapter.witness).update(
        _lineages_of=lambda state, size, first, end: [b""] * (end - first)
    )


def trust_names_of_images(engine: ShadowEngine) -> None:
    chunk_size = engine.shape.chunk_size
    vars(engine.adapter.witness).update(
        _full_lineage=lambda state, size, block: state.keys.parent(block * size // chunk_size)
    )


def close_gaps(engine: ShadowEngine) -> None:
    """When vLLM computes again what another connector failed to bring, all is well."""
    scheduled = engine.adapter.witness.scheduled

    def forgiving(state: RequestState, num_tokens: int, *, is_sure: bool) -> bool:
        state.witness.has_gap = False
        return scheduled(state, num_tokens, is_sure=False)

    vars(engine.adapter.witness).update(scheduled=forgiving)


def let_stores_run_on(engine: ShadowEngine) -> None:
    """Stores are not cancelled when vLLM reuses their blocks."""
    vars(engine.adapter.witness).update(take_reused=set)


def open_the_gate(engine: ShadowEngine) -> None:
    """A copy that ends between two steps is kept at once."""
    for rank in engine.ranks:
        rank.faults.has_gate = False


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (count_intentions, "second of two"),
        (trust_whatever_is_there, "second of two"),
        (trust_whatever_is_there, "alone"),
        (trust_whatever_is_there, "windows"),
        (trust_block_hashes, "alone"),
        (trust_block_hashes, "one window"),
        (trust_names_of_images, "alone"),
        (close_gaps, "second of two, async"),
        (let_stores_run_on, "without prefix caching"),
        (let_stores_run_on, "windows, zeroed, without prefix caching"),
        (open_the_gate, "zeroed"),
    ],
)
def test_the_oracle_notices(model: Path, spoil: Callable[[ShadowEngine], None], name: str) -> None:
    assert any(is_wrong(model, SHAPES[name], seed, spoil) for seed in range(500))


def is_wrong(model: Path, shape: Shape, seed: int, spoil: Callable[[ShadowEngine], None]) -> bool:
    try:
        a_life(model, shape, random.Random(seed), spoil)
    except WrongKV:
        return True
    return False
