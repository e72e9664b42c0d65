"""What real engines that hand over tell Prometheus. The rest of it is in tests/transfers."""

from __future__ import annotations

import re
from typing import Any

from tests.support.engines.handover import Answer, Ask, ask, at_rest, log_stats, metrics
from tests.support.engines.p2p_engines import Engines
from tests.support.engines.tiny_model import ModelShape
from tests.support.prompts import random_prompt


def check(cold: Answer, served: Answer, num_tokens: int) -> None:
    """All of the prompt was handed over, and is the same."""
    assert served.served.external_hit_tokens == num_tokens
    assert () != served.served.block_digests == cold.served.block_digests
    assert served.finish_reason == "length"


def _elsewhere(host: str, port: int = 9) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": "x",
    }


def test_prometheus_is_told_what_was_sent(engines: Engines) -> None:
    """Through vLLM's own loggers: two hand-overs, one that nobody has, one request in error."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    both = prefill, decode
    before = [instance.call(metrics) for instance in both]
    check(*engines.hand_over(random_prompt(65, 1700)), 1700)
    check(*engines.hand_over_by_params(random_prompt(66, 600)), 600)
    unreachable = _elsewhere("127.0.0.1") | {"remote_request_id": "never asked for before"}
    decode.call(ask, Ask("gone-2", random_prompt(67, 500), params=unreachable))
    decode.call(ask, Ask("bad-5", random_prompt(68, 200), params=_elsewhere("10.9.8.7")))
    after = [instance.call(metrics) for instance in both]
    sent, received = (
        {name: now[name] - then[name] for name in now if now[name] != then[name]}
        for then, now in zip(before, after, strict=True)
    )
    for counts in (sent, received):
        counts.pop("capacity_bytes", None)  # told with the first step
    assert sent.pop("handovers_total") == 2
    assert sent.keys() <= {"reserved_bytes"}
    assert received.pop("load_seconds_sum") > 0
    # Bytes may come while the prompt is still computed elsewhere, before anybody waits for them.
    assert received.pop("receive_seconds_total") > 0
    num_blocks = -(-1700 // 128) + -(-600 // 128)
    assert received == {
        "loads_total": 3,
        "load_seconds_count": 3,
        "hit_tokens_total": 2300,
        "recomputed_tokens_total": 500,
        "failed_loads_total unreachable": 1,
        "malformed_requests_total": 1,
        "received_bytes_total": num_blocks * 128 * ModelShape().kv_bytes_per_token,
    }
    for instance, told in zip(both, after, strict=True):
        totals = instance.counts()
        assert told["handovers_total"] == totals.total("p2p_handovers")
        assert told["hit_tokens_total"] == totals.total("p2p_hit_tokens")
        assert told["capacity_bytes"] == 2 << 30
        assert told["reserved_bytes"] == instance.call(at_rest)["reserved_bytes"]
        instance.call(log_stats)
    assert re.search(r"KV Transfer metrics: .*handed over=\d+ prompt", prefill.log)
    assert re.search(r"KV Transfer metrics: .*taken over=\d+ tokens by \d+ loads?", decode.log)
