"""Bytes with the statistics of a trained model's KV: exponents say little, mantissas are noise."""

from __future__ import annotations

import numpy as np


def bfloat16_bytes(seed: int, num_bytes: int) -> bytes:
    """Normal numbers, each of 64 channels with a scale of its own; the same for the same seed."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.standard_normal(64))
    values = random.standard_normal((-(-num_bytes // 128), 64)) * scales
    halves = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    return bytes(halves.tobytes()[:num_bytes])
