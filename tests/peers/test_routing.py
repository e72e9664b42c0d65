"""The KV transfer that a request is part of, and the hosts that it may name."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any
from urllib.request import Request

import pytest

from lmcache_connector.net.address import Address
from lmcache_connector.peers import heartbeat
from lmcache_connector.peers.heartbeat import Heartbeat, Registration
from lmcache_connector.peers.routing import Receive, Router, Send, may_dial
from tests.support.clock import wait_until
from tests.support.redis.servers import free_port

OWN = Address("127.0.0.1", 7000)
OTHER = Address("127.0.0.1", 7001)
TWO = Router(OWN, sends=True, receives=True, hosts=("127.0.0.1", "::1"))
PREFILL = Router(OWN, sends=True, receives=False, hosts=())
DECODE = Router(None, sends=False, receives=True, hosts=("127.0.0.1",))
NAME = f"___prefill_addr_{OTHER}___decode_addr_{OWN}_abc-1"
PLACE = {"remote_host": "127.0.0.1", "remote_port": 7001}
FROM = {"do_remote_prefill": True} | PLACE


def consume(**more: Any) -> dict[str, Any]:
    return FROM | {"remote_request_id": "x"} | more


@pytest.mark.parametrize(
    ("router", "name", "params", "part"),
    [
        (TWO, "r", None, None),
        (TWO, "r", {"pin": True}, None),
        (TWO, "r", {"do_remote_decode": True}, Send("r", answers=True)),
        (DECODE, "r", {"do_remote_decode": True}, None),
        (TWO, "r", consume(), Receive("x", OTHER)),
        (TWO, "r", consume(remote_port="7001"), Receive("x", OTHER)),
        (TWO, "r", consume(remote_host="::1"), Receive("x", Address("::1", 7001))),
        (PREFILL, "r", consume(), None),
        (TWO, "r", {"remote_decoder": {"kv_request_id": "x"}}, Send("x", answers=False)),
        (DECODE, "r", {"remote_decoder": {"kv_request_id": "x"}}, None),
        (TWO, "r", {"remote_prefiller": PLACE | {"kv_request_id": "x"}}, Receive("x", OTHER)),
        (TWO, "r", {"remote_kv_source": PLACE | {"kv_request_id": "x"}}, Receive("", OTHER)),
        (PREFILL, "r", {"remote_kv_source": PLACE}, None),
        # vLLM puts a prefix before the id, and random digits after it.
        (TWO, f"cmpl-{NAME}-0123abcd", None, Receive(NAME, OTHER)),
        (DECODE, NAME, None, Receive(NAME, OTHER)),
        (PREFILL, f"{NAME}-76543210", None, Send(NAME, answers=False)),
        (TWO, f"___prefill_addr_{OWN}___decode_addr_{OTHER}_1", None, "sends"),
    ],
)
def test_requests_are_parsed(
    router: Router, name: str, params: dict[str, Any] | None, part: object
) -> None:
    found = router.part_in(name, params)
    assert found == (Send(name, answers=False) if part == "sends" else part)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("r", ["do_remote_decode"]),
        ("r", {"do_remote_decode": "yes"}),
        ("r", {"do_remote_prefill": 1}),
        ("r", {"remote_decoder": {}}),
        ("r", {"remote_prefiller": PLACE}),
        ("r", {"remote_kv_source": "127.0.0.1:7001"}),
        ("r", {"remote_kv_source": PLACE | {"remote_host": "10.0.0.9"}}),
        ("r", consume(remote_host="::1%\nWARNING")),
        ("r", consume(remote_host="::1%" + "x" * 254)),
        ("r", consume(remote_port="00000199999")),
        ("r" * 513, {"do_remote_decode": True}),
        ("r\ud800", {"do_remote_decode": True}),
        *(
            ("r", consume(**{key: value}))
            for key, values in {
                "remote_host": (None, "", 5, "a b", "127.0.0.1:9", "[::1", "ü", "x" * 254),
                "remote_port": (None, 0, 65536, -1, "a", "\uff11", True, 1.5, "9" * 5000),
                "remote_request_id": (None, "", 7, "x" * 513, "\ud800"),
            }.items()
            for value in values
        ),
        ("___prefill_addr_a:1___decode_addr_b:1", None),
        ("___prefill_addr_a:1___decode_addr_b:99999_x", None),
        (NAME + NAME, None),
        (f"___decode_addr_{OWN}___prefill_addr_{OTHER}_x", None),
        ("___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_x", None),  # both are foreign
    ],
)
def test_malformed_requests_raise(name: str, params: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        TWO.part_in(name, params)


@pytest.mark.parametrize(
    ("host", "hosts", "may"),
    [
        ("10.0.0.1", (), False),
        ("10.0.0.1", ("10.0.0.1",), True),
        ("10.0.0.1", ("10.0.0.0/24",), True),
        ("10.0.1.1", ("10.0.0.0/24", "name"), False),
        ("NAME", ("name",), True),
        ("a.pods.svc", ("*.pods.svc",), True),
        ("pods.svc", ("*.pods.svc",), False),
        ("a.pods.svc.evil", ("*.pods.svc",), False),
        ("127.0.0.2", ("localhost",), False),
        ("::1", ("::1",), True),
    ],
)
def test_allowed_hosts(host: str, hosts: tuple[str, ...], may: bool) -> None:
    assert may_dial(host, hosts) is may
    router = Router(OWN, sends=True, receives=True, hosts=hosts)
    if may:
        assert router.part_in("r", consume(remote_host=host)) is not None
    else:
        with pytest.raises(ValueError, match="peer_hosts"):
            router.part_in("r", consume(remote_host=host))


def test_a_heartbeat_goes_on_without_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_is_serving", lambda _: True)
    asked = count_requests(monkeypatch)
    mine = Registration("kv_consumer", "127.0.0.1:8200", "127.0.0.1:14589", "e")
    beat = Heartbeat(mine, f"http://127.0.0.1:{free_port()}", 0.01, b"")
    wait_until(lambda: asked["/register"] >= 3, "three registrations")
    beat.close()


def test_a_heartbeat_takes_no_proxy_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as api:
        port = api.getsockname()[1]
        api.settimeout(20.0)
        mine = Registration("kv_both", f"127.0.0.1:{port}", "127.0.0.1:14589", "e")
        beat = Heartbeat(mine, f"http://127.0.0.1:{port}", 60.0, b"")
        for said in (b"GET /health", b"POST /register"):
            with api.accept()[0] as sock:
                assert sock.recv(1000).startswith(said)
                sock.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    beat.close()


def count_requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests that a heartbeat makes from now on, by path."""
    asked = Counter[str]()
    really = heartbeat._open

    def count(request: Request) -> None:
        asked[request.selector] += 1
        really(request)

    monkeypatch.setattr(heartbeat, "_open", count)
    return asked


