"""The models that benchmarks run, with random weights. "large" is large for two cores."""

from __future__ import annotations

from tests.support.tiny_model import DEMO_SHAPE, ModelShape

MODELS = {
    "tiny": DEMO_SHAPE,
    "large": ModelShape(
        num_layers=12,
        hidden_size=1024,
        intermediate_size=2816,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
    ),
}
