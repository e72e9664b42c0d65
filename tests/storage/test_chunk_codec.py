"""The value format: a sealed value decodes, and each fault has its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage import chunk_codec as codec
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    Buffer,
    InvalidValueError,
    Sealer,
    ValueFault,
    ValueHeader,
    check_header,
    check_value,
    decode_header,
    encode_header,
)

KEY = bytes(range(CHUNK_KEY_BYTES))
PAYLOAD = bytes(i % 251 for i in range(2 * 8 * 64))
HEADER = ValueHeader(
    dtype="bfloat16",
    keyed=False,
    layer_start=2,
    layer_end=4,
    shard=1,
    num_shards=8,
    num_tokens=8,
    content_width=64,
    payload_bytes=len(PAYLOAD),
    key=KEY,
)
SECRET = b"0123456789abcdef"

u32 = st.integers(0, 2**32 - 1)


def fault_of(raw: Buffer, payload: Buffer, expected: ValueHeader, sealer: Sealer) -> ValueFault:
    with pytest.raises(InvalidValueError) as error:
        check_value(raw, payload, expected, sealer)
    return error.value.fault


@st.composite
def headers(draw: st.DrawFn) -> ValueHeader:
    layer_start = draw(st.integers(0, 2**32 - 2))
    num_shards = draw(st.integers(1, 2**32 - 1))
    return ValueHeader(
        dtype=draw(st.sampled_from(sorted(codec.DTYPE_CODES))),
        keyed=draw(st.booleans()),
        layer_start=layer_start,
        layer_end=draw(st.integers(layer_start + 1, 2**32 - 1)),
        shard=draw(st.integers(0, num_shards - 1)),
        num_shards=num_shards,
        num_tokens=draw(st.integers(1, 2**32 - 1)),
        content_width=draw(u32),
        payload_bytes=draw(st.integers(1, codec.MAX_PAYLOAD_BYTES)),
        key=draw(st.binary(min_size=CHUNK_KEY_BYTES, max_size=CHUNK_KEY_BYTES)),
    )


@given(headers())
def test_a_header_is_unpacked_equal(header: ValueHeader) -> None:
    raw = header.pack() + bytes(32)
    assert decode_header(raw) == header
    check_header(raw, header)


@given(headers(), headers())
def test_a_header_matches_only_itself(one: ValueHeader, other: ValueHeader) -> None:
    raw = one.pack() + bytes(32)
    if one == other:
        check_header(raw, other)
    else:
        with pytest.raises(InvalidValueError):
            check_header(raw, other)


@given(st.binary(max_size=256))
def test_random_bytes_raise_the_codecs_own_error_only(raw: bytes) -> None:
    with pytest.raises(InvalidValueError):
        check_value(raw[:HEADER_BYTES], raw[HEADER_BYTES:], HEADER, Sealer())


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255), st.booleans())
def test_no_byte_of_a_header_can_change_unseen(position: int, change: int, keyed: bool) -> None:
    sealer = Sealer(SECRET if keyed else None)
    header = replace(HEADER, keyed=keyed)
    raw = bytearray(encode_header(header, PAYLOAD, sealer))
    check_value(raw, PAYLOAD, header, sealer)
    raw[position] ^= change
    with pytest.raises(InvalidValueError):
        check_value(raw, PAYLOAD, header, sealer)


@given(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 7), st.booleans())
def test_no_bit_of_a_payload_can_change_unseen(position: int, bit: int, keyed: bool) -> None:
    sealer = Sealer(SECRET if keyed else None)
    header = replace(HEADER, keyed=keyed)
    raw = encode_header(header, PAYLOAD, sealer)
    changed = bytearray(PAYLOAD)
    changed[position] ^= 1 << bit
    fault = ValueFault.FORGED_TAG if keyed else ValueFault.BAD_CHECKSUM
    assert fault_of(raw, changed, header, sealer) is fault


def replace(header: ValueHeader, **changes: object) -> ValueHeader:
    fields = {name: getattr(header, name) for name in ValueHeader.__slots__}
    return ValueHeader(**(fields | changes))


def patched(offset: int, data: bytes) -> bytes:
    raw = bytearray(encode_header(HEADER, PAYLOAD, Sealer()))
    raw[offset : offset + len(data)] = data
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", ValueFault.TRUNCATED_HEADER),
        (patched(0, b"")[:-1], ValueFault.TRUNCATED_HEADER),
        (patched(0, b"LMCX"), ValueFault.BAD_MAGIC),
        (patched(4, b"\x02"), ValueFault.UNKNOWN_VERSION),
        (patched(6, b"\x81"), ValueFault.BAD_HEADER_LENGTH),
        (patched(0, b"") + b"\0", ValueFault.BAD_HEADER_LENGTH),
        (patched(8, b"\xff"), ValueFault.UNKNOWN_DTYPE),
        (patched(10, b"\x02"), ValueFault.BAD_FLAGS),
        (patched(10, b"\x04"), ValueFault.BAD_FLAGS),
        (patched(76, b"\x80"), ValueFault.BAD_FLAGS),
        (patched(84, b"\x01"), ValueFault.BAD_FLAGS),
        (patched(80, b"\x01"), ValueFault.BAD_FLAGS),
        (patched(36, b"\xff" * 8), ValueFault.OVERSIZED_PAYLOAD),
        (patched(16, b"\x01"), ValueFault.IMPOSSIBLE_RANGE),
        (patched(20, b"\xff"), ValueFault.IMPOSSIBLE_RANGE),
        (patched(28, b"\0\0\0\0"), ValueFault.IMPOSSIBLE_RANGE),
        (patched(8, b"\x02"), ValueFault.FOREIGN),
        (patched(12, b"\x01"), ValueFault.FOREIGN),
        (patched(16, b"\x05"), ValueFault.FOREIGN),
        (patched(20, b"\x02"), ValueFault.FOREIGN),
        (patched(24, b"\x09"), ValueFault.FOREIGN),
        (patched(28, b"\x09"), ValueFault.FOREIGN),
        (patched(32, b"\x41"), ValueFault.FOREIGN),
        (patched(36, b"\x01\x05"), ValueFault.FOREIGN),
        (patched(44, b"\xff"), ValueFault.FOREIGN),
        (patched(10, b"\x01"), ValueFault.FOREIGN),
        (patched(96, b"\xde\xad\xbe\xef"), ValueFault.BAD_CHECKSUM),
        (patched(127, b"\x01"), ValueFault.BAD_CHECKSUM),
    ],
)
def test_each_fault_has_its_own_name(raw: bytes, fault: ValueFault) -> None:
    assert fault_of(raw, PAYLOAD, HEADER, Sealer()) is fault


def test_the_format_of_values_never_changes() -> None:
    """Golden bytes: with others, an instance takes all stored values for invalid."""
    raw = encode_header(HEADER, PAYLOAD, Sealer())
    assert raw[:44].hex() == (
        "4c4d4356" "0100" "8000" "0100" "0000"
        "02000000" "04000000" "01000000" "08000000" "08000000" "40000000" "0004000000000000"
    )  # fmt: skip
    assert raw[44:76] == KEY
    assert raw[76:96] == bytes(20)
    assert raw[96:].hex() == "37523cdc6c6c8cec" + "00" * 24
    keyed = encode_header(replace(HEADER, keyed=True), PAYLOAD, Sealer(SECRET))
    assert keyed[:96] == raw[:10] + b"\1" + raw[11:96]
    assert keyed[96:].hex() == "cb435420ebc87f19451525c8155bb301ba88c83e77325a3475d3334669d95ad2"


def test_misuse_raises() -> None:
    with pytest.raises(ValueError, match="dtype"):
        replace(HEADER, dtype="int3").pack()
    with pytest.raises(ValueError, match="32 bytes"):
        replace(HEADER, key=b"short").pack()
    with pytest.raises(ValueError, match="payload"):
        encode_header(HEADER, PAYLOAD[:-1], Sealer())
    with pytest.raises(ValueError, match="16 bytes"):
        Sealer(b"short")
