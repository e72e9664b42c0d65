"""Realistic load as traces: prompts, their order, and their times.

A prompt is a list of *pieces* of ``PIECE_TOKENS`` tokens, each with a number: equal numbers mean
equal tokens, so shared prefixes are shared numbers. Published traces have this format, and vLLM's
own client replays it (``--dataset-name timed_trace``). Piece numbers of one workload begin at
``first_piece``, so that two runs share nothing by accident.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

PIECE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt, and the number of tokens of its answer."""

    pieces: tuple[int, ...]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.pieces) * PIECE_TOKENS


def prefixes(rng: random.Random, first_piece: int) -> list[Ask]:
    """Twelve system prompts of 2,048 tokens, each before three inputs of 256, in any order."""
    return _thrice_each(rng, first_piece, number=12, shared=32, own=4)


def documents(rng: random.Random, first_piece: int) -> list[Ask]:
    """Eight documents of 4,096 tokens, three questions of 64 about each, in any order."""
    return _thrice_each(rng, first_piece, number=8, shared=64, own=1)


def chat(rng: random.Random, first_piece: int) -> list[Ask]:
    """Twelve conversations of three turns on one system prompt of 512 tokens.

    Each begins with 1,024 tokens and grows by 320 a turn: a question and the recorded answer. Turns
    of a conversation stay in order, between those of others.
    """
    pieces = count(first_piece)
    system = _take(pieces, 8)
    conversations = []
    for _ in range(12):
        said = system + _take(pieces, 16)
        turns = []
        for _ in range(3):
            said += _take(pieces, 5)
            turns.append(Ask(said, 32))
        conversations.append(turns)
    return list(_merge(rng, conversations))


WORKLOADS: dict[str, Callable[[random.Random, int], list[Ask]]] = {
    "prefixes": prefixes,
    "chat": chat,
    "documents": documents,
}


def working_set_tokens(asks: Sequence[Ask]) -> int:
    """Tokens of all prompts; shared ones count once."""
    return PIECE_TOKENS * len({piece for ask in asks for piece in ask.pieces})


def repeated_tokens(asks: Sequence[Ask]) -> int:
    """Prompt tokens that an earlier prompt began with: the hits of an unbounded cache."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for ask in asks:
        beginnings = [ask.pieces[:end] for end in range(1, len(ask.pieces) + 1)]
        repeated += sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)
    return repeated * PIECE_TOKENS


def trace_lines(rng: random.Random, asks: Sequence[Ask], per_second: float) -> str:
    """The trace as lines of JSON. Arrivals are a Poisson process; the first is at once."""
    lines, at = [], 0.0
    for ask in asks:
        line = {
            "timestamp": round(at, 4),
            "input_length": ask.num_tokens,
            "output_length": ask.output_tokens,
            "hash_ids": list(ask.pieces),
        }
        lines.append(json.dumps(line))
        at += rng.expovariate(per_second)
    return "\n".join(lines) + "\n"


def _thrice_each(
    rng: random.Random, first_piece: int, *, number: int, shared: int, own: int
) -> list[Ask]:
    """Three requests on each of ``number`` prefixes of ``shared`` pieces, with ``own`` pieces after
    it."""
    pieces = count(first_piece)
    asks = []
    for _ in range(number):
        prefix = _take(pieces, shared)
        asks += [Ask(prefix + _take(pieces, own), 16) for _ in range(3)]
    rng.shuffle(asks)
    return asks


def _take(pieces: Iterator[int], number: int) -> tuple[int, ...]:
    return tuple(next(pieces) for _ in range(number))


def _merge(rng: random.Random, sequences: list[list[Ask]]) -> Iterator[Ask]:
    left = [list(reversed(sequence)) for sequence in sequences]
    while left:
        one = rng.choice(left)
        yield one.pop()
        if not one:
            left.remove(one)
