"""Nothing is stored but what its key names, whatever vLLM, other connectors and clients do.

vLLM's real scheduler drives our real scheduler side through long random lives of an engine; see
:mod:`tests.support.doubles.shadow_worker` for the oracle. It computes what each chunk's tokens,
adapter and images imply, and compares every chunk that is stored or loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import VOCABULARY, Faults, Image

SHAPES = {
    "alone": Shape(),
    "zeroed": Shape(zeroes=True, num_blocks=18),
    "zeroed, async": Shape(zeroes=True, depth=2, num_blocks=18, redis=True),
    "first of two": Shape(beside=0, redis=True),
    "second of two": Shape(beside=1),
    "second of two, async": Shape(beside=1, depth=2, redis=True),
    "second of two, deep, zeroed": Shape(beside=1, depth=3, zeroes=True, num_blocks=20),
    "second of two, two ranks": Shape(beside=1, world_size=2),
    "without prefix caching": Shape(prefix_caching=False, zeroes=True, depth=2),
    "second of two, without prefix caching": Shape(beside=1, prefix_caching=False),
    "three blocks a chunk": Shape(beside=1, chunk_size=3 * BLOCK_SIZE, depth=2, num_blocks=26),
}


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
        self._add(tokens, chance.choice([None, None, None, "tenant", ShadowEngine.bypass]))

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
        )

    def _images(self, num_tokens: int) -> list[Image]:
        """The client names them, and uses few names."""
        if self.chance.random() < 0.7 or num_tokens < 30:
            return []
        start = self.chance.randrange(num_tokens - 25)
        name, content = self.chance.choice("ab"), self.chance.choice("xyz")
        return [Image(name, content, start, start + self.chance.choice([3, 20]))]

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
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.function_scoped_fixture,
    ],
)


@given(name=st.sampled_from(list(SHAPES)), chance=st.randoms(use_true_random=True))
@settings(LIVES, max_examples=400)
def test_what_is_stored_is_what_its_key_names(
    model: Path, name: str, chance: random.Random
) -> None:
    a_life(model, SHAPES[name], chance)
