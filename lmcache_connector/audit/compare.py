"""Compares the KV of two chunks layer by layer.

Both chunks are in the canonical form of :mod:`lmcache_connector.storage.geometry`. The results are
sums of squares, which add up over the ranks that hold a chunk's heads.

Elements are compared as numbers. An *opaque* format, which packs several elements into a byte or
mixes scales with elements, is compared byte by byte: its sums of squares count bytes, and the root
of the share of bytes that differ replaces the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lmcache_connector.plans import LayerDifference
from lmcache_connector.storage.geometry import ChunkGeometry

OPAQUE = "opaque"
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
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

    ``formats`` names each layer's storage format: a key of ``DTYPES`` or ``OPAQUE``. ``planar``: a
    layer holds all K before all V; else each token's K precedes its V. K and V are separate because
    K may be many times larger; layers without K and V, such as latents, are split all the same.

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
    """Split uint8 ``[heads][tokens * width]`` into K and V."""
    if not planar:
        layer = layer.reshape(len(layer) * geometry.num_tokens, -1)
    middle = layer.shape[1] // 2
    return [np.array(layer[:, :middle], order="C"), np.array(layer[:, middle:], order="C")]


def _sums(computed: Bytes, stored: Bytes, name: str) -> tuple[float, float, float]:
    """Sums of squares: of the difference, the computed and the stored elements."""
    if name == OPAQUE:
        size = float(computed.size)
        return float(np.count_nonzero(computed != stored)), size, size
    ours, theirs = _numbers(computed, name), _numbers(stored, name)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = ours - theirs
    # Infinities or NaNs of equal bits do not count; otherwise the difference is infinite.
    if (strange := ~np.isfinite(difference)).any():
        alike = strange & (computed == stored).reshape(*ours.shape, -1).all(axis=-1)
        difference[strange] = np.inf
        for each in (ours, theirs, difference):
            each[alike] = 0
    return _squares(difference), _squares(ours), _squares(theirs)


def _squares(values: Numbers) -> float:
    """Sum of squares; infinite with any NaN or infinity."""
    flat = values.reshape(-1)
    if np.isinf(flat).any() or np.isnan(flat).any():
        return float("inf")
    return float(np.dot(flat.astype(np.float64), flat))


def _numbers(data: Bytes, name: str) -> Numbers:
    numbers: Numbers = torch.from_numpy(data).view(DTYPES[name]).float().numpy()
    return numbers
