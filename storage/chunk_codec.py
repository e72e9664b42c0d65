"""The format of one stored value: a fixed header that describes the payload, then the payload.

Format v1, all integers little-endian::

    offset  size  field
         0     4  magic "LMCV"
         4     2  format version, 1
         6     2  header length, 128
         8     2  dtype code (see DTYPE_CODES)
        10     2  flags: bit 0 set when the seal is a keyed BLAKE3 tag, bit 1 when the payload is
                  stored as a blosc2 chunk (see :mod:`lmcache_connector.storage.compression`)
        12     4  first layer, counted in the part's layers of the whole model
        16     4  layer after the last
        20     4  KV head index
        24     4  KV heads of the part in the model
        28     4  tokens
        32     4  content width: bytes of one token of one layer, 0 when layers differ
        36     8  payload length in bytes
        44    32  key of the chunk's part
        76     8  length of the blosc2 chunk in bytes, less than the payload's; 0 without one
        84    12  reserved, zero
        96    32  seal over bytes 0..95 and the stored payload: xxh3-64 (little-endian, zero-padded)
                  or the 32-byte BLAKE3 tag keyed from ``hash_key``
       128        payload [layers][tokens][content] (on CPU as vLLM packs it), or the blosc2 chunk

Readers compare the header with the one they expect, and never allocate a size that it claims.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal

import xxhash
from blake3 import blake3

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.geometry import ChunkGeometry, Stripe

MAGIC = b"LMCV"
VERSION = 1
HEADER_BYTES = 128
# `decode_header`, peers and the command line refuse larger payloads.
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
_COMPRESSED = 2
_FIELDS = struct.Struct(f"<4sHHHHIIIIIIQ{CHUNK_KEY_BYTES}sQ12s")
_SEALED_BYTES = _FIELDS.size
_SEAL_BYTES = HEADER_BYTES - _SEALED_BYTES
_RESERVED = bytes(12)
# Every blosc2 chunk is longer.
_MIN_COMPRESSED_BYTES = 32

Buffer = bytes | bytearray | memoryview
Codec = Literal["none", "blosc2"]
"""How values are written; readers accept both."""


class ValueFault(Enum):
    """Ways for a stored value to be invalid. The values are labels of a metric."""

    TRUNCATED_HEADER = "truncated_header"
    BAD_MAGIC = "bad_magic"
    UNKNOWN_VERSION = "unknown_version"
    BAD_HEADER_LENGTH = "bad_header_length"
    UNKNOWN_DTYPE = "unknown_dtype"
    BAD_FLAGS = "bad_flags"
    OVERSIZED_PAYLOAD = "oversized_payload"
    IMPOSSIBLE_RANGE = "impossible_range"
    # The header of another value: of another chunk, layers, head, model or kind of seal.
    FOREIGN = "foreign"
    BAD_CHECKSUM = "bad_checksum"
    FORGED_TAG = "forged_tag"
    # Correctly sealed, but not a blosc2 chunk of the expected kind and size.
    BAD_COMPRESSION = "bad_compression"


class InvalidValueError(ValueError):
    """A stored value is not the expected one; ``fault`` says how it differs."""

    def __init__(self, fault: ValueFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """The header of a value, without its seal. Sizes in bytes, layers counted in their part.
    ``compressed_bytes``: size of the blosc2 chunk; 0 if the payload is stored as is.
    """

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
    compressed_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        return self.compressed_bytes or self.payload_bytes

    def pack(self) -> bytes:
        """The 96 sealed bytes. Raises ``ValueError`` for an unknown dtype or a bad key."""
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"no format code for dtype {self.dtype!r}")
        if len(self.key) != CHUNK_KEY_BYTES:
            raise ValueError(f"a chunk key has {CHUNK_KEY_BYTES} bytes, not {len(self.key)}")
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            DTYPE_CODES[self.dtype],
            (_KEYED if self.keyed else 0) | (_COMPRESSED if self.compressed_bytes else 0),
            self.layer_start,
            self.layer_end,
            self.shard,
            self.num_shards,
            self.num_tokens,
            self.content_width,
            self.payload_bytes,
            self.key,
            self.compressed_bytes,
            _RESERVED,
        )


def stripe_header(
    geometry: ChunkGeometry, stripe: Stripe, key: bytes, *, keyed: bool
) -> ValueHeader:
    """The header of the value that holds ``stripe`` of the chunk ``key``."""
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
    """Computes seals. Both hashes release the GIL for payloads above 100 KB."""

    def __init__(self, hash_key: bytes | None = None) -> None:
        """``hash_key``: a secret of at least 16 bytes, else ``ValueError``. The BLAKE3 key is
        derived from it, so that one secret serves chunk keys and values alike."""
        self._key: bytes | None = None
        if hash_key is not None:
            if len(hash_key) < 16:
                raise ValueError("hash_key needs at least 16 bytes")
            context = "lmcache-connector 2026 chunk value v1"
            self._key = blake3(hash_key, derive_key_context=context).digest()

    @property
    def keyed(self) -> bool:
        return self._key is not None

    def seal(self, sealed: Buffer, stored: Buffer) -> bytes:
        """The 32-byte seal of ``sealed`` (the header's first 96 bytes) and ``stored``."""
        if self._key is not None:
            tag = blake3(sealed, key=self._key)
            tag.update(stored)
            return tag.digest()
        checksum = xxhash.xxh3_64(sealed)
        checksum.update(stored)
        return int(checksum.intdigest()).to_bytes(_SEAL_BYTES, "little")


def encode_header(header: ValueHeader, stored: Buffer, sealer: Sealer) -> bytes:
    """The 128 bytes before ``stored``. Raises ``ValueError`` if size or kind of seal differ."""
    if len(stored) != header.stored_bytes:
        raise ValueError(f"payload has {len(stored)} bytes, not {header.stored_bytes}")
    if header.keyed != sealer.keyed:
        raise ValueError("header and sealer disagree on keyed or not")
    sealed = header.pack()
    return sealed + sealer.seal(sealed, stored)


def may_be_value(num_bytes: int, payload_bytes: int) -> bool:
    """Whether a stored value of ``num_bytes``, header included, can hold ``payload_bytes``,
    compressed or not."""
    stored = num_bytes - HEADER_BYTES
    return stored == payload_bytes or _MIN_COMPRESSED_BYTES < stored < payload_bytes


def decode_header(raw: Buffer) -> ValueHeader:
    """Parse a header. Raises `InvalidValueError` with the first fault."""
    if len(raw) < HEADER_BYTES:
        raise InvalidValueError(
            ValueFault.TRUNCATED_HEADER, f"{len(raw)} bytes, a header has {HEADER_BYTES}"
        )
    (magic, version, length, dtype_code, flags, *numbers, key, compressed, reserved) = (
        _FIELDS.unpack_from(raw)
    )
    layer_start, layer_end, shard, num_shards, tokens, width, payload_bytes = numbers
    if magic != MAGIC:
        raise InvalidValueError(ValueFault.BAD_MAGIC, f"magic is {magic!r}")
    if version != VERSION:
        raise InvalidValueError(ValueFault.UNKNOWN_VERSION, f"version {version}")
    if length != HEADER_BYTES:
        raise InvalidValueError(ValueFault.BAD_HEADER_LENGTH, f"header length {length}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidValueError(ValueFault.OVERSIZED_PAYLOAD, f"payload length {payload_bytes}")
    if dtype_code not in _DTYPE_NAMES:
        raise InvalidValueError(ValueFault.UNKNOWN_DTYPE, f"dtype code {dtype_code}")
    is_compressed = bool(flags & _COMPRESSED)
    if flags & ~(_KEYED | _COMPRESSED) or is_compressed != (compressed > 0) or any(reserved):
        detail = f"flags {flags:#x}, compressed {compressed}, reserved {reserved.hex()}"
        raise InvalidValueError(ValueFault.BAD_FLAGS, detail)
    if is_compressed and compressed >= payload_bytes:
        raise InvalidValueError(ValueFault.OVERSIZED_PAYLOAD, f"compressed length {compressed}")
    if layer_end <= layer_start or shard >= num_shards or tokens == 0 or payload_bytes == 0:
        raise InvalidValueError(
            ValueFault.IMPOSSIBLE_RANGE,
            f"layers {layer_start}..{layer_end}, head {shard} of {num_shards}, {tokens} tokens",
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
        compressed_bytes=compressed,
    )


def check_header(raw: Buffer, expected: ValueHeader) -> int:
    """Compare the header ``raw`` with ``expected``; returns how many bytes should follow it. Raises
    `InvalidValueError` with the fault in which they differ."""
    if bytes(raw[:_SEALED_BYTES]) == expected.pack() and len(raw) == HEADER_BYTES:
        return expected.stored_bytes
    found = decode_header(raw)
    for name in (field.name for field in fields(ValueHeader)):
        # The writer chooses whether to compress.
        if name != "compressed_bytes" and getattr(found, name) != getattr(expected, name):
            raise InvalidValueError(ValueFault.FOREIGN, f"{name} differs")
    if len(raw) != HEADER_BYTES:
        raise InvalidValueError(
            ValueFault.BAD_HEADER_LENGTH, f"{len(raw)} bytes, a header has {HEADER_BYTES}"
        )
    return found.stored_bytes


def check_value(raw: Buffer, stored: Buffer, expected: ValueHeader, sealer: Sealer) -> bool:
    """Raise `InvalidValueError` unless the header ``raw`` is as ``expected``, and its seal fits
    ``stored``. Runs at memory speed, almost entirely without the GIL. Returns whether ``stored`` is
    compressed: `decompress` must then still succeed."""
    stored_bytes = check_header(raw, expected)
    if len(stored) != stored_bytes:
        raise InvalidValueError(ValueFault.FOREIGN, f"payload has {len(stored)} bytes")
    seal = sealer.seal(raw[:_SEALED_BYTES], stored)
    if not hmac.compare_digest(seal, bytes(raw[_SEALED_BYTES:])):
        fault = ValueFault.FORGED_TAG if sealer.keyed else ValueFault.BAD_CHECKSUM
        raise InvalidValueError(fault, "the seal differs")
    return stored_bytes != expected.payload_bytes
