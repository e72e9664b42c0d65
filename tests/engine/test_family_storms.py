"""A storm on a model with windows, in a small cache, before a Valkey whose values go bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.family_storm import FamilyReport, Weather, run_family_storm
from tests.support.engines.instance import StartInstance
from tests.support.engines.settings import tiered_transfer
from tests.support.engines.tiny_families import build_family
from tests.support.redis.servers import Server

MIB = 1 << 20


@pytest.mark.soak
def test_a_storm(start: StartInstance, valkey: Server, tmp_path: Path) -> None:
    """Room for two requests in vLLM's cache, and for their chunks in memory."""
    transfer = tiered_transfer(
        cpu_gib=16 * MIB / 2**30,
        compute_or_load="always",
        audit_share=0.0,
        redis_url=valkey.url,
    )
    sizes = {"num_gpu_blocks_override": 72, "max_model_len": 2048, "max_num_seqs": 6}
    folder = build_family("gemma3 5:1", tmp_path)
    weather = Weather(valkey.port, aborts=0.02, damages=0.02, resets=0.01)
    with start(transfer, folder, **sizes, max_num_batched_tokens=512) as instance:
        report: FamilyReport = instance.call(run_family_storm, 1, weather)
    print(f"\n{report}")
    assert report.far == []
    assert report.counts.total("hit_tokens", "cpu") > 0
    assert report.checked_blocks > 0
    assert report.preemptions > 0
