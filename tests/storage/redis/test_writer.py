"""How much one burst of writes takes on."""

from __future__ import annotations

from lmcache_connector.storage.redis.writer import take_bytes

MIB = 1 << 20


def test_a_burst_is_short_however_fast_the_server() -> None:
    assert take_bytes(0.0) == 32 * MIB, "nothing is known yet"
    assert take_bytes(10e6) == 32 * MIB
    assert take_bytes(2e9) == 100_000_000
    assert take_bytes(1e12) == 256 * MIB
