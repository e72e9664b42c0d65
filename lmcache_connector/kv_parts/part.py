"""The parts of a model's KV: layers that need the same earlier tokens to compute the next one.

To compute token E, full attention needs the KV of all tokens before E, a sliding window that of the
last few, and a recurrent state one snapshot at E. vLLM splits such layers into KV cache groups as
it suits its memory; a *part* is all layers of one rule and one shape, whatever groups they are in,
so instances that group layers differently share chunks.

A chunk is stored part by part, each under a key of its own. A hit ends where the tiers have the
needed chunks of every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MAX_PARTS = 256
"""With several parts, a key's last byte is the number of its part."""


BlockIds = tuple[tuple[int, ...], ...]
BlockTables = Sequence[Sequence[int]]
"""Block ids per KV cache group, and the same as vLLM gives them."""


class Rule(Enum):
    """Which earlier tokens' KV a part needs to compute token E."""

    PREFIX = "prefix"
    """All of them."""
    WINDOW = "window"
    """The last ``span - 1``."""
    CHUNKED = "chunked"
    """Those from the last multiple of ``span`` on."""
    STATE = "state"
    """None, but the state's snapshot at E."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part. ``groups``: KV cache groups of its layers. ``span`` (0 if the rule has none) and
    ``block_size`` are in tokens; a state's block holds one snapshot."""

    rule: Rule
    groups: tuple[int, ...]
    block_size: int
    span: int = 0

    def first_needed(self, end: int) -> int:
        """The first token whose KV is needed to compute token ``end``; ``end`` if none is. A state
        needs the block of the token before, which holds its snapshot."""
        if self.rule is Rule.PREFIX:
            return 0
        if self.rule is Rule.WINDOW:
            return max(0, end - self.span + 1)
        if self.rule is Rule.CHUNKED:
            return end // self.span * self.span
        return max(0, end - 1)


def part_key(chunk_key: bytes, part: int, num_parts: int) -> bytes:
    """The key of part number ``part`` of a chunk: with one part the chunk key; with several, the
    chunk key with the part's number as last byte."""
    if num_parts == 1:
        return chunk_key
    return chunk_key[:-1] + bytes((part,))


def keys_of_part(chunk_keys: Sequence[bytes], part: int, num_parts: int) -> Sequence[bytes]:
    """:func:`part_key` of each chunk key."""
    if num_parts == 1:
        return chunk_keys
    return [part_key(key, part, num_parts) for key in chunk_keys]


def parents_of_part(
    parts: Sequence[Part],
    part: int,
    chunk_keys: Sequence[bytes],
    chunks: Sequence[int],
    keys: Sequence[bytes],
    num_owners: int = 1,
) -> tuple[bytes, ...]:
    """For each of ``chunks``, this part's key of the last chunk before it with the same owner, or
    ``b""``. ``chunk_keys``: all keys of the request; ``keys``: those of ``chunks``. An empty tuple
    for parts whose chunks are usable alone."""
    if parts[part].rule is not Rule.PREFIX:
        return ()
    found, num_parts = list[bytes](), len(parts)
    for chunk, key in zip(chunks, keys, strict=True):
        before, own = chunk - 1, turn(key, num_owners)
        while before >= 0 and turn(chunk_keys[before], num_owners) != own:
            before -= 1
        found.append(part_key(chunk_keys[before], part, num_parts) if before >= 0 else b"")
    return tuple(found)


def turn(key: bytes, num_owners: int) -> int:
    """Which of ``num_owners`` owns the chunk; the same for all its parts."""
    return int.from_bytes(key[:4], "little") % num_owners if num_owners > 1 else 0


def part_of(key: bytes, num_parts: int) -> int:
    """The part that a key from :func:`part_key` names."""
    return key[-1] if num_parts > 1 else 0
