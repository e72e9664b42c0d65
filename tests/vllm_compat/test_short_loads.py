"""What a load did not bring is computed, under every policy that vLLM has for failed loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults

PROMPT = [100 + i for i in range(150)]


@pytest.mark.parametrize("known_tokens", [0, 80])
def test_no_request_fails_and_the_policy_stays_the_users(model: Path, known_tokens: int) -> None:
    """``known_tokens``: which vLLM's own prefix cache has."""
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
    assert engine.adapter.tally.total("load_jobs") == (2 if known_tokens else 1)
    assert engine.adapter.tally.total("recomputed_tokens") > 0
    engine.check_answer(request_id)
    engine.check_whole()
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_load_failure_policy == "fail"
