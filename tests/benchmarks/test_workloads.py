"""The traces are what they say: shared prefixes, turns in order, more than the cache holds."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.harness.workloads import (
    PIECE_TOKENS,
    WORKLOADS,
    Ask,
    chat,
    repeated_tokens,
    trace_lines,
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


def test_repeated_tokens_are_prefixes_only() -> None:
    asks = [Ask((1, 2, 3), 1), Ask((1, 2, 4), 1), Ask((5, 2, 3), 1)]
    assert repeated_tokens(asks) == 2 * PIECE_TOKENS


def test_arrivals_come_at_the_rate_asked_for() -> None:
    asks = [Ask((1, 2), 7)] * 4000
    lines = [json.loads(line) for line in trace_lines(random.Random(0), asks, 8.0).splitlines()]
    assert lines[0] == {
        "timestamp": 0.0,
        "input_length": 2 * PIECE_TOKENS,
        "output_length": 7,
        "hash_ids": [1, 2],
    }
    assert lines[-1]["timestamp"] == pytest.approx(4000 / 8.0, rel=0.1)
