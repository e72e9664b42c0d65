"""The value format: what is sealed comes back, anything else is named for what it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.storage import chunk_codec as codec
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    Sealer,
    ValueHeader,
    check_header,
    check_value,
    decode_header,
    encode_header,
    stripe_header,
)
from lmcache_connector.storage.geometry import ChunkGeometry

KEY = bytes(range(32))
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
        key=draw(st.binary(min_size=32, max_size=32)),
    )


@given(headers())
def test_a_header_survives_its_bytes(header: ValueHeader) -> None:
    raw = header.pack() + bytes(32)
    assert decode_header(raw) == header
    check_header(raw, header)


@given(headers(), headers())
def test_a_header_passes_for_itself_only(one: ValueHeader, other: ValueHeader) -> None:
    raw = one.pack() + bytes(32)
    if one == other:
        check_header(raw, other)
    else:
        with pytest.raises(InvalidValueError):
            check_header(raw, other)


@given(st.binary(max_size=256))
def test_hostile_bytes_only_ever_raise_the_codecs_own_errors(raw: bytes) -> None:
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
    with pytest.raises(InvalidValueError) as error:
        check_value(raw, changed, header, sealer)
    assert error.value.reason == ("forged_tag" if keyed else "bad_checksum")


def replace(header: ValueHeader, **changes: object) -> ValueHeader:
    fields = {name: getattr(header, name) for name in ValueHeader.__slots__}
    return ValueHeader(**(fields | changes))


def patched(offset: int, data: bytes) -> bytes:
    raw = bytearray(encode_header(HEADER, PAYLOAD, Sealer()))
    raw[offset : offset + len(data)] = data
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", codec.TruncatedHeaderError),
        (patched(0, b"")[:-1], codec.TruncatedHeaderError),
        (patched(0, b"LMCX"), codec.BadMagicError),
        (patched(4, b"\x02"), codec.UnknownVersionError),
        (patched(6, b"\x81"), codec.BadHeaderLengthError),
        (patched(0, b"") + b"\0", codec.BadHeaderLengthError),
        (patched(8, b"\xff"), codec.UnknownDtypeError),
        (patched(10, b"\x02"), codec.BadFlagsError),
        (patched(80, b"\x01"), codec.BadFlagsError),
        (patched(36, b"\xff" * 8), codec.OversizedPayloadError),
        (patched(16, b"\x01"), codec.ImpossibleRangeError),
        (patched(20, b"\xff"), codec.ImpossibleRangeError),
        (patched(28, b"\0\0\0\0"), codec.ImpossibleRangeError),
        (patched(8, b"\x02"), codec.ForeignDtypeError),
        (patched(12, b"\x01"), codec.ForeignLayersError),
        (patched(16, b"\x05"), codec.ForeignLayersError),
        (patched(20, b"\x02"), codec.ForeignShardError),
        (patched(24, b"\x09"), codec.ForeignShardError),
        (patched(28, b"\x09"), codec.ForeignTokensError),
        (patched(32, b"\x41"), codec.ForeignWidthError),
        (patched(36, b"\x01\x05"), codec.ForeignLengthError),
        (patched(44, b"\xff"), codec.ForeignKeyError),
        (patched(10, b"\x01"), codec.ForeignSealError),
        (patched(96, b"\xde\xad\xbe\xef"), codec.BadChecksumError),
        (patched(127, b"\x01"), codec.BadChecksumError),
    ],
)
def test_each_way_to_be_invalid_has_its_name(raw: bytes, error: type[InvalidValueError]) -> None:
    with pytest.raises(error):
        check_value(raw, PAYLOAD, HEADER, Sealer())


def test_every_reason_is_a_counter_of_its_own() -> None:
    reasons = [error.reason for error in InvalidValueError.__subclasses__()]
    assert len(set(reasons)) == len(reasons)
    assert InvalidValueError.reason not in reasons


def test_another_secret_seals_nothing() -> None:
    header = replace(HEADER, keyed=True)
    raw = encode_header(header, PAYLOAD, Sealer(SECRET))
    with pytest.raises(codec.ForgedTagError):
        check_value(raw, PAYLOAD, header, Sealer(b"another secret!!"))


def test_a_value_replayed_under_another_key_is_foreign() -> None:
    header = replace(HEADER, keyed=True)
    raw = encode_header(header, PAYLOAD, Sealer(SECRET))
    with pytest.raises(codec.ForeignKeyError):
        check_value(raw, PAYLOAD, replace(header, key=bytes(32)), Sealer(SECRET))


def test_the_format_is_the_one_that_is_written_down() -> None:
    """A golden value: changing it strands everything ever stored."""
    raw = encode_header(HEADER, PAYLOAD, Sealer())
    assert raw[:44].hex() == (
        "4c4d4356" "0100" "8000" "0100" "0000"
        "02000000" "04000000" "01000000" "08000000" "08000000" "40000000" "0004000000000000"
    )  # fmt: skip
    assert raw[44:76] == KEY
    assert raw[76:96] == bytes(20)
    assert raw[96:].hex() == "37523cdc6c6c8cec" + "00" * 24


def test_stripes_of_unequal_layers_have_no_one_width() -> None:
    geometry = ChunkGeometry(8, 0, (64, 64, 32), (3,), 4, "float16")
    (stripe,) = geometry.stripes(1 << 20)
    header = stripe_header(geometry, stripe, KEY, keyed=False)
    assert header.content_width == 0
    assert header.payload_bytes == 8 * (64 + 64 + 32)
    first, second = geometry.stripes(8 * 64 * 2)
    assert stripe_header(geometry, first, KEY, keyed=False).content_width == 64
    assert stripe_header(geometry, second, KEY, keyed=False).content_width == 32
    assert (first.shard, second.layer_start, second.layer_end) == (3, 2, 3)


def test_callers_bugs_raise() -> None:
    with pytest.raises(ValueError, match="dtype"):
        replace(HEADER, dtype="int3").pack()
    with pytest.raises(ValueError, match="32 bytes"):
        replace(HEADER, key=b"short").pack()
    with pytest.raises(ValueError, match="payload"):
        encode_header(HEADER, PAYLOAD[:-1], Sealer())
    with pytest.raises(ValueError, match="16 bytes"):
        Sealer(b"short")
