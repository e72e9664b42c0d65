"""Block traces of real services: the blocks of each prompt, and its arrival time.

Two formats, by the file's name:

- ``.jsonl``, one request a line, as Mooncake publishes them: ``timestamp`` (ms) and ``hash_ids``,
  one for each block of 512 tokens. Equal ids mean equal prompts up to there.
- ``.tar.gz``, a file per session of a coding agent: ``block_size``, ``hash_id_scope`` (``local``:
  ids of two sessions are unrelated) and ``requests`` with ``t`` (s) and ``hash_ids``.

``.jsonl.gz`` and ``.tar`` are read, too.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class BlockTrace:
    """``requests`` in the order of time: seconds, and the numbers of the prompt's blocks, all below
    ``num_blocks``."""

    name: str
    block_tokens: int
    requests: list[tuple[float, list[int]]]
    num_blocks: int


def read_trace(path: Path) -> BlockTrace:
    """Raises ``ValueError`` for another file name."""
    name = path.name.split(".")[0]
    if path.name.endswith((".tar.gz", ".tar")):
        found = list(_sessions(path))
        sizes = {size for size, _, _ in found}
        if len(sizes) != 1:
            raise ValueError(f"{path}: sessions have blocks of {sorted(sizes)} tokens")
        return _numbered(name, sizes.pop(), [(at, blocks) for _, at, blocks in found])
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _numbered(name, _MOONCAKE_BLOCK_TOKENS, list(_lines(path)))
    raise ValueError(f"{path} is neither .jsonl nor .tar.gz")


def _lines(path: Path) -> Iterator[tuple[float, list[Any]]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            yield request["timestamp"] / 1000, request["hash_ids"]


def _sessions(path: Path) -> Iterator[tuple[int, float, list[Any]]]:
    with tarfile.open(path) as archive:
        for member in sorted((m for m in archive if m.isfile()), key=lambda m: m.name):
            file = archive.extractfile(member)
            assert file is not None
            session = json.load(file)
            scope = member.name if session.get("hash_id_scope") == "local" else ""
            for request in session["requests"]:
                blocks = [(scope, block) for block in request.get("hash_ids") or ()]
                if blocks:
                    yield session["block_size"], request["t"], blocks


def _numbered(name: str, block_tokens: int, requests: list[tuple[float, list[Any]]]) -> BlockTrace:
    numbers: dict[Any, int] = {}
    requests.sort(key=lambda request: request[0])
    found = [
        (at, [numbers.setdefault(block, len(numbers)) for block in blocks])
        for at, blocks in requests
    ]
    return BlockTrace(name, block_tokens, found, len(numbers))
