"""What real engines that hand over tell Prometheus."""

from __future__ import annotations

import re
from typing import Any

from examples.tiny_model import ModelShape
from tests.support.engines.calls import check_integrity
from tests.support.engines.handover import Answer, Ask, ask, log_stats, metrics
from tests.support.engines.p2p_engines import Engines
from tests.support.prompts import random_prompt


def check(cold: Answer, served: Answer, num_tokens: int) -> None:
    """All of the prompt was handed over but for its last token, and is the same."""
    assert served.served.external_hit_tokens == num_tokens - 1
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
        {name: now[name] - then.get(name, 0.0) for name in now if now[name] != then.get(name)}
        for then, now in zip(before, after, strict=True)
    )
    assert sent == {"handovers_total": 2}
    assert received.pop("receive_seconds_total") > 0
    num_chunks = -(-1699 // 128) + -(-599 // 128)
    assert received == {
        "hit_tokens_total": 1699 + 599,
        "failed_loads_total unreachable": 1,
        "malformed_requests_total": 1,
        "received_bytes_total": num_chunks * 128 * ModelShape().kv_bytes_per_token,
    }
    for instance, told in zip(both, after, strict=True):
        totals = instance.counts()
        assert told["handovers_total"] == totals.total("p2p_handovers")
        assert told["hit_tokens_total"] == totals.total("p2p_hit_tokens")
        instance.call(check_integrity)
        instance.call(log_stats)
    assert re.search(r"KV Transfer metrics: .*hit tokens=\d+", decode.log)
