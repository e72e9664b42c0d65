"""The model answers as a real server does, in the first 100 bytes, in any order of commands."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from typing import IO

import pytest

from lmcache_connector.storage.redis.client.resp import command
from tests.simulation.kernel import Kernel
from tests.simulation.network import Network
from tests.simulation.redis_model import Entry, RedisModel, Session
from tests.support.redis.servers import Server

_NAMES = (b"a", b"b", b"list")
_NUM_CLIENTS = 2
_NUM_COMMANDS = 120


def _reply(stream: IO[bytes]) -> bytes:
    """One raw reply."""
    line = stream.readline()
    size = int(line[1:]) if line[:1] in b"$*" else -1
    if size < 0:
        return line
    if line[:1] == b"$":
        return line + stream.read(size + 2)
    return line + b"".join(_reply(stream) for _ in range(size))


def _command(chance: random.Random) -> tuple[bytes, ...]:
    """One that the product or its tools send, with lifetimes that end long after."""
    name, value = chance.choice(_NAMES), chance.choice((b"", b"x", b"\r\n", b"y" * 5000))
    milliseconds = chance.choice((b"600000", b"700000"))
    return chance.choice(
        (
            (b"SET", name, value),
            (b"SET", name, value, b"PX", milliseconds),
            (b"GET", name),
            (b"GETEX", name),
            (b"GETEX", name, b"PX", milliseconds),
            (b"STRLEN", name),
            (b"EXISTS", name, *_NAMES[: chance.randrange(3)]),
            (b"PEXPIRE", name, milliseconds),
        )
    )


@pytest.mark.parametrize("seed", range(60))
def test_model_and_server_give_the_same_answers(valkey: Server, seed: int) -> None:
    chance = random.Random(seed)
    kernel = Kernel(seed)
    model = RedisModel(kernel, Network(kernel), ("model", 1))
    with valkey.client() as admin, ExitStack() as stack:
        admin.flushall()
        address, sessions = ("127.0.0.1", valkey.port), [Session() for _ in range(_NUM_CLIENTS)]
        socks = [stack.enter_context(socket.create_connection(address, 10.0)) for _ in sessions]
        streams = [stack.enter_context(sock.makefile("rb")) for sock in socks]
        admin.rpush("list", "not a string")
        model.entries[b"list"] = Entry(b"not a string", b"list")
        said: list[tuple[int, tuple[bytes, ...]]] = [(0, (b"CLUSTER", b"SLOTS"))]
        for _ in range(_NUM_COMMANDS):
            who, words = said[-1]
            socks[who].sendall(command(*words))
            answer, truth = model.execute(sessions[who], words), _reply(streams[who])
            assert answer == truth, [(who, [w[:20] for w in words]) for who, words in said[-12:]]
            said.append((chance.randrange(_NUM_CLIENTS), _command(chance)))
        assert sorted(model.names()) == sorted(admin.keys())
        for name in model.names():
            expires_at = model.entries[name].expires_at
            left = admin.pttl(name)
            assert (expires_at is None) == (left == -1)
            assert expires_at is None or 0 <= expires_at * 1000 - left < 100_000