@pytest.mark.parametrize(("start_seconds", "num_told"), [(60.0, 0), (-1.0, 1)])
def test_an_api_that_never_listens_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start_seconds: float,
    num_told: int,
) -> None:
    monkeypatch.setattr(heartbeat, "_START_SECONDS", start_seconds)
    asked = count_requests(monkeypatch)
    mine = Registration("kv_both", f"127.0.0.1:{free_port()}", "127.0.0.1:14589", "e")
    beat = Heartbeat(mine, f"http://127.0.0.1:{free_port()}", 0.01, b"")
    wait_until(lambda: asked["/health"] >= 3, "three questions")
    num_records = len(caplog.records)  # leaving the router logs more
    beat.close()
    assert num_records == num_told


@pytest.mark.parametrize(
    ("answer", "told_of"),
    [
        (b"502 Bad Gateway\r\n", "502"),
        (b"302 Found\r\nLocation: ftp://127.0.0.1/\r\nContent-Length: 999999999\r\n", "302"),
    ],
    ids=["error", "redirection"],
)
def test_an_api_that_answers_with_an_error_is_told_once(
    caplog: pytest.LogCaptureFixture, answer: bytes, told_of: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as api:
        port = api.getsockname()[1]
        api.settimeout(20.0)
        mine = Registration("kv_both", f"127.0.0.1:{port}", "127.0.0.1:14589", "e")
        beat = Heartbeat(mine, f"http://127.0.0.1:{free_port()}", 0.01, b"")
        for _ in range(3):
            with api.accept()[0] as sock:
                assert sock.recv(1000).startswith(b"GET /health")
                sock.sendall(b"HTTP/1.0 %b\r\n" % answer)
    beat.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "http_address" in told
    assert told_of in told
