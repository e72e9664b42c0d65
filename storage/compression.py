"""Lossless compression of payloads: one blosc2 chunk per value, byte shuffle and zstd.

The exponents of a trained model's KV carry three or four bits of information, its mantissas are
noise: the shuffle puts exponent bytes side by side, which then shrink to half. All parameters are
fixed, so that a payload has one compressed form.

blosc2 would decode much more: any codec and filter, plugins found on the machine, sizes that a
chunk claims. So a chunk is decoded only if its header is the one written here, with the expected
sizes; only the block size may be any up to the payload's.

Both directions run on the calling thread, without the GIL.
"""

from __future__ import annotations

import struct

import blosc2

from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    Buffer,
    InvalidValueError,
    Sealer,
    ValueFault,
    ValueHeader,
    check_value,
)

# Bytes per number, the unit of the shuffle. One-byte dtypes are not listed.
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_LEVEL = 1
# blosc2 chunk header, format 5: format, codec format, flags, item size; sizes of payload, block and
# chunk; then filters, codec and their options.
_HEADER = struct.Struct("<4BIII16s")
_FORMAT, _CODEC_FORMAT = 5, 1
_FLAGS = 0x85  # zstd, one stream for each byte of an item
_SHUFFLE_AND_ZSTD = bytes((1, 0, 0, 0, 0, 0, 5)) + bytes(9)


def compress(payload: Buffer, dtype: str) -> bytes | None:
    """``payload`` as a blosc2 chunk, or None if the chunk is not smaller or is of another kind."""
    blosc2.set_releasegil(True)
    item_bytes = _ITEM_BYTES.get(dtype, 1)
    chunk: bytes = blosc2.compress2(
        payload,
        codec=blosc2.Codec.ZSTD,
        clevel=_LEVEL,
        typesize=item_bytes,
        filters=[blosc2.Filter.SHUFFLE],
        splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
        nthreads=1,
    )
    # Constant or incompressible payloads become chunks of another kind.
    is_smaller = len(chunk) < len(payload)
    return chunk if is_smaller and _is_ours(chunk, len(payload), item_bytes) else None


def decompress(chunk: memoryview, payload: memoryview, dtype: str) -> None:
    """Fill ``payload`` from ``chunk``. Raises `InvalidValueError` unless it is a chunk of that size
    and kind; ``payload`` then holds garbage."""
    if not _is_ours(chunk, len(payload), _ITEM_BYTES.get(dtype, 1)):
        raise InvalidValueError(ValueFault.BAD_COMPRESSION, "not a chunk as `compress` makes them")
    blosc2.set_releasegil(True)
    try:
        blosc2.decompress2(chunk, dst=payload, nthreads=1)
    except (ValueError, RuntimeError) as error:
        raise InvalidValueError(ValueFault.BAD_COMPRESSION, str(error)) from error


def check_whole_value(value: Buffer, expected: ValueHeader, sealer: Sealer) -> None:
    """Raise `InvalidValueError` unless ``value`` has the header ``expected`` and a valid seal, and
    decompresses. Decompression allocates the size that ``expected`` gives."""
    stored = memoryview(value)[HEADER_BYTES:]
    if check_value(value[:HEADER_BYTES], stored, expected, sealer):
        decompress(stored, memoryview(bytearray(expected.payload_bytes)), expected.dtype)


def _is_ours(chunk: Buffer, payload_bytes: int, item_bytes: int) -> bool:
    if len(chunk) <= _HEADER.size:
        return False
    *kind, num_bytes, block_bytes, chunk_bytes, pipeline = _HEADER.unpack_from(chunk)
    return (
        kind == [_FORMAT, _CODEC_FORMAT, _FLAGS, item_bytes]
        and (num_bytes, chunk_bytes) == (payload_bytes, len(chunk))
        and 0 < block_bytes <= payload_bytes
        and pipeline == _SHUFFLE_AND_ZSTD
    )
