"""A step that has no plan costs a rank next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from lmcache_connector.connector import LMCacheTieredConnector, PlanMetadata
from lmcache_connector.plans import StepPlan
from tests.support.frames import product_frames
from tests.support.jobs import store_job
from tests.support.redis.servers import running_valkey
from tests.support.vllm_configs import vllm_config
from tests.worker.test_adapter import KEYS, Instance, make_instance

MAX_FRAMES = 19
"""Of all calls that vLLM's model runner makes in one step. It was 44."""


@pytest.fixture
def instance() -> Iterator[Instance]:
    with running_valkey() as valkey:
        instance = make_instance(valkey.port)
        yield instance
        instance.worker.shutdown()


@pytest.fixture
def connector(
    model: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LMCacheTieredConnector]:
    """vLLM's runner finds it."""
    connector = object.__new__(LMCacheTieredConnector)
    connector._scheduler, connector._worker = None, instance.worker
    connector._step = connector._step_output = connector._scheduler = connector._guard = None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    with set_forward_context(None, vllm_config(model)):
        yield connector


def run_step(connector: LMCacheTieredConnector, metadata: KVConnectorMetadata) -> bool:
    """As vLLM's runner does. Whether something was reported."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = metadata
    connector.handle_preemptions(metadata)
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as found:
        pass
    assert found is not None
    return found.kv_connector_worker_meta is not None


def come_to_rest(connector: LMCacheTieredConnector) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if not run_step(connector, PlanMetadata(StepPlan(idle=True))):
            return


def test_a_quiet_step_takes_few_frames(connector: LMCacheTieredConnector) -> None:
    come_to_rest(connector)
    run_step(connector, PlanMetadata(None))
    frames = product_frames(lambda: run_step(connector, PlanMetadata(None)))
    assert frames.total() <= MAX_FRAMES, frames


def test_a_job_is_reported_with_a_quiet_step(
    connector: LMCacheTieredConnector, instance: Instance
) -> None:
    come_to_rest(connector)
    job = store_job(1, "r", KEYS[:1], ((0, 1),))
    run_step(connector, PlanMetadata(StepPlan(stores=(job,))))
    until = time.monotonic() + 20
    while not run_step(connector, PlanMetadata(None)):
        assert time.monotonic() < until
    while instance.worker._has_news():  # its write to Redis ends later, and is reported too
        assert time.monotonic() < until
        run_step(connector, PlanMetadata(None))
