"""What several ranks report, put together by vLLM's own aggregator."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from lmcache_connector.connector import LMCacheTieredConnector
from lmcache_connector.connector_base import ReportMetadata
from lmcache_connector.plans import CacheEvent, JobResult, Outcome, RankReport


def output_of(kv_output: KVConnectorOutput | None) -> ModelRunnerOutput:
    import copy

    output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
    output.kv_connector_output = kv_output
    return output


def report(rank: int, outcome: Outcome, num_chunks: int) -> RankReport:
    result = JobResult(7, outcome, num_chunks, 0, 0, 0.0)
    return RankReport(rank, (CacheEvent(b"k" * 32, True),), (result,))


@pytest.fixture
def aggregator() -> KVOutputAggregator:
    """As vLLM makes it for two ranks; the connector does not change how many must report."""
    connector = object.__new__(LMCacheTieredConnector)
    return KVOutputAggregator.from_connector(connector, world_size=2)


def aggregate(
    aggregator: KVOutputAggregator, *outputs: KVConnectorOutput | None
) -> KVConnectorOutput:
    whole = aggregator.aggregate([output_of(output) for output in outputs])
    assert whole is not None
    found = whole.kv_connector_output
    assert found is not None
    return found


def test_reports_of_all_ranks_arrive(aggregator: KVOutputAggregator) -> None:
    one, two = report(0, Outcome.DONE, 3), report(1, Outcome.MISSING, 1)
    found = aggregate(
        aggregator,
        KVConnectorOutput(kv_connector_worker_meta=ReportMetadata((one,))),
        KVConnectorOutput(kv_connector_worker_meta=ReportMetadata((two,))),
    )
    assert isinstance(found.kv_connector_worker_meta, ReportMetadata)
    assert found.kv_connector_worker_meta.reports == (one, two)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_with_nothing_to_say_hides_nobody(
    aggregator: KVOutputAggregator, silent: int
) -> None:
    said = report(1 - silent, Outcome.DONE, 1)
    outputs: list[KVConnectorOutput | None] = [None, None]
    outputs[1 - silent] = KVConnectorOutput(kv_connector_worker_meta=ReportMetadata((said,)))
    found = aggregate(aggregator, *outputs)
    assert isinstance(found.kv_connector_worker_meta, ReportMetadata)
    assert found.kv_connector_worker_meta.reports == (said,)


def test_a_load_is_over_when_the_last_rank_says_so(aggregator: KVOutputAggregator) -> None:
    first = aggregate(aggregator, KVConnectorOutput(finished_recving={"r"}), None)
    assert not first.finished_recving
    second = aggregate(aggregator, None, KVConnectorOutput(finished_recving={"r"}))
    assert second.finished_recving == {"r"}


def test_blocks_are_freed_when_the_last_rank_has_stored(aggregator: KVOutputAggregator) -> None:
    assert not aggregate(
        aggregator, KVConnectorOutput(finished_sending={"r"}), None
    ).finished_sending
    last = aggregate(aggregator, None, KVConnectorOutput(finished_sending={"r"}))
    assert last.finished_sending == {"r"}
