"""A hostile peer: seeded conversations with both planes of an instance, each as wrong as can be."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable

import msgspec

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.messages import Card, Message
from lmcache_connector.p2p.data.base import Outlet, Session
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.data.tcp import _GREETING, TcpTransport
from lmcache_connector.p2p.errors import PeerError

_SECONDS = 5.0
_NAMES = ("t0", "t1", "t2", "never", "x" * 512)


class HostilePeer:
    """``card``: one that fits the instance. ``secret``: the real one, for the conversations of
    an insider. Every conversation is bounded and leaves nothing behind at this end but sockets that
    ``close`` closes."""

    def __init__(
        self, control: PeerAddress, data_port: int, card: Card, secret: bytes, seed: int
    ) -> None:
        self._control = control
        self._data_port = data_port
        self._card = card
        self._secret = secret
        self._rng = random.Random(seed)
        self._left_open: list[socket.socket] = []
        self._kinds: list[Callable[[], None]] = [
            self._garbage_to_control,
            self._head_and_nothing,
            self._endless_length,
            self._nonsense_in_a_packet,
            self._bad_card,
            self._wrong_proof,
            self._silence,
            self._garbage_to_data,
            self._stranger_on_the_data_port,
            self._insider_asks_nonsense,
            self._insider_sends_bad_frames,
        ]

    def converse(self) -> str:
        """One conversation; returns its kind."""
        kind = self._rng.choice(self._kinds)
        with contextlib.suppress(OSError, PeerError, struct.error):
            kind()
        return kind.__name__

    def close(self) -> None:
        for sock in self._left_open:
            sock.close()

    # -- strangers -----------------------------------------------------------------------------

    def _dial(self, port: int) -> socket.socket:
        return socket.create_connection((self._control.host, port), _SECONDS)

    def _say(self, port: int, *pieces: bytes, answers: bool = True) -> bytes:
        with self._dial(port) as sock:
            for piece in pieces:
                sock.sendall(piece)
            if answers:
                sock.shutdown(socket.SHUT_WR)
                return sock.recv(1 << 16)
        return b""

    def _garbage(self, most: int = 1 << 16) -> bytes:
        return self._rng.randbytes(self._rng.choice([0, 1, 7, 50, 51, 200, 5000, most]))

    def _garbage_to_control(self) -> None:
        self._say(self._control.port, self._garbage(), answers=self._rng.random() < 0.5)

    def _garbage_to_data(self) -> None:
        self._say(self._data_port, self._garbage(), answers=self._rng.random() < 0.5)

    def _head_and_nothing(self) -> None:
        packet = messages.pack(1, bytes(1000))
        self._say(self._control.port, packet[: self._rng.randrange(len(packet))])

    def _endless_length(self) -> None:
        length = self._rng.choice([messages.MAX_BODY_BYTES, messages.MAX_BODY_BYTES + 1, 2**32 - 1])
        head = messages.pack(1, b"")[:-4] + length.to_bytes(4, "little")
        self._say(self._control.port, head, self._garbage(1 << 18))

    def _nonsense_in_a_packet(self) -> None:
        nested = b"\x91" * self._rng.choice([10, 1000, 100_000])
        huge = b"\xdd\xff\xff\xff\xff"  # an array of 2**32 - 1
        message = messages.encode(messages.Keep(("x",)))
        body = self._rng.choice([nested, huge, message, b"", self._garbage(1000)])
        self._say(self._control.port, messages.pack(1, body))

    def _bad_card(self) -> None:
        change: dict[str, object] = self._rng.choice(
            [
                {"tp_size": 65535},
                {"layer_counts": (65535,) * 256},
                {"rank": 2**31 - 1},
                {"num_kv_heads": 65535},
                {"model": {f"{i}": "x" * 512 for i in range(64)}},
                {"port": 65535, "tp_size": 4, "rank": 3},
                {"rank_hosts": ("h",) * 4096},
                {"host": "not a host\n"},
            ]
        )
        card = msgspec.structs.replace(self._card, **change)
        hello = messages.Hello(os.urandom(32), card, self._control.host, self._control.port)
        self._say(self._control.port, messages.pack(1, messages.encode(hello)))

    def _wrong_proof(self) -> None:
        ControlClient(self._control, self._card, b"not the secret of them", _SECONDS).close()

    def _silence(self) -> None:
        """The sockets stay open: the other side has to close them."""
        port = self._rng.choice([self._control.port, self._data_port])
        self._left_open.append(self._dial(port))
        if len(self._left_open) > 200:
            self._left_open.pop(0).close()

    def _stranger_on_the_data_port(self) -> None:
        greeting = _GREETING.pack(b"LMPD", 2, self._rng.randbytes(16), self._rng.randbytes(32))
        self._say(self._data_port, greeting[: self._rng.randrange(len(greeting) + 1)])

    # -- insiders, with a bug or worse -----------------------------------------------------------

    def _insider_asks_nonsense(self) -> None:
        client = ControlClient(self._control, self._card, self._secret, _SECONDS)
        try:
            for _ in range(self._rng.randrange(5)):
                with contextlib.suppress(PeerError):
                    client.ask(self._message())
        finally:
            client.close()

    def _message(self) -> Message:
        rng = self._rng
        name = rng.choice(_NAMES)
        count = rng.choice([0, 1, 16, 1000, 2**31 - 1])
        choices: list[Message] = [
            messages.Offer(name, rng.randbytes(32), count),
            messages.Want(name, rng.randbytes(32), count),
            messages.Keep((name,) * 256),
            messages.More(rng.randrange(1, 2**62)),
            messages.Forget(name, "deadline: " + "x" * 1000),
            messages.Room(count),
            messages.Accepted(1, count, 1),
            messages.Prove(bytes(32)),
        ]
        return rng.choice(choices)

    def _insider_sends_bad_frames(self) -> None:
        rng = self._rng
        client = ControlClient(self._control, self._card, self._secret, _SECONDS)
        outlet: Outlet | None = None
        try:
            offer = messages.Offer(f"own {rng.random()}", bytes(32), 32)
            answer = client.ask(offer)
            session = Session(client.peer.session, client.peer.data_key)
            outlet = TcpTransport(_SECONDS).connect("127.0.0.1", self._data_port, session, _SECONDS)
            ticket = answer.ticket if isinstance(answer, messages.Accepted) else 1
            for _ in range(rng.randrange(1, 4)):
                frame = self._frame(rng.choice([ticket, ticket + 1]))
                payload = min(frame.num_bytes, rng.choice([0, 100, 1 << 16]))
                outlet.send(frame, [memoryview(bytes(payload))])
            client.ask(messages.Forget(offer.transfer_id, "aborted: enough"))
        finally:
            if outlet is not None:
                outlet.close()
            client.close()

    def _frame(self, ticket: int) -> Frame:
        rng = self._rng
        heads = rng.choice([1, 4, 4096, 0, 70_000])
        digests = rng.choice([(), tuple(bytes(32) for _ in range(min(heads, 4096)))])
        return Frame(
            ticket,
            layer=rng.choice([0, 1, 99]),
            first_head=rng.choice([0, 3, 2**32 - 1]),
            num_heads=heads,
            first_block=rng.choice([0, 1, 2**32 - 1]),
            num_blocks=rng.choice([1, 2, 2**32 - 1]),
            head_bytes=rng.choice([1, 1024, 2048, 1 << 40]),
            digests=digests,
        )
