"""Which LoRA adapters vLLM's workers have in memory, as the ranks report it.

vLLM reads an adapter's files when it first meets its number, keeps what it read, and may drop it
and read the files again. What a request is computed with is therefore not what lies on the disk,
but what every rank has loaded. Runs on the scheduler's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lmcache_connector.plans import AdapterRef, LoadedAdapterList

_MAX_EXPECTED = 4096


class LoadedAdapters:
    """``world_size``: how many ranks report.

    ``heard``: the number of each rank's last list, in rank order; 0: none. ``question``: the one
    that goes with the next plan; 0: none.
    """

    def __init__(self, world_size: int) -> None:
        self.heard = (0,) * world_size
        self.question = 0
        self._lists: dict[int, LoadedAdapterList] = {}
        self._world_size = world_size
        self._expected: OrderedDict[int, AdapterRef] = OrderedDict()  # by number
        self._last_question = 0

    def ask(self) -> int:
        """Have all ranks list their adapters. Returns the question's number."""
        if not self.question:
            self._last_question += 1
            self.question = self._last_question
        return self.question

    def take_question(self) -> int:
        """The question, which goes with the plan being made."""
        question, self.question = self.question, 0
        return question

    def forget(self) -> None:
        """What the ranks have told may not have been understood: they are asked anew."""
        self._lists.clear()
        self._expected.clear()
        self.ask()

    def expect(self, adapter: AdapterRef) -> None:
        """A request is taken to be computed with it."""
        self._expected[adapter.number] = adapter
        self._expected.move_to_end(adapter.number)
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def update(self, rank: int, adapters: LoadedAdapterList) -> set[AdapterRef]:
        """Returns the adapters that were taken for what is loaded while another was: what has been
        computed under their names until now may be another's."""
        before = self._lists.get(rank)
        self._lists[rank] = adapters
        self.heard = (*self.heard[:rank], adapters.number, *self.heard[rank + 1 :])
        doubtful = set()
        for number, digest in adapters.digests:
            in_memory = [d for each, d in adapters.replaced if each == number]
            if before is not None and not in_memory:
                in_memory = [before.digest_of(number, default=digest)]
            in_memory.append(digest)
            expected = self._expected.get(number)
            names = {*in_memory, expected.digest if expected is not None else None}
            mistaken = {
                AdapterRef(number, d)
                for d in names
                if d and not is_current_and_unreplaced(d, in_memory)
            }
            if expected in mistaken:
                del self._expected[number]
            doubtful |= mistaken
        return doubtful

    def have_answered(self, question: int) -> bool:
        """Whether every rank has listed its adapters after it was asked."""
        return len(self._lists) == self._world_size and all(
            listed.question >= question for listed in self._lists.values()
        )

    def are(self, adapter: AdapterRef) -> bool:
        """Whether every rank has told that it has loaded this very adapter."""
        return len(self._lists) == self._world_size and all(
            listed.digest_of(adapter.number) == adapter.digest for listed in self._lists.values()
        )

    def have_loaded(self, number: int) -> bool:
        """Whether every rank has told that it has an adapter of that number."""
        return len(self._lists) == self._world_size and all(
            any(each == number for each, _ in listed.digests) for listed in self._lists.values()
        )

    def may_be(self, adapter: AdapterRef) -> bool:
        """Whether each rank has loaded this very adapter, or is yet to load one of its number."""
        return all(
            listed.digest_of(adapter.number, default=adapter.digest) == adapter.digest
            for listed in self._lists.values()
        )


def is_current_and_unreplaced(digest: str, in_memory: Sequence[str | None]) -> bool:
    """Whether it is what is in memory now, and nothing else was after it had come.

    ``in_memory``: names of what was, one after the other. If so, what was computed under its name
    is its own.
    """
    return digest in in_memory and all(
        each == digest for each in in_memory[in_memory.index(digest) :]
    )
