"""What must come back once faults are over: hits, and values that were lost or spoiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_connector.storage.redis.config import RedisTierConfig
from tests.simulation.faults import DamagedValues, Deployment
from tests.simulation.instance import Instance
from tests.simulation.kernel import Kernel, SimulationFailure
from tests.simulation.ledger import Ledger

_SECONDS = 90.0
_HEALING_SECONDS = 240.0
"""Long, because a read stops at the first spoiled chunk: each heals one at most."""
_SLOWNESS = 5.0
"""Loads must pay, or nobody reads what Redis holds, and what nobody reads is not healed."""
_FLOOD_SECONDS = 5.0
_WRITING_SECONDS = 2.0
_WRITTEN_SHARE = 0.8
"""Measured: 1.0 without a slow server; 0.92 and more beside one, with room for four chunks of each
node in the write queue; 0.24 and more (the bug) if all nodes share a lane."""

Tokens = tuple[int, ...]


@dataclass
class Recovery:
    """``ask(instance, prompt, max_tokens)`` waits for the answer. ``counts``: what came back."""

    kernel: Kernel
    deployment: Deployment
    ledger: Ledger
    ask: Callable[[Instance, Tokens, int], None]
    counts: Counter[str]

    def hits(self, reader: Instance, writer: Instance, prompt: Tokens) -> None:
        """``reader``, with nothing in memory, finds a prompt in Redis that ``writer`` is asked
        for too."""
        reader.slow_down(_SLOWNESS)
        before, attempts = reader.counts["hits from redis"], 0
        until = self._until(f"NO HIT of {reader.process.name} came back")
        while reader.counts["hits from redis"] == before:
            until()
            if attempts:
                self.kernel.sleep(1.0)
            self._ask_both(reader, writer, prompt)
            attempts += 1
        self.counts["attempts to hit"] += attempts

    def remove_unsound(self, prompt: Tokens) -> None:
        """As an operator does where no instance both loads and stores."""
        for server, name in self.ledger.values_of(self.ledger.keys_of(prompt)):
            entry = server.entries.get(name)  # a replica has its master's
            if entry is not None and entry.value == self.deployment.damaged.get(name):
                del server.entries[name]
                self.counts["removed as unsound"] += 1

    def offers(self, writer: Instance, prompt: Tokens) -> None:
        """What Redis has lost and one instance holds in memory comes back to Redis, although nobody
        computes it again."""
        self.ask(writer, prompt, 1)
        wanted = self.ledger.keys_of(prompt) & writer.keys_in_memory()
        self.counts["offered again"] += bool(wanted)
        for server in self.deployment.servers:
            server.entries.clear()
        pause, until = 0.5, self._until(f"NOT OFFERED AGAIN by {writer.process.name}")
        while wanted := wanted - self.ledger.keys_in_redis():  # some do not live long there
            until()
            self.ask(writer, prompt, 1)
            self.kernel.sleep(pause)
            pause = min(2 * pause, 4.0)

    def names(self, reader: Instance, writer: Instance, prompt: Tokens) -> None:
        """Whatever lies under names of the prompt's values is replaced by those values."""
        reader.slow_down(_SLOWNESS)
        keys, ledger = self.ledger.keys_of(prompt), self.ledger
        num_spoiled = DamagedValues(0.5).damage(self.deployment, ledger.values_of(keys))
        who = f"{reader.process.name} and {writer.process.name}"
        until = self._until(f"NOT HEALED by {who}", _HEALING_SECONDS)
        while not all(ledger.is_right(name, s.entries[name]) for s, name in ledger.values_of(keys)):
            until()
            self._ask_both(reader, writer, prompt)
            self.kernel.sleep(1.0)
        self.hits(reader, writer, prompt)
        self.counts["healed"] += num_spoiled

    def writes_go_on(self, writer: Instance) -> None:
        """While one server is slow, the others get the chunks that belong to them."""
        kernel, slow = self.kernel, self.deployment.slow
        kernel.sleep(RedisTierConfig.backoff_max_seconds)  # until it knows which servers are back
        start = kernel.now
        prompts, offered = list[Tokens](), set[bytes]()
        while kernel.now < start + _FLOOD_SECONDS:
            prompts.append(tuple(kernel.chance.randrange(60) for _ in range(160)))
            self.ask(writer, prompts[-1], 1)
            # What is in memory is to be written; a store whose blocks are needed anew is dropped.
            asked = map(self.ledger.keys_of, prompts[-2:])
            offered |= set[bytes]().union(*asked) & writer.keys_in_memory()
        kernel.sleep(_WRITING_SECONDS)
        theirs = {key for key in offered if self.deployment.owner_of(key) is not slow}
        share = len(theirs & self.ledger.keys_in_redis()) / max(1, len(theirs))
        kernel.trace(f"{share:.2f} of {len(theirs)} chunks written beside a slow server")
        if share < _WRITTEN_SHARE:
            raise SimulationFailure(
                f"WRITES STOPPED: {share:.0%} of {len(theirs)} chunks for healthy servers are there"
            )
        self.counts["written beside a slow server"] += len(theirs)

    def _ask_both(self, reader: Instance, writer: Instance, prompt: Tokens) -> None:
        if writer is not reader:
            self.ask(writer, prompt, 1)
        reader.evict_all()
        # Any step tells the scheduler side what has left.
        self.ask(reader, (1, 2, 3), 1)
        self.ask(reader, prompt, 2)

    def _until(self, what: str, seconds: float = _SECONDS) -> Callable[[], None]:
        """Returns a check to call again and again: it fails after ``seconds``."""
        end = self.kernel.now + seconds

        def check() -> None:
            if self.kernel.now > end:
                raise SimulationFailure(f"{what} within {seconds:g} s")

        return check
