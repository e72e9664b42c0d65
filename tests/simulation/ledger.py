"""What each chunk key of a world must hold, and whether Redis holds that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import blosc2

from lmcache_connector.storage.redis.value_names import parse_value_name
from tests.simulation.faults import Deployment
from tests.simulation.kernel import SimulationFailure
from tests.simulation.kv_memory import cells_of, payload
from tests.simulation.rank import CHUNK_SIZE, WIDTH
from tests.simulation.redis_model import Entry, RedisModel

_HEADER_BYTES = 128


def _content(value: bytes) -> bytes:
    """What a value holds, compressed or not; nothing if a fault has damaged what was compressed."""
    stored, compressed = value[_HEADER_BYTES:], int.from_bytes(value[76:84], "little")
    if not compressed:
        return stored
    try:
        return bytes(blosc2.decompress2(stored)) if len(stored) == compressed else b""
    except (RuntimeError, ValueError):
        return b""


class Ledger:
    """Instances tell ``name`` what they plan to store or load; see `kv_memory` for cells."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._cells_of_key: dict[bytes, tuple[int, ...]] = {}
        self._common: set[bytes] = set()

    def name(self, key: bytes, cells: tuple[int, ...], *, is_common: bool) -> None:
        """``is_common``: whoever asks for a prompt without a salt asks for this chunk."""
        if is_common:
            self._common.add(key)
        if self._cells_of_key.setdefault(key, cells) != cells:
            raise SimulationFailure("WRONG BYTES: one key names two different chunks")

    def keys_of(self, prompt: Sequence[int]) -> set[bytes]:
        """Of the common chunks of a prompt."""
        cells = cells_of(prompt)
        return {
            key
            for key in self._common
            if (held := self._cells_of_key[key])[-1] in cells and len(held) == CHUNK_SIZE
        }

    def keys_in_redis(self) -> set[bytes]:
        return {key for _, _, key in self._values()}

    def values_of(self, keys: Collection[bytes]) -> list[tuple[RedisModel, bytes]]:
        """Where values of these chunks lie, and their names there."""
        return [(server, name) for server, name, key in self._values() if key in keys]

    def is_right(self, name: bytes, entry: Entry) -> bool:
        """Whether that is the value of its name, byte for byte. Unknown chunks count as right."""
        parsed = parse_value_name(name)
        cells = self._cells_of_key.get(parsed.key) if parsed is not None else None
        if parsed is None or cells is None:
            return True
        layers = range(parsed.layer_start, parsed.layer_end)
        by_layer = (payload(cells, range(i, i + 1), parsed.shard, WIDTH) for i in layers)
        # A tail fills a chunk up with zeros.
        right = b"".join(each.ljust(CHUNK_SIZE * WIDTH, b"\0") for each in by_layer)
        return entry.kind == b"string" and _content(entry.value) == right

    def check(self, *, have_ttl: bool) -> int:
        """How many values are right. Raises if one is wrong that no fault has damaged, or stays for
        ever although all ``have_ttl``."""
        count = 0
        for server, name, key in self._values():
            entry = server.entries[name]
            if self._deployment.damaged.get(name) == entry.value:
                continue
            if not self.is_right(name, entry):
                raise SimulationFailure(f"WRONG BYTES stored as {name!r}")
            if have_ttl and entry.expires_at is None:
                raise SimulationFailure(f"TTL: {name!r} has none")
            count += key in self._cells_of_key
        return count

    def _values(self) -> Iterator[tuple[RedisModel, bytes, bytes]]:
        for server in self._deployment.servers:
            for name in server.names():
                parsed = parse_value_name(name)
                if parsed is not None:
                    yield server, name, parsed.key
