"""Connecting, where something on this side is not as it should be."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_connector.storage.redis.client.conversation import Conversation
from lmcache_connector.storage.redis.client.dial import Dialer
from lmcache_connector.storage.redis.topology import ClusterTopology
from tests.support.redis.chunks import config

_SAY_WHY = """
import sys, time
from lmcache_connector.storage.redis.client.dial import Dialer
from lmcache_connector.storage.redis.client.url import parse_redis_url
address = parse_redis_url(sys.argv[1])
try:
    Dialer(address, 1.0, 1.0, time.monotonic)._tls_context()
except OSError as error:
    print("refused")
"""


def test_a_key_whose_password_is_not_given_asks_no_terminal(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=x"]
    make += ["-keyout", str(key), "-out", str(certificate), "-passout", "pass:a password"]
    subprocess.run(make, check=True, capture_output=True)
    url = f"rediss://localhost?ssl_certfile={certificate}&ssl_keyfile={key}"
    terminal, side = pty.openpty()
    try:
        process = subprocess.run(
            [sys.executable, "-c", _SAY_WHY, url],
            check=False,
            stdin=side,
            stdout=subprocess.PIPE,
            stderr=side,
            timeout=30.0,
            start_new_session=True,
        )
    finally:
        os.close(side)
        os.close(terminal)
    assert process.stdout == b"refused\n"


def test_a_look_that_runs_out_of_memory_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def connect(self: Dialer, host: str, port: int) -> Conversation:
        looks.append(host)
        raise MemoryError

    monkeypatch.setattr(Dialer, "connect", connect)
    now = time.monotonic()
    topology = ClusterTopology(config("redis+cluster://localhost:1"), lambda: now)
    for _ in range(3):
        with pytest.raises(MemoryError):
            topology.prepare()
        now += 10.0
    assert len(looks) == 3
