"""The bytes of one stored value: a fixed header that says what the payload is, then the payload.

Format v1, all integers little-endian::

    offset  size  field
         0     4  magic "LMCV"
         4     2  format version, 1
         6     2  header length, 128
         8     2  dtype code (see DTYPE_CODES)
        10     2  flags: bit 0 set when the seal is a keyed BLAKE3 tag
        12     4  first layer (global, canonical order)
        16     4  layer after the last
        20     4  KV head index
        24     4  KV heads in the model
        28     4  tokens
        32     4  content width: bytes of one token of one layer, 0 when layers differ
        36     8  payload length in bytes
        44    32  full chunk key
        76    20  reserved, zero
        96    32  seal over bytes 0..95 and the payload: xxh3-64 (little-endian, zero-padded),
                  or the 32-byte BLAKE3 tag keyed from ``hash_key``
       128        payload [layers][tokens][content], the KV cache's own bytes

Nothing here allocates by what a header claims: a reader knows what it expects and compares.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, fields
from typing import ClassVar

import xxhash
from blake3 import blake3

from lmcache_connector.storage.geometry import ChunkGeometry, Stripe

MAGIC = b"LMCV"
VERSION = 1
HEADER_BYTES = 128
KEY_BYTES = 32
# No stored value is ever larger; a header that claims more is refused before anything else.
MAX_PAYLOAD_BYTES = 64 << 20
DTYPE_CODES = {
    "bfloat16": 1,
    "float16": 2,
    "float32": 3,
    "uint8": 4,
    "int8": 5,
    "float8_e4m3fn": 6,
    "float8_e5m2": 7,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 9,
    "float64": 10,
}

_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_KEYED = 1
_FIELDS = struct.Struct("<4sHHHHIIIIIIQ32s20s")
_SEALED_BYTES = _FIELDS.size
_SEAL_BYTES = HEADER_BYTES - _SEALED_BYTES
_RESERVED = bytes(20)

Buffer = bytes | bytearray | memoryview


class InvalidValueError(ValueError):
    """A stored value is not what its reader expects. ``reason`` names the counter it goes to."""

    reason: ClassVar[str] = "invalid"


class TruncatedHeaderError(InvalidValueError):
    reason = "truncated_header"


class BadMagicError(InvalidValueError):
    reason = "bad_magic"


class UnknownVersionError(InvalidValueError):
    reason = "unknown_version"


class BadHeaderLengthError(InvalidValueError):
    reason = "bad_header_length"


class UnknownDtypeError(InvalidValueError):
    reason = "unknown_dtype"


class BadFlagsError(InvalidValueError):
    reason = "bad_flags"


class OversizedPayloadError(InvalidValueError):
    reason = "oversized_payload"


class ImpossibleRangeError(InvalidValueError):
    reason = "impossible_range"


class ForeignDtypeError(InvalidValueError):
    reason = "foreign_dtype"


class ForeignLayersError(InvalidValueError):
    reason = "foreign_layers"


class ForeignShardError(InvalidValueError):
    reason = "foreign_shard"


class ForeignTokensError(InvalidValueError):
    reason = "foreign_tokens"


class ForeignWidthError(InvalidValueError):
    reason = "foreign_width"


class ForeignLengthError(InvalidValueError):
    reason = "foreign_length"


class ForeignKeyError(InvalidValueError):
    reason = "foreign_key"


class ForeignSealError(InvalidValueError):
    """Keyed where an unkeyed value is expected, or the other way round."""

    reason = "foreign_seal"


class BadChecksumError(InvalidValueError):
    reason = "bad_checksum"


class ForgedTagError(InvalidValueError):
    reason = "forged_tag"


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """What a value says about itself, but for its seal. Sizes in bytes, layers in global order."""

    dtype: str
    keyed: bool
    layer_start: int
    layer_end: int
    shard: int
    num_shards: int
    num_tokens: int
    content_width: int
    payload_bytes: int
    key: bytes

    def pack(self) -> bytes:
        """The 96 sealed bytes. Raises ``ValueError`` on a dtype or key without a place in them."""
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"no format code for dtype {self.dtype!r}")
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a chunk key has {KEY_BYTES} bytes, not {len(self.key)}")
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            DTYPE_CODES[self.dtype],
            _KEYED if self.keyed else 0,
            self.layer_start,
            self.layer_end,
            self.shard,
            self.num_shards,
            self.num_tokens,
            self.content_width,
            self.payload_bytes,
            self.key,
            _RESERVED,
        )


def stripe_header(
    geometry: ChunkGeometry, stripe: Stripe, key: bytes, *, keyed: bool
) -> ValueHeader:
    """The header that the value of ``stripe`` of the chunk ``key`` must have."""
    first = stripe.layer_start - geometry.layer_start
    widths = set(geometry.layer_widths[first : stripe.layer_end - geometry.layer_start])
    return ValueHeader(
        dtype=geometry.dtype,
        keyed=keyed,
        layer_start=stripe.layer_start,
        layer_end=stripe.layer_end,
        shard=stripe.shard,
        num_shards=geometry.num_shards_total,
        num_tokens=geometry.num_tokens,
        content_width=widths.pop() if len(widths) == 1 else 0,
        payload_bytes=stripe.num_bytes,
        key=key,
    )


class Sealer:
    """Computes the seal. Both hashes release the GIL on payloads of more than a few KiB."""

    def __init__(self, hash_key: bytes | None = None) -> None:
        """``hash_key``: any secret of at least 16 bytes; the BLAKE3 key is derived from it, so
        that one secret can serve chunk keys and values without the two ever mixing."""
        self._key: bytes | None = None
        if hash_key is not None:
            if len(hash_key) < 16:
                raise ValueError("hash_key needs at least 16 bytes")
            context = "lmcache-connector 2026 chunk value v1"
            self._key = blake3(hash_key, derive_key_context=context).digest()

    @property
    def keyed(self) -> bool:
        return self._key is not None

    def seal(self, sealed: Buffer, payload: Buffer) -> bytes:
        """32 bytes over ``sealed`` (the 96 header bytes before the seal) and ``payload``."""
        if self._key is not None:
            tag = blake3(sealed, key=self._key)
            tag.update(payload)
            return tag.digest()
        checksum = xxhash.xxh3_64(sealed)
        checksum.update(payload)
        return int(checksum.intdigest()).to_bytes(_SEAL_BYTES, "little")


def encode_header(header: ValueHeader, payload: Buffer, sealer: Sealer) -> bytes:
    """The 128 bytes that go before ``payload``."""
    if len(payload) != header.payload_bytes:
        raise ValueError(f"payload has {len(payload)} bytes, not {header.payload_bytes}")
    if header.keyed != sealer.keyed:
        raise ValueError("header and sealer disagree on keyed or not")
    sealed = header.pack()
    return sealed + sealer.seal(sealed, payload)


def decode_header(raw: Buffer) -> ValueHeader:
    """Read a header from any bytes; raises the `InvalidValueError` that names the first fault."""
    if len(raw) < HEADER_BYTES:
        raise TruncatedHeaderError(f"{len(raw)} bytes, a header has {HEADER_BYTES}")
    (magic, version, length, dtype_code, flags, *numbers, key, reserved) = _FIELDS.unpack_from(raw)
    layer_start, layer_end, shard, num_shards, tokens, width, payload_bytes = numbers
    if magic != MAGIC:
        raise BadMagicError(f"magic is {magic!r}")
    if version != VERSION:
        raise UnknownVersionError(f"version {version}")
    if length != HEADER_BYTES:
        raise BadHeaderLengthError(f"header length {length}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise OversizedPayloadError(f"payload length {payload_bytes}")
    if dtype_code not in _DTYPE_NAMES:
        raise UnknownDtypeError(f"dtype code {dtype_code}")
    if flags & ~_KEYED or reserved != _RESERVED:
        raise BadFlagsError(f"flags {flags:#x}, reserved {reserved.hex()}")
    if layer_end <= layer_start or shard >= num_shards or tokens == 0 or payload_bytes == 0:
        raise ImpossibleRangeError(
            f"layers {layer_start}..{layer_end}, head {shard} of {num_shards}, {tokens} tokens"
        )
    return ValueHeader(
        dtype=_DTYPE_NAMES[dtype_code],
        keyed=bool(flags & _KEYED),
        layer_start=layer_start,
        layer_end=layer_end,
        shard=shard,
        num_shards=num_shards,
        num_tokens=tokens,
        content_width=width,
        payload_bytes=payload_bytes,
        key=key,
    )


_FOREIGN: dict[str, type[InvalidValueError]] = {
    "key": ForeignKeyError,
    "dtype": ForeignDtypeError,
    "keyed": ForeignSealError,
    "layer_start": ForeignLayersError,
    "layer_end": ForeignLayersError,
    "shard": ForeignShardError,
    "num_shards": ForeignShardError,
    "num_tokens": ForeignTokensError,
    "content_width": ForeignWidthError,
    "payload_bytes": ForeignLengthError,
}
assert set(_FOREIGN) == {field.name for field in fields(ValueHeader)}


def check_header(raw: Buffer, expected: ValueHeader) -> None:
    """Raise the `InvalidValueError` that says in what ``raw`` differs from ``expected``."""
    if bytes(raw[:_SEALED_BYTES]) == expected.pack() and len(raw) == HEADER_BYTES:
        return
    found = decode_header(raw)
    for name, error in _FOREIGN.items():
        if getattr(found, name) != getattr(expected, name):
            raise error(f"{name} differs")
    raise BadHeaderLengthError(f"{len(raw)} bytes, a header has {HEADER_BYTES}")


def check_value(raw: Buffer, payload: Buffer, expected: ValueHeader, sealer: Sealer) -> None:
    """Raise unless header ``raw`` and ``payload`` are, byte for byte, what was once sealed as
    ``expected``. Runs at memory speed, without the GIL for all but the first microseconds."""
    check_header(raw, expected)
    if len(payload) != expected.payload_bytes:
        raise ForeignLengthError(f"payload has {len(payload)} bytes")
    seal = sealer.seal(raw[:_SEALED_BYTES], payload)
    if not hmac.compare_digest(seal, bytes(raw[_SEALED_BYTES:])):
        raise (ForgedTagError if sealer.keyed else BadChecksumError)("seal differs")
