"""The control server over real sockets: who is let in, and who is refused in which words."""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec
import pytest
import zmq

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.server import ControlServer, bound_socket
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason
from tests.p2p.control.conftest import CARD, SECRET, WANT, Connect, answer


def test_peers_that_fit_talk(connect: Connect) -> None:
    client = connect()
    assert client.peer.card == CARD
    for _ in range(3):
        assert client.ask(WANT) == messages.Gone("other: engine asked")


@pytest.mark.parametrize("secret", [b"", b"another secret, as long"])
def test_who_does_not_know_the_secret_is_not_let_in(connect: Connect, secret: bytes) -> None:
    with pytest.raises(RefusedError, match="does not know the shared secret"):
        connect(secret=secret)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"weights": "v", "dtype": "bf16"}}, "the models differ in weights"),
        ({"model": {"weights": "v"}}, "the models differ in dtype, weights"),
        ({"block_size": 32}, "blocks of 32 and of 16 tokens"),
        ({"num_kv_heads": 2}, "KV heads"),
        ({"layer_counts": (1, 2)}, "layers"),
        ({"tp_size": 3}, "3 tensor ranks"),
        ({"rank": 7}, "no rank 7"),
        ({"tp_size": 40000, "num_kv_heads": 4}, "not believed"),
    ],
)
def test_a_mismatch_is_refused_in_words(
    connect: Connect, change: dict[str, object], words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        connect(card=msgspec.structs.replace(CARD, **change))
    assert refused.value.cause.reason is Reason.MISMATCH


def _exchange(address: PeerAddress, *packets: bytes) -> bytes:
    """The answer to the last of them, over a socket of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(f"tcp://{address}")
        for packet in packets:
            raw.send(packet)
            assert raw.poll(5000)
            answer = raw.recv()
    return answer


def _refusal(answer: bytes) -> str:
    message = messages.decode(messages.unpack(answer).body)
    assert isinstance(message, messages.Refused)
    return message.cause.text


def test_another_version_is_told_so(server: PeerAddress) -> None:
    packet = bytearray(messages.pack(1, b""))
    packet[4:6] = (7).to_bytes(2, "little")
    assert _refusal(_exchange(server, bytes(packet))) == (
        "you speak version 7 of the protocol, I speak 1"
    )


def test_nothing_is_answered_without_a_handshake(server: PeerAddress) -> None:
    want = messages.pack(1, messages.encode(WANT))
    assert _refusal(_exchange(server, want)) == "say hello first"
    prove = messages.pack(1, messages.encode(messages.Prove(bytes(32))))
    assert _refusal(_exchange(server, prove)) == "say hello first"


def test_a_proof_is_good_for_one_hello_only(server: PeerAddress) -> None:
    hello = messages.encode(messages.Hello(os.urandom(32), CARD))
    wrong = messages.pack(2, messages.encode(messages.Prove(bytes(32))))
    answer = _exchange(server, messages.pack(1, hello), wrong)
    assert _refusal(answer) == "you do not know the shared secret"
    assert _refusal(_exchange(server, messages.pack(1, hello), wrong, wrong)) == "say hello first"


def test_a_bug_in_a_handler_ends_neither_server_nor_session(connect: Connect) -> None:
    client = connect()
    with pytest.raises(RefusedError, match="an error inside"):
        client.ask(messages.Forget("t", "r"))
    assert client.ask(WANT) == messages.Gone("other: engine asked")


def test_it_listens_on_the_address_of_a_name(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.closing(bound_socket(context, "localhost", port)) as server:
        assert server.get_string(zmq.LAST_ENDPOINT) == f"tcp://127.0.0.1:{port}"
    with pytest.raises(PeerError, match=r"cannot listen on nobody\.invalid"):
        bound_socket(context, "nobody.invalid", port)


def test_a_taken_port_is_said_so(
    context: zmq.Context[zmq.Socket[bytes]], server: PeerAddress
) -> None:
    with pytest.raises(PeerError, match="cannot listen"):
        ControlServer(context, server.host, server.port, CARD, SECRET, answer)


def test_garbage_on_the_port_disturbs_nobody(connect: Connect, server: PeerAddress) -> None:
    """Random packets through ZeroMQ, random bytes past it, half of them cut off."""
    client = connect()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    hello = messages.pack(1, messages.encode(messages.Hello(os.urandom(32), CARD)))
    for size in (0, 1, 5, 45, 46, 47, 200, 5000):
        with socket.create_connection((server.host, server.port)) as raw:
            raw.sendall(os.urandom(size))
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 100)
            dealer.connect(f"tcp://{server}")
            dealer.send(os.urandom(size))
            dealer.send(messages.pack(1, os.urandom(size)))
            dealer.send(hello[:size])
            dealer.send_multipart([os.urandom(size), b"", b"x"])
        assert client.ask(WANT) == messages.Gone("other: engine asked")
    oversized = messages.MAX_PACKET_BYTES + 1
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 100)
        dealer.connect(f"tcp://{server}")
        dealer.send(bytes(oversized))
        assert not dealer.poll(200)  # cut off, not answered
    assert client.ask(WANT) == messages.Gone("other: engine asked")
    assert connect().ask(WANT) == messages.Gone("other: engine asked")
