"""What a cost model is told of a tier that was measured for its own sake."""

from __future__ import annotations

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.plans import Tier


def calibrate(
    model: CostModel, tier: Tier, bytes_per_second: float, latency_seconds: float = 0.0
) -> None:
    """As the self-test or a probe would, without noise."""
    sizes = (1 << 30, 1 << 20)
    loads = [(n, latency_seconds + n / bytes_per_second) for n in sizes]
    model.tiers[tier].measured(model._clock(), loads)
