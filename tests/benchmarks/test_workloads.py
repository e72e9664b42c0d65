"""The traces are what they say: shared prefixes, turns in order, more than the cache holds."""

from __future__ import annotations

import random

import pytest

from benchmarks.harness.workloads import (
    WORKLOADS,
    chat,
    repeated_tokens,
    working_set_tokens,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_most_of_what_is_asked_was_asked_before(name: str) -> None:
    asks = WORKLOADS[name](random.Random(0), 100)
    total = sum(ask.num_tokens for ask in asks)
    assert working_set_tokens(asks) == total - repeated_tokens(asks)
    assert 0.5 < repeated_tokens(asks) / total < 0.95


@pytest.mark.parametrize("name", WORKLOADS)
def test_two_runs_share_nothing(name: str) -> None:
    first = {piece for ask in WORKLOADS[name](random.Random(0), 0) for piece in ask.pieces}
    second = {piece for ask in WORKLOADS[name](random.Random(0), 10_000) for piece in ask.pieces}
    assert max(first) < 10_000
    assert not first & second


def test_turns_of_a_conversation_stay_in_order() -> None:
    longest: dict[int, int] = {}
    for ask in chat(random.Random(1), 0):
        conversation = ask.pieces[8]  # the first piece after the system prompt
        assert longest.get(conversation, 0) < len(ask.pieces)
        longest[conversation] = len(ask.pieces)
    assert len(longest) == 12
