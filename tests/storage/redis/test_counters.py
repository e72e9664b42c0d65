from __future__ import annotations

from lmcache_connector.net.wire import WireFault
from lmcache_connector.storage.chunk_codec import ValueFault
from lmcache_connector.storage.redis.client.resp import ReplyFault
from lmcache_connector.storage.redis.counters import (
    Counters,
    Miss,
    NotAsked,
    TierCounts,
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
        *("written", "already_there", "claimed_elsewhere", "queue_full", "failed")
    ]
    assert [end.is_stored for end in WriteEnd] == [True, True, False, False, False]


def test_counts_add_up_and_a_snapshot_stays_as_it_is() -> None:
    counters = Counters()
    assert counters.snapshot() == TierCounts()
    counters.count_chunks(2, [Miss(ValueFault.BAD_CHECKSUM)])
    counters.count_chunks(1, [Miss(ValueFault.BAD_CHECKSUM), Miss(NotAsked.AFTER_MISS)])
    counters.count_write(WriteEnd.WRITTEN)
    counters.count_bytes_written(400)
    taken = counters.snapshot()
    counters.count_write(WriteEnd.WRITTEN)
    assert taken == TierCounts(
        chunks_hit=3,
        misses={"bad_checksum": 2, "after_miss": 1},
        writes={WriteEnd.WRITTEN: 1},
        bytes_written=400,
    )
    assert taken.misses["missing"] == 0
