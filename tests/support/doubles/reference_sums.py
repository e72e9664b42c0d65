"""The sums that the kernel for digests on a GPU makes, in numpy."""

from __future__ import annotations

import numpy as np

from lmcache_connector.vllm_compat.tensor_sums import STEPS


def reference_sums(data: bytes) -> bytes:
    """What ``sums_digest`` returns for these bytes."""
    num_whole = len(data) // 4 * 4
    words = np.frombuffer(data[:num_whole], dtype="<u4").astype(np.uint64)
    at = np.arange(1, len(words) + 1, dtype=np.uint64)
    sums = []
    with np.errstate(over="ignore"):
        for step in STEPS:
            z = words + at * np.uint64(step)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            sums.append((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
    return np.array(sums, dtype="<u8").tobytes() + data[num_whole:]
