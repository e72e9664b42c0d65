"""Which LoRA adapters vLLM's workers have in memory, as the ranks report it.

vLLM reads an adapter's files when it first meets its number, keeps what it read, and may drop it
and read the files again. What a request is computed with is therefore not what lies on the disk,
but what every rank has loaded. Runs on the scheduler's thread.
"""

from __future__ import annotations

from collections import OrderedDict

from lmcache_connector.plans import AdapterRef, LoadedAdapterList

_MAX_EXPECTED = 4096


class LoadedAdapters:
    """``world_size``: how many ranks report."""

    def __init__(self, world_size: int) -> None:
        self._lists: dict[int, LoadedAdapterList] = {}
        self._world_size = world_size
        self._expected: OrderedDict[int, AdapterRef] = OrderedDict()  # by number
        self._last_question = 0
        self._planned_question = 0

    def ask(self) -> int:
        """Have all ranks list their adapters. Returns the question's number."""
        if self._last_question == self._planned_question:
            self._last_question += 1
        return self._last_question

    def take_question(self) -> int:
        """The question that goes with the next plan; 0: none."""
        if self._last_question == self._planned_question:
            return 0
        self._planned_question = self._last_question
        return self._last_question

    def expect(self, adapter: AdapterRef) -> None:
        """A request is taken to be computed with it."""
        self._expected[adapter.number] = adapter
        self._expected.move_to_end(adapter.number)
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def update(self, rank: int, adapters: LoadedAdapterList) -> bool:
        """True: it has loaded another adapter than the one expected under its number."""
        self._lists[rank] = adapters
        wrong = [
            number
            for number, digest in adapters.digests
            if number in self._expected and self._expected[number].digest != digest
        ]
        for number in wrong:
            del self._expected[number]
        return bool(wrong)

    def have_answered(self, question: int) -> bool:
        """Whether every rank has listed its adapters after it was asked."""
        return len(self._lists) == self._world_size and all(
            listed.question >= question for listed in self._lists.values()
        )

    @property
    def are_watched(self) -> bool:
        """Whether all ranks can see what vLLM loads."""
        return all(listed.is_watched for listed in self._lists.values())

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
