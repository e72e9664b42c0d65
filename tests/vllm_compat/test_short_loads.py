"""What a load did not bring is computed, whatever vLLM's policy for failed loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_connector.errors import UnsupportedError
from tests.support.doubles import shadow_config
from tests.support.doubles.shadow_config import build_scheduler
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults

PROMPT = [100 + i for i in range(150)]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("known_tokens", [0, 80])
def test_no_request_fails_and_the_policy_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch, known_tokens: int, policy: str
) -> None:
    """``known_tokens``: which vLLM's own prefix cache has."""
    transfer_of = shadow_config._transfer
    monkeypatch.setattr(
        shadow_config,
        "_transfer",
        lambda shape: replace(transfer_of(shape), kv_load_failure_policy=policy),
    )
    faults = Faults(slow=0.0)
    engine = ShadowEngine(model, Shape(), 0, faults)
    engine.add(PROMPT, max_tokens=1)
    engine.run_until_idle()
    assert engine.scheduler.reset_prefix_cache()
    faults.failed_load = 1.0
    if known_tokens:
        engine.add(PROMPT[:known_tokens], max_tokens=1)
        engine.run_until_idle()
    request_id = engine.add(PROMPT, max_tokens=1)
    engine.run_until_idle()
    assert engine.adapter.tally.totals.total("load_jobs") == (2 if known_tokens else 1)
    assert engine.adapter.tally.totals.total("recomputed_tokens") > 0
    engine.check_answer(request_id)
    engine.check_whole()
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_load_failure_policy == policy
    assert engine.scheduler.recompute_kv_load_failures is (policy == "recompute")


@pytest.mark.parametrize("beside", [0, 1])
def test_two_tiered_connectors_in_one_engine_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    """vLLM keeps one watcher of a block's reuse: the other connector would not hear of it."""
    ours = {
        "kv_connector": "LMCacheTieredConnector",
        "kv_connector_module_path": "lmcache_connector",
        "kv_role": "kv_both",
    }
    monkeypatch.setattr(shadow_config, "FOREIGN", ours)
    with pytest.raises(UnsupportedError, match="Configure one: it serves"):
        build_scheduler(model, Shape(beside=beside))
