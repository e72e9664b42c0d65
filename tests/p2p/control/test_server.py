"""The control server over real sockets: who is let in, and who is refused in which words."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import msgspec
import pytest

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient, ElsewhereError
from lmcache_connector.p2p.control.handshake import Transcript
from lmcache_connector.p2p.control.server import ControlServer
from lmcache_connector.p2p.control.sockets import listening_socket
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason
from tests.p2p.control.conftest import CARD, SECRET, WANT, Connect, answer, card_at
from tests.support.engines.p2p_relay import Relay


def test_peers_that_fit_talk(connect: Connect, server: PeerAddress) -> None:
    client = connect()
    assert client.peer.card == card_at(server)
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
        ({"block_size": 32}, "blocks of 16 and of 32 tokens"),
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
    with socket.create_connection((address.host, address.port), 5) as raw:
        for packet in packets:
            raw.sendall(packet)
            body = _received(raw)
    return body


def _received(raw: socket.socket) -> bytes:
    head = raw.recv(messages.HEAD_BYTES, socket.MSG_WAITALL)
    return raw.recv(messages.unpack_head(head).num_bytes, socket.MSG_WAITALL)


def _hello(dialled: PeerAddress) -> bytes:
    hello = messages.Hello(os.urandom(32), CARD, dialled.host, dialled.port)
    return messages.pack(1, messages.encode(hello))


def _refusal(answer: bytes) -> str:
    message = messages.decode(answer)
    assert isinstance(message, messages.Refused)
    return message.cause.text


def test_another_version_is_told_so(server: PeerAddress) -> None:
    packet = bytearray(messages.pack(1, b""))
    packet[4:6] = (7).to_bytes(2, "little")
    assert _refusal(_exchange(server, bytes(packet))) == (
        "you speak version 7 of the protocol, I speak 3"
    )


def test_nothing_is_answered_without_a_handshake(server: PeerAddress) -> None:
    want = messages.pack(1, messages.encode(WANT))
    assert _refusal(_exchange(server, want)) == "say hello first"
    prove = messages.pack(1, messages.encode(messages.Prove(bytes(32))))
    assert _refusal(_exchange(server, prove)) == "say hello first"


def test_a_proof_is_good_for_one_hello_only(server: PeerAddress) -> None:
    hello = _hello(server)
    wrong = messages.pack(2, messages.encode(messages.Prove(bytes(32))))
    with pytest.raises((OSError, struct.error)):  # the connection is cut after a refusal
        _exchange(server, hello, wrong, wrong)
    assert _refusal(_exchange(server, hello, wrong)) == "you do not know the shared secret"


def test_a_bug_in_a_handler_ends_neither_server_nor_session(connect: Connect) -> None:
    client = connect()
    with pytest.raises(RefusedError, match="an error inside"):
        client.ask(messages.Forget("t", "r"))
    assert client.ask(WANT) == messages.Gone("other: engine asked")


def test_it_listens_on_the_address_of_a_name() -> None:
    with contextlib.closing(listening_socket("localhost", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(PeerError, match=r"cannot listen on nobody\.invalid"):
        listening_socket("nobody.invalid", 0)


def test_a_taken_port_is_said_so(server: PeerAddress) -> None:
    with pytest.raises(PeerError, match="cannot listen"):
        ControlServer(server.host, server.port, CARD, SECRET, answer)


def test_who_dialled_another_address_is_sent_to_the_right_one(server: PeerAddress) -> None:
    """A relay at another address cannot be between the two: both know whom the client dialled."""
    with Relay(server) as relay:
        with pytest.raises(ElsewhereError) as elsewhere:
            ControlClient(relay.address, CARD, SECRET, 2.0)
        assert elsewhere.value.address == server
    hello = _hello(PeerAddress("127.0.0.1", 9))
    with socket.create_connection((server.host, server.port), 5) as raw:
        raw.sendall(hello)
        welcome = messages.decode(_received(raw))
        assert isinstance(welcome, messages.Welcome)
        said = hello[messages.HEAD_BYTES :]
        transcript = Transcript.of(said, welcome.nonce, messages.encode(welcome.card))
        prove = messages.Prove(transcript.client_proof(SECRET))
        raw.sendall(messages.pack(2, messages.encode(prove)))
        assert _refusal(_received(raw)) == f"you dialled 127.0.0.1:9, and I am {server}"


def test_a_card_is_judged_after_the_proof(server: PeerAddress) -> None:
    """Before it nobody makes work of ranks that cannot be, or hears how his model differs."""
    card = msgspec.structs.replace(CARD, model=CARD.model | {"weights": "guessed"}, tp_size=4096)
    hello = messages.encode(messages.Hello(os.urandom(32), card, server.host, server.port))
    with socket.create_connection((server.host, server.port), 5) as raw:
        raw.sendall(messages.pack(1, hello))
        welcome = messages.decode(_received(raw))
        assert isinstance(welcome, messages.Welcome)
        raw.sendall(messages.pack(2, messages.encode(messages.Prove(bytes(32)))))
        assert _refusal(_received(raw)) == "you do not know the shared secret"
    with socket.create_connection((server.host, server.port), 5) as raw:
        raw.sendall(messages.pack(1, hello))
        welcome = messages.decode(_received(raw))
        assert isinstance(welcome, messages.Welcome)
        transcript = Transcript.of(hello, welcome.nonce, messages.encode(welcome.card))
        prove = messages.Prove(transcript.client_proof(SECRET))
        raw.sendall(messages.pack(2, messages.encode(prove)))
        assert _refusal(_received(raw)) == "the models differ in weights"


def test_garbage_on_the_port_disturbs_nobody(connect: Connect, server: PeerAddress) -> None:
    client = connect()
    hello = _hello(server)
    endless = messages.pack(1, b"")[:-4] + b"\xff" * 4  # the length of its body
    for size in (0, 1, 5, 45, 46, 47, 200, 5000, 1 << 20):
        for data in (os.urandom(size), messages.pack(1, os.urandom(size)), hello[:size], endless):
            with (
                socket.create_connection((server.host, server.port)) as raw,
                contextlib.suppress(OSError),  # cut off
            ):
                raw.sendall(data)
            assert client.ask(WANT) == messages.Gone("other: engine asked")
    assert connect().ask(WANT) == messages.Gone("other: engine asked")
