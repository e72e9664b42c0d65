"""Compressed payloads decompress bit for bit; malformed blosc2 chunks never reach blosc2."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import blosc2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.storage.chunk_codec import DTYPE_CODES, InvalidValueError, ValueFault
from lmcache_connector.storage.compression import compress, decompress
from tests.support.redis.chunks import bfloat16_bytes

PAYLOAD = bfloat16_bytes(1, 48 << 10)


def chunk_of(payload: bytes = PAYLOAD) -> bytes:
    chunk = compress(payload, "bfloat16")
    assert chunk is not None
    return chunk


def unpacked(chunk: bytes, num_bytes: int = len(PAYLOAD), dtype: str = "bfloat16") -> bytes:
    payload = bytearray(num_bytes)
    decompress(memoryview(chunk), memoryview(payload), dtype)
    return bytes(payload)


@given(st.integers(0, 99), st.integers(600, 40_000), st.sampled_from(sorted(DTYPE_CODES)))
def test_a_payload_survives_compression(seed: int, num_bytes: int, dtype: str) -> None:
    payload = bfloat16_bytes(seed, num_bytes)
    chunk = compress(payload, dtype)
    if chunk is not None:
        assert len(chunk) < num_bytes
        assert unpacked(chunk, num_bytes, dtype) == payload


@pytest.mark.parametrize(
    "payload", [random.Random(1).randbytes(4096), bytes(4096), b"x", PAYLOAD[:30]]
)
def test_incompressible_data_stays_as_it_is(payload: bytes) -> None:
    """Zeros count as such: blosc2 makes of them a kind of chunk that readers refuse."""
    assert compress(payload, "bfloat16") is None


def test_compression_releases_the_gil() -> None:
    blosc2.set_releasegil(False)
    chunk = chunk_of()
    assert blosc2.set_releasegil(False)
    unpacked(chunk)
    assert blosc2.set_releasegil(False)


def patched(offset: int, data: bytes) -> bytes:
    chunk = bytearray(chunk_of())
    chunk[offset : offset + len(data)] = data
    return bytes(chunk)


def i32(number: int) -> bytes:
    return struct.pack("<i", number)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a header alone": lambda: chunk_of()[:32],
    "cut in the middle": lambda: chunk_of()[:2000],
    "longer than it says": lambda: chunk_of() + b"\0",
    "a larger payload": lambda: patched(4, i32(1 << 30)),
    "a smaller payload": lambda: patched(4, i32(len(PAYLOAD) - 2)),
    "a negative payload": lambda: patched(4, i32(-1)),
    "blocks of nothing": lambda: patched(8, i32(0)),
    "blocks larger than all": lambda: patched(8, i32(1 << 29)),
    "another size of its own": lambda: patched(12, i32(1 << 30)),
    "another format": lambda: patched(0, b"\6"),
    "another format of zstd": lambda: patched(1, b"\2"),
    "not compressed": lambda: patched(2, b"\x87"),
    "zlib": lambda: patched(2, b"\x65"),
    "items of three bytes": lambda: patched(3, b"\3"),
    "one more filter": lambda: patched(17, b"\2"),
    "a filter's option": lambda: patched(24, b"\1"),
    "zeros without a body": lambda: patched(31, b"\x10"),
    "a dictionary": lambda: patched(31, b"\1"),
    "of a file": lambda: patched(31, b"\x08"),
    "blocks of any length": lambda: patched(30, b"\1"),
    "another codec": lambda: patched(22, b"\1"),
    "a codec of a plugin": lambda: patched(22, b"\x24"),
    "a codec of a user": lambda: patched(22, b"\xff"),
}


@pytest.mark.parametrize("chunk", HOSTILE.values(), ids=HOSTILE)
def test_odd_chunks_never_reach_blosc2(
    chunk: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = chunk()
    monkeypatch.setattr(blosc2, "decompress2", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(InvalidValueError) as error:
        unpacked(raw)
    assert error.value.fault is ValueFault.BAD_COMPRESSION


def test_a_spoiled_body_writes_nothing_past_the_payload() -> None:
    """A right header may stand before any body: a checksum without a secret can be forged. blosc2
    writes nothing outside of the payload, and reports one that it did not fill."""
    chance, chunk = random.Random(1), chunk_of()
    faults = 0
    for _ in range(3000):
        spoiled = bytearray(chunk)
        for _ in range(chance.choice([1, 1, 2, 8, 200])):
            at = chance.randrange(32, chance.choice([64, len(chunk)]))
            spoiled[at] = chance.randrange(256)
        if chance.random() < 0.2:
            block = chance.choice([1, 2, 31, 512, 1000, 16384, len(PAYLOAD)])
            spoiled[8:12] = i32(block)
        frame = bytearray(b"\xa5" * (len(PAYLOAD) + 128))
        place = memoryview(frame)[64:-64]
        try:
            decompress(memoryview(bytes(spoiled)), place, "bfloat16")
        except InvalidValueError as error:
            faults += error.fault is ValueFault.BAD_COMPRESSION
        assert frame[:64] == frame[-64:] == b"\xa5" * 64
    assert faults > 300
