from __future__ import annotations

import pytest

from lmcache_connector.storage.redis.config import RedisTierConfig


def test_config_lists_every_problem() -> None:
    with pytest.raises(ValueError, match="namespace") as error:
        RedisTierConfig(
            url="nonsense",
            namespace="a{b}",
            refresh_ttl=True,
            hash_key=b"short",
        )
    message = str(error.value)
    for name in ("refresh_ttl", "hash_key", "redis_url"):
        assert name in message


def test_config_shows_no_secret() -> None:
    shown = repr(RedisTierConfig(url="redis://u:hunter2@h", hash_key=b"another secret 1"))
    assert "hunter2" not in shown
    assert "another secret" not in shown
