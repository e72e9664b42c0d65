"""How far one chunk's KV is from another's, layer by layer.

Both chunks lie in the canonical form of :mod:`lmcache_connector.storage.geometry`. What is returned
are sums of squares, which add up over the ranks that hold a chunk's heads.

Elements are compared as the numbers they stand for. An *opaque* format, one that packs several
elements into a byte or scales among the elements, is compared byte by byte instead: then a sum of
squares counts bytes, and the share of bytes that differ takes the place of a relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_connector.plans import LayerDifference
from lmcache_connector.storage.geometry import ChunkGeometry

OPAQUE = "opaque"
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]


def compare_chunks(
    computed: memoryview,
    stored: memoryview,
    geometry: ChunkGeometry,
    formats: Sequence[str],
    *,
    planar: bool = False,
) -> tuple[LayerDifference, ...]:
    """Differences of both halves (K and V) of every layer, over this rank's heads.

    ``formats`` names how each layer's elements are stored: a key of ``DECODERS`` or ``OPAQUE``.
    ``planar``: a layer holds all K before all V; else each token's K precedes its V. K and V are
    told apart because K may be many times larger. Where a layer's halves are something else, as
    with latents, they are measured apart all the same.

    Raises ``ValueError`` unless both buffers hold ``geometry.chunk_bytes``.
    """
    if not len(computed) == len(stored) == geometry.chunk_bytes:
        raise ValueError(f"a chunk has {geometry.chunk_bytes} bytes")
    ours, theirs = (
        np.frombuffer(buffer, np.uint8).reshape(len(geometry.shards), -1)
        for buffer in (computed, stored)
    )
    found = []
    for index, name in enumerate(formats):
        columns = slice(geometry.layer_offsets[index], geometry.layer_offsets[index + 1])
        layer = [_halves(side[:, columns], geometry, planar) for side in (ours, theirs)]
        for half, (one, other) in enumerate(zip(*layer, strict=True)):
            sums = _sums(one, other, name)
            found.append(LayerDifference(geometry.layer_start + index, half, *sums))
    return tuple(found)


def _halves(layer: Bytes, geometry: ChunkGeometry, planar: bool) -> list[Bytes]:
    """Of uint8 ``[heads][tokens * width]``."""
    if not planar:
        layer = layer.reshape(len(layer) * geometry.num_tokens, -1)
    middle = layer.shape[1] // 2
    return [np.ascontiguousarray(layer[:, :middle]), np.ascontiguousarray(layer[:, middle:])]


def _sums(computed: Bytes, stored: Bytes, name: str) -> tuple[float, float, float]:
    """Sums of squares: of the difference, of what was computed, and of what is stored."""
    if name == OPAQUE:
        size = float(computed.size)
        return float(np.count_nonzero(computed != stored)), size, size
    ours, theirs = DECODERS[name](computed), DECODERS[name](stored)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = ours - theirs
    # Two infinities or two NaNs of the same bits are no difference; one alone is an infinite one.
    strange = ~np.isfinite(difference)
    if strange.any():
        width = computed.size // ours.size
        same = (computed == stored).reshape(*ours.shape, width).all(axis=-1)
        difference = np.where(same, np.float32(0), np.where(strange, np.inf, difference))
    return _squares(difference), _squares(ours), _squares(theirs)


def _squares(values: Numbers) -> float:
    """NaN and infinity count as infinite only where they differ; a norm leaves them out."""
    flat = values.reshape(-1)
    if np.isinf(flat).any() or np.isnan(flat).any():
        return float("inf")
    return float(np.dot(flat.astype(np.float64), flat))


def _decoder(dtype: Any) -> Callable[[Bytes], Numbers]:
    def decode(data: Bytes) -> Numbers:
        numbers: Numbers = data.view(dtype).astype(np.float32)
        return numbers

    return decode


def _bfloat16(data: Bytes) -> Numbers:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


@lru_cache(maxsize=2)
def _float8_values(mantissa_bits: int) -> Numbers:
    """The number each byte stands for: e4m3 (no infinities, one NaN) or e5m2 (IEEE)."""
    exponent_bits = 7 - mantissa_bits
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    top = exponent == (1 << exponent_bits) - 1
    if mantissa_bits == 2:
        value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    else:
        value = np.where(top & (fraction == 7 / 8), np.nan, value)
    return np.where(code < 128, value, -value).astype(np.float32)


def _float8(mantissa_bits: int) -> Callable[[Bytes], Numbers]:
    return lambda data: _float8_values(mantissa_bits)[data]


DECODERS: dict[str, Callable[[Bytes], Numbers]] = {
    "float32": _decoder("<f4"),
    "float16": _decoder("<f2"),
    "bfloat16": _bfloat16,
    "float8_e4m3fn": _float8(3),
    "float8_e5m2": _float8(2),
    "int8": _decoder(np.int8),
}
