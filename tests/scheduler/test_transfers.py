"""The scheduler side of KV transfers, without an engine."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.peers.routing import Router
from lmcache_connector.peers.watch import TransferWatch
from lmcache_connector.scheduler.transfers import RequestTransfers
from lmcache_connector.storage.redis.config import RedisTierConfig

AT = {"remote_host": "127.0.0.1", "remote_port": 9}  # nobody listens there


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": True, "remote_request_id": "t", **AT}, {"remote_kv_source": AT}],
    ids=["transfer", "chunks"],
)
def test_a_request_whose_end_has_failed_needs_nothing_more(params: dict[str, Any]) -> None:
    """vLLM does not tell of an end twice, and a thread goes on while a transfer is needed."""
    router = Router(None, sends=False, receives=True, hosts=("127.0.0.1",))
    with closing(TransferWatch(RedisTierConfig(url="redis://peers"), "reader")) as watch:
        transfers = RequestTransfers(ConnectorConfig(), router, "engine", 1, 1, Tally(), watch)
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request("r", [1, 2, 3], sampling, None)
        transfers.arrived(request)
        transfers.start_over()
        assert transfers._received
        request.status = RequestStatus.FINISHED_ABORTED
        transfers.start_over()
        assert not transfers._received
        assert sum(each.num_unread for each in watch._pollers.values()) == 0
