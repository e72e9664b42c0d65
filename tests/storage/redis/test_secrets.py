"""No credential is shown: not in logs, errors, reprs, counts or the process list."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.redis.chunks import PARTS, chunk_key, config, get_all, open_tier, put_all
from tests.support.redis.servers import Server, free_port

SECRETS = ("hunter2", "us3rname", "another-s3cret")


def everything_shown(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """Everything visible of a tier and a lookup that were used at ``url``."""
    settings: dict[str, Any] = {"hash_key": b"another-s3cret-of-ours"}
    shown = []
    with caplog.at_level(logging.DEBUG), open_tier(url, **settings) as tier:
        lookup = RedisLookup(config(url, **settings), [PARTS])
        put_all(tier, [0])
        get_all(tier, [0, 1], seconds=0.5)
        lookup.exists_prefix([chunk_key(0)], time.monotonic() + 0.5)
        shown += [repr(tier), repr(lookup), repr(tier.stats()), repr(lookup.servers())]
        shown += [repr(config(url, **settings)), repr(config(url, **settings).address)]
        shown += [thread.name for thread in threading.enumerate()]
        for path in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):  # the thread has ended
                shown.append(path.read_text())
        lookup.close()
    shown.append(Path("/proc/self/cmdline").read_text())
    formatter = logging.Formatter()
    shown += [formatter.format(record) for record in caplog.records]
    return "\n".join(shown)


@pytest.mark.parametrize("case", ["accepted", "refused", "no server", "forbidden"])
def test_no_secret_is_shown(valkey: Server, caplog: pytest.LogCaptureFixture, case: str) -> None:
    password = ">wrong" if case == "refused" else ">hunter2"
    rights = "+ping" if case == "forbidden" else "+@all"
    port = free_port() if case == "no server" else valkey.port
    with valkey.client() as client:
        client.execute_command("ACL SETUSER", "us3rname", "on", password, "~*", "-@all", rights)
        try:
            shown = everything_shown(f"redis://us3rname:hunter2@127.0.0.1:{port}", caplog)
        finally:
            client.acl_deluser("us3rname")
    assert str(port) in shown, "the address is no secret"
    for secret in SECRETS:
        assert secret not in shown
    if case != "accepted":
        assert "cannot connect" in shown


def test_the_server_holds_no_secret(valkey: Server) -> None:
    with open_tier(valkey.url, hash_key=b"another-s3cret-of-ours") as tier, valkey.client() as c:
        put_all(tier, [0])
        for key in c.keys("*"):
            assert b"s3cret" not in key + c.get(key)
