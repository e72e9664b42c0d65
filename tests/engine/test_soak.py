"""Storms of requests on engines whose caches are all too small: nothing may go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.instance import StartInstance
from tests.support.engines.settings import kv_transfer
from tests.support.engines.storm import StormReport, Weather, run_storm
from tests.support.engines.tiny_families import build_family
from tests.support.redis.servers import CACHE, running_valkey

BAD_VALUES = {"aborts": 0.02, "damages": 0.02, "resets": 0.01}
UPDATES = {"num_requests": 120, "updates": 0.01, "resets": 0.01}


@pytest.mark.parametrize(
    ("family", "weather", "others"),
    [
        (None, {"num_requests": 80}, {}),
        pytest.param(None, {"num_requests": 600}, {}, marks=pytest.mark.soak),
        # One whose layers have windows, and whose values go bad.
        pytest.param("gemma3 5:1", BAD_VALUES, {}, marks=pytest.mark.soak),
        pytest.param(None, UPDATES, {}, marks=pytest.mark.soak),
        pytest.param(None, UPDATES, {"max_num_seqs": 2}, marks=pytest.mark.soak),
        pytest.param(
            None, BAD_VALUES | {"num_requests": 120}, {"audit_share": 1.0}, marks=pytest.mark.soak
        ),
    ],
    ids=["short", "long", "windows", "updates", "two at a time", "audited"],
)
@pytest.mark.timeout(1800)
def test_a_storm(
    family: str | None,
    weather: dict[str, float],
    others: dict[str, float],
    start: StartInstance,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Room for two requests in vLLM's cache, for few chunks in memory and some more in Valkey."""
    folder = build_family(family, tmp_path) if family else tiny_model
    sizes = {
        "num_gpu_blocks_override": 72 if family else 20,
        "max_model_len": 2048,
        "max_num_seqs": int(others.get("max_num_seqs", 8)),
    }
    with running_valkey(CACHE | {"maxmemory": "48mb"}) as valkey:
        transfer = kv_transfer(
            redis_url=valkey.url,
            cpu_gib=(16 if family else 8) / 1024,
            audit_share=others.get("audit_share", 0.0),
        )
        with start(transfer, folder, **sizes, max_num_batched_tokens=512) as engine:
            sky = Weather(valkey.port, **{"aborts": 0.005, **weather})  # type: ignore[arg-type]
            report: StormReport = engine.call(run_storm, 1, sky)
    print(f"\n{report}")
    assert report.far == []
    assert report.checked_blocks > 0
    assert report.preemptions > 0
    for tier in ("cpu",) if family else ("cpu", "redis"):
        assert report.counts.total("hit_tokens", tier) > 0
