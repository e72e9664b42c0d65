"""The fleet's number: raised by one, learned by all, never lower again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.epoch import RedisEpoch
from lmcache_connector.storage.redis.value_names import epoch_key
from tests.support.servers import Server, running_server, valkey_binary

MODEL = "ab" * 32
KEY = epoch_key("default", MODEL)


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(valkey_binary() or "valkey-server") as server:
        yield server


@pytest.fixture
def join(server: Server) -> Iterator[Callable[..., RedisEpoch]]:
    """Makes another instance of the fleet."""
    members: list[RedisEpoch] = []

    def make(model: str = MODEL, namespace: str = "default") -> RedisEpoch:
        config = RedisTierConfig(
            url=server.url, namespace=namespace, backoff_min_seconds=0.01, backoff_max_seconds=0.05
        )
        members.append(RedisEpoch(config, model, poll_seconds=0.02))
        return members[-1]

    yield make
    for member in members:
        member.close()


def until(condition: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def stored(server: Server) -> bytes | None:
    with server.client() as client:
        found: bytes | None = client.get(KEY)
        return found


def test_a_fleet_nobody_reset_is_at_zero_and_writes_nothing(
    server: Server, join: Callable[..., RedisEpoch]
) -> None:
    member = join()
    assert member.wait(10)
    assert member.number() == 0
    with server.client() as client:
        assert client.keys("*") == []


def test_one_advances_and_all_follow(server: Server, join: Callable[..., RedisEpoch]) -> None:
    one, two = join(), join()
    assert one.advance() == 1
    assert one.number() == 1
    assert until(lambda: two.number() == 1)
    assert two.advance() == 2
    assert until(lambda: one.number() == 2)
    assert until(lambda: stored(server) == b"2")
    late = join()
    assert late.wait(10)
    assert late.number() == 2


def test_models_and_namespaces_are_fleets_of_their_own(join: Callable[..., RedisEpoch]) -> None:
    one, others = join(), [join(model="cd" * 32), join(namespace="other")]
    one.advance()
    follower = join()
    assert until(lambda: follower.number() == 1)
    for other in others:
        assert other.wait(10)
        assert other.number() == 0


def test_advancing_goes_on_while_the_server_is_away(
    server: Server, join: Callable[..., RedisEpoch]
) -> None:
    one, two = join(), join()
    assert one.wait(10)
    assert two.wait(10)
    server.kill()
    assert one.advance() == 1
    assert one.advance() == 2
    assert two.advance() == 1
    server.start()
    assert until(lambda: two.number() == 2)
    assert until(lambda: stored(server) == b"2")


def test_a_server_that_forgets_is_told_again(
    server: Server, join: Callable[..., RedisEpoch]
) -> None:
    one = join()
    one.advance()
    assert until(lambda: stored(server) == b"1")
    with server.client() as client:
        client.flushall()
    assert until(lambda: stored(server) == b"1")
    assert one.number() == 1


@pytest.mark.parametrize("nonsense", [b"", b"-1", b"x", b"9" * 40, b"1.5", b"1\r\n2"])
def test_nonsense_is_not_believed(
    server: Server, join: Callable[..., RedisEpoch], nonsense: bytes
) -> None:
    with server.client() as client:
        client.set(KEY, nonsense)
    one = join()
    assert one.advance() == 1
    assert not one.wait(0.2)
    assert one.number() == 1


def test_another_type_under_the_key_is_not_believed(
    server: Server, join: Callable[..., RedisEpoch]
) -> None:
    with server.client() as client:
        client.rpush(KEY, b"1")
    one = join()
    assert not one.wait(0.2)
    assert one.number() == 0


def test_a_server_that_never_was_costs_nothing() -> None:
    one = RedisEpoch(RedisTierConfig(url="redis://127.0.0.1:1"), MODEL, poll_seconds=0.02)
    assert one.advance() == 1
    one.close()
    assert not one._thread.is_alive()
