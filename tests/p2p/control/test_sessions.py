"""The control plane over real sockets: who is let in, who is refused, and in which words."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript
from lmcache_connector.p2p.control.messages import Card, Message
from lmcache_connector.p2p.control.sessions import ControlClient, ControlServer, Peer, bound_socket
from lmcache_connector.p2p.errors import PeerError, RefusedError
from tests.support.servers import free_port

CARD = Card(
    engine_id="engine",
    host="127.0.0.1",
    port=1,
    rank=0,
    model={"weights": "w", "dtype": "bf16"},
    block_size=16,
    tp_size=1,
    layer_counts=(2,),
    num_kv_heads=4,
    is_mla=False,
    transports={"tcp": 2},
)
SECRET = b"sixteen bytes or more"
WANT = messages.Want("t", bytes(32), 0)


def _answer(peer: Peer, message: Message) -> Message:
    if isinstance(message, messages.Forget):
        raise ValueError("a bug in a handler")
    return messages.Gone(f"{peer.card.engine_id} asked") if message == WANT else messages.Done()


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def server(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[PeerAddress]:
    address = PeerAddress("127.0.0.1", free_port())
    server = ControlServer(context, address.host, address.port, CARD, SECRET, _answer)
    yield address
    server.close(5)


Connect = Callable[..., ControlClient]


@pytest.fixture
def connect(context: zmq.Context[zmq.Socket[bytes]], server: PeerAddress) -> Iterator[Connect]:
    clients = []

    def make(card: Card = CARD, secret: bytes = SECRET, seconds: float = 2.0) -> ControlClient:
        client = ControlClient(context, server, card, secret, seconds)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def test_peers_that_fit_talk(connect: Connect) -> None:
    client = connect()
    assert client.peer.card == CARD
    for _ in range(3):
        assert client.ask(WANT) == messages.Gone("engine asked")


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
    with pytest.raises(RefusedError, match=words):
        connect(card=msgspec.structs.replace(CARD, **change))


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
    return message.reason


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


def test_a_session_takes_no_foreign_or_repeated_packet() -> None:
    transcript = Transcript.of(b"hello", b"nonce", b"card")
    ours = SessionKey(transcript.session_key(SECRET), is_server=False)
    theirs = SessionKey(transcript.session_key(SECRET), is_server=True)
    first = messages.unpack(ours.seal(1, b"body"))
    assert theirs.accepts(first)
    assert not theirs.accepts(first)  # once more
    assert not ours.accepts(messages.unpack(ours.seal(2, b"body")))  # reflected
    changed = bytearray(ours.seal(3, b"body"))
    changed[-1] ^= 1
    assert not theirs.accepts(messages.unpack(bytes(changed)))
    other = SessionKey(Transcript.of(b"x", b"y", b"z").session_key(SECRET), is_server=False)
    assert not theirs.accepts(messages.unpack(other.seal(4, b"body")))


def test_a_bug_in_a_handler_ends_neither_server_nor_session(connect: Connect) -> None:
    client = connect()
    with pytest.raises(RefusedError, match="an error inside"):
        client.ask(messages.Forget("t", "r"))
    assert client.ask(WANT) == messages.Gone("engine asked")


def test_nobody_there_is_known_at_once(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    started = time.monotonic()
    with pytest.raises(PeerError, match="cannot be reached"):
        ControlClient(context, PeerAddress("127.0.0.1", free_port()), CARD, SECRET, 5.0)
    assert time.monotonic() - started < 2.0


def test_silence_is_bounded(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = PeerAddress("127.0.0.1", silent.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"no answer within 0\.3 s"):
            ControlClient(context, address, CARD, SECRET, 0.3)
        assert time.monotonic() - started < 2.0


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
        ControlServer(context, server.host, server.port, CARD, SECRET, _answer)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300), st.sampled_from(["raw", "head", "hello"]))
def test_no_garbage_breaks_the_decoder(data: bytes, kind: str) -> None:
    packet = data
    if kind == "head":
        packet = messages.pack(1, data)
    if kind == "hello":
        packet = messages.pack(1, messages.encode(messages.Hello(bytes(32), CARD))[: len(data)])
    with contextlib.suppress(PeerError):
        messages.decode(messages.unpack(packet).body)


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
        assert client.ask(WANT) == messages.Gone("engine asked")
    oversized = messages.MAX_PACKET_BYTES + 1
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 100)
        dealer.connect(f"tcp://{server}")
        dealer.send(bytes(oversized))
        assert not dealer.poll(200)  # cut off, not answered
    assert client.ask(WANT) == messages.Gone("engine asked")
    assert connect().ask(WANT) == messages.Gone("engine asked")
