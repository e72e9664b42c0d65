"""Random lives of a shadow engine, and the one request at a time that tests make of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE, VOCABULARY, Image
from tests.support.doubles.shadow_worker import Faults

CHUNK = 2 * BLOCK_SIZE
PRODUCED = {"do_remote_decode": True}
CONSUMED = {"do_remote_prefill": True}
_IMAGES = {"cat": 3, "dog": 20, "owl": 20}  # content: how many tokens it takes
_MOST_AT_ONCE = 8


def prompt(seed: int, length: int) -> list[int]:
    # 7 stops generation; prompts may hold it.
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def calm(model: Path, shape: Shape) -> ShadowEngine:
    """Each job is done in the step that has it planned."""
    return ShadowEngine(model, shape, 0, Faults(slow=0.0))


def serve(engine: ShadowEngine, tokens: list[int], max_tokens: int = 1, **of_request: Any) -> int:
    """One request after vLLM has forgotten its own prefix cache: how many tokens are loaded."""
    engine.forget_prefixes()
    before = engine.adapter.tally.totals.total("hit_tokens")
    request_id = engine.add(tokens, max_tokens, **of_request)
    engine.run_until_idle()
    engine.check_answer(request_id)
    engine.check_whole()
    return int(engine.adapter.tally.totals.total("hit_tokens") - before)


def filled_engine(model: Path, seed: int) -> ShadowEngine:
    """Another instance that has put all kinds of chunks into Redis."""
    engine = ShadowEngine(model, Shape(role="kv_producer"), seed)
    for shared in range(2):
        for own in range(2):
            engine.add(prompt(shared, 3 * CHUNK) + prompt(own, 2 * CHUNK), 1)
    engine.run_until_idle()
    return engine


class Life:
    """Requests that share prefixes come, are aborted and end; memory, vLLM and the weights change.

    ``is_full``: they have adapters, images and hand-overs too, and there is another connector that
    may lie. Answers are then not looked at.
    """

    def __init__(
        self, engine: ShadowEngine, chance: random.Random, *, is_full: bool = False
    ) -> None:
        self.engine = engine
        self.chance = chance
        self.is_full = is_full
        self.aborted: set[str] = set()
        self.acts: dict[Callable[[], Any], int] = {
            self.add: 14,
            engine.step: 60,
            self.abort: 5,
            self.evict: 4,
            self.next_turn: 8,
            self.forget: 4,
            self.reset: 1,
        }
        if is_full:
            self.acts |= {self.reload_adapter: 3, engine.sleep: 1}

    def live(self, num_acts: int) -> None:
        acts, weights = list(self.acts), list(self.acts.values())
        for _ in range(num_acts):
            self.chance.choices(acts, weights)[0]()
        self.rest()

    def rest(self) -> None:
        self.engine.run_until_idle()
        self.engine.add([1], 1)  # what was cancelled is reported
        self.engine.run_until_idle()
        self.engine.check_whole()
        for request_id in () if self.is_full else self.engine.requests.keys() - self.aborted:
            self.engine.check_answer(request_id)

    def add(self) -> None:
        size, chance = self.engine.shape.chunk_size, self.chance
        shared = prompt(chance.randrange(2), chance.choice([0, size + 5, 3 * size]))
        own = chance.choice([1, 5, size - 1, size, size + 1, 2 * size])
        tokens = shared + prompt(chance.randrange(2), own)
        salt, many = chance.choice([None, None, None, "tenant"]), chance.choice([1, 1, 3])
        for _ in range(1 if self.is_full else many):
            self._add(tokens, chance.choice([1, 1, 3, size, 2 * size]), salt)

    def next_turn(self) -> None:
        """The whole of an earlier request, and a little more."""
        done = [r for r in self.engine.requests.values() if r.is_finished() and r.num_tokens < 200]
        if done:
            before = self.chance.choice(done[-4:])
            salt = None if self.is_full else before.cache_salt
            self._add([*before.all_token_ids, *prompt(self.chance.randrange(9), 9)], 4, salt)

    def _add(self, tokens: list[int], max_tokens: int, salt: str | None) -> None:
        if len(self.engine.live) <= _MOST_AT_ONCE:
            more = self._of_request(len(tokens)) if self.is_full else {}
            self.engine.add(tokens, max_tokens, salt, **more)

    def _of_request(self, num_tokens: int) -> dict[str, Any]:
        chance = self.chance
        return {
            "adapter": chance.choice([None, None, "lora-a", "lora-b"]),
            "images": self._images(num_tokens),
            "offer": self._offer(num_tokens),
            "sends": chance.random() < 0.2,
            "bypasses": chance.random() < 0.15,
            "transfer": chance.choice([None, None, PRODUCED, CONSUMED, PRODUCED | CONSUMED]),
        }

    def _images(self, num_tokens: int) -> list[Image]:
        """The client names them, and uses few names."""
        if self.chance.random() < 0.6 or num_tokens < 30:
            return []
        start = self.chance.choice([0, num_tokens // 2])
        name, content = self.chance.choice("ab"), self.chance.choice(list(_IMAGES))
        return [Image(name, content, start, start + _IMAGES[content])]

    def _offer(self, num_tokens: int) -> Offer | None:
        blocks = (num_tokens - 1) // BLOCK_SIZE
        if self.chance.random() < 0.5 or not blocks:
            return None
        offered = self.chance.randint(1, blocks) * BLOCK_SIZE
        return Offer(offered, self.chance.random() < 0.6, self.chance.choice(list(Arrival)))

    def abort(self) -> None:
        if self.engine.live:
            loading = [r for r in self.engine.live if self.engine.is_loading(r)]
            victim = self.chance.choice(loading or self.engine.live)
            self.aborted.add(victim)
            self.engine.abort(victim)

    def evict(self) -> None:
        for rank in self.engine.ranks:
            rank.evict(self.chance.randrange(4), unannounced=0.3)

    def forget(self) -> None:
        """vLLM's own prefix cache is emptied, as far as no request runs, and ours is not."""
        if not self.is_full:
            self.engine.run_until_idle()
        self.engine.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """The weights change with about half of them."""
        if self.engine.shape.role != "kv_consumer":  # it would never hit again what others stored
            new_weights = self.chance.random() < 0.5
            self.engine.reset(preempt=self.chance.random() < 0.5, new_weights=new_weights)

    def reload_adapter(self) -> None:
        """Other weights under the same name and path. Nobody is computing with the old ones."""
        name = self.chance.choice(list(self.engine.adapters))
        if not any(self.engine.uses(request_id, name) for request_id in self.engine.live):
            self.engine.adapters[name] += 1
