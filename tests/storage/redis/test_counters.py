from __future__ import annotations

from lmcache_connector.net.wire import WireFault
from lmcache_connector.storage.redis.client.resp import ReplyFault
from lmcache_connector.storage.redis.counters import (
    Miss,
    NotAsked,
    WriteEnd,
)


def test_the_labels_are_those_that_dashboards_know() -> None:
    assert [fault.value for fault in ReplyFault] == [
        "missing",
        "error_reply",
        "wrong_length",
        "wrong_type",
    ]
    assert [fault.value for fault in WireFault] == [
        *("deadline", "cancelled", "closed", "stalled", "out_of_step")
    ]
    assert [fault.value for fault in NotAsked] == [
        *("unavailable", "after_miss", "queued", "internal_error")
    ]
    assert Miss(ReplyFault.MISSING).label == "missing"
    assert Miss(ReplyFault.MISSING, is_behind=True).label == "after_missing"
    assert Miss(WireFault.STALLED, is_behind=True).label == "after_stalled"
    assert [end.value for end in WriteEnd] == [
        *("written", "already_there", "queue_full", "failed")
    ]
    assert [end.is_stored for end in WriteEnd] == [True, True, False, False]
