"""A server that speaks RESP and answers with every kind of nonsense.

Each connection is one conversation with a seed of its own. Most answers are what a good server
would say, so that conversations get deep; the others come from `NONSENSE`. Set to honest, it leads
to a real server instead. It runs in a process of its own: what it sends is no memory of the tests'.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_LIFE_SECONDS = 2.0
_NONSENSE_SHARE = 0.25
_PIECE = 1 << 16
_HUGE = (2**31, 900_000_000_000, 2**63, 10**30, 10**400)


def _slots(*entries: tuple[int, int, bytes, int]) -> bytes:
    """The answer to CLUSTER SLOTS: first, last, host and port of each range."""
    ranges = (
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n$%d\r\n%b\r\n:%d\r\n$1\r\nx\r\n" % (a, b, len(host), host, port)
        for a, b, host, port in entries
    )
    return b"*%d\r\n%b" % (len(entries), b"".join(ranges))


def _lengths(r: random.Random) -> bytes:
    return b"%b%d\r\n" % (r.choice([b"$", b"*", b":"]), r.choice(_HUGE) * r.choice([1, -1]))


def _wrong_slots(r: random.Random) -> bytes:
    host, port = b"127.0.0.1", r.choice([0, -1, 1, 65536, *_HUGE])
    return r.choice(
        [
            _slots((0, r.choice(_HUGE), host, 7000)),
            _slots((-5, 16383, host, 7000)),
            _slots((9, 3, host, 7000)),
            _slots((0, 16383, host, port)),
            _slots((0, 16383, b"x" * r.choice([0, 254, 100_000]), 7000)),
            _slots((0, 16383, b"\xff\x00\n bad", 7000)),
            _slots(*[(0, 16383, host, 7000)] * 5000),
            _slots(*[(i, i, host, 1 + i % 60_000) for i in range(16384)]),
            b"*1\r\n*2\r\n:0\r\n:16383\r\n",
            b"*1\r\n*3\r\n$1\r\n0\r\n:5\r\n*1\r\n$-1\r\n",
            b"*0\r\n",
        ]
    )


# What one answer may be instead of the right one.
NONSENSE: tuple[Callable[[random.Random], bytes], ...] = (
    _lengths,
    _wrong_slots,
    lambda r: b"*1\r\n" * r.choice([10, 1000, 100_000]),
    lambda r: b"*2\r\n:1\r\n" * 1000,
    lambda r: b"*%d\r\n%b" % (n := r.choice([300, 300_000]), b"$-1\r\n" * n),
    lambda r: r.choice([b"+", b"-", b":", b"$", b"*", b"_", b"%", b"#t", b",1.5", b""]) + b"\r\n",
    lambda r: r.choice([b"+", b"-", b":", b"$", b"*"]) + b"9" * r.choice([19, 5000, 70_000]),
    lambda r: b"%b%b\r\n" % (r.choice([b":", b"$"]), r.choice([b"x", b"1e9", b"+1", b" 1", b"-0"])),
    lambda r: (
        b"-%b %d 127.0.0.1:%d\r\n"
        % (r.choice([b"MOVED", b"ASK"]), r.choice((-1, 5, *_HUGE)), r.choice((1, *_HUGE)))
    ),
    lambda r: (
        r.choice([b"-WRONGTYPE x", b"-OOM x", b"-NOPERM x", b"-LOADING x", b"-ERR"]) + b"\r\n"
    ),
    lambda r: b"-%b\r\n" % r.randbytes(r.choice([1, 300, 60_000])).replace(b"\n", b""),
    lambda r: r.randbytes(r.choice([1, 100, 100_000])),
    lambda r: b"+OK\r\n" * r.choice([2, 10_000]),
    lambda r: b"$5\r\nabc\r\n" + b"$3\r\nabcdef\r\n",
    lambda r: b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(n := r.choice(_HUGE))), n),
)


@dataclass
class HostileServer:
    """``port`` of loopback. ``num_conversations`` begun so far."""

    port: int
    _count: Any
    _honest: Any

    @property
    def num_conversations(self) -> int:
        return int(self._count.value)

    def be_honest(self) -> None:
        """From now on new connections lead to the real server, and old ones are cut soon."""
        self._honest.value = 1


@contextlib.contextmanager
def hostile_server(seed: int, target_port: int) -> Iterator[HostileServer]:
    """Ended afterwards. ``target_port`` is where it leads when it is honest."""
    context = multiprocessing.get_context("fork")
    count, honest = context.Value("l", 0), context.Value("b", 0)
    mine, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(seed, target_port, count, honest, theirs), daemon=True
    )
    process.start()
    try:
        yield HostileServer(mine.recv(), count, honest)
    finally:
        process.kill()
        process.join()


def _serve(seed: int, target_port: int, count: Any, honest: Any, pipe: Connection) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    pipe.send(port)
    while True:
        sock, _ = listener.accept()
        with count.get_lock():
            count.value += 1
        if honest.value:
            work: Callable[[], None] = _Pipe(sock, target_port).run
        else:
            work = _Conversation(sock, port, f"{seed}/{count.value}", honest).run
        threading.Thread(target=work, daemon=True).start()


class _Conversation:
    def __init__(self, sock: socket.socket, port: int, seed: str, honest: Any) -> None:
        self._sock = sock
        self._port = port
        self._random = random.Random(seed)
        self._honest = honest
        self._until = time.monotonic() + _LIFE_SECONDS

    def run(self) -> None:
        with contextlib.suppress(OSError), self._sock:
            self._sock.settimeout(_LIFE_SECONDS)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = self._sock.makefile("rb")
            while self._is_alive() and (words := _words(stream)):
                self._answer(words)

    def _is_alive(self) -> bool:
        return time.monotonic() < self._until and not self._honest.value

    def _answer(self, words: list[bytes]) -> None:
        r = self._random
        if r.random() >= _NONSENSE_SHARE:
            self._sock.sendall(self._good(words))
            return
        answer = r.choice(NONSENSE)(r)
        how = r.choice([self._all, self._part, self._slowly, self._for_ever, self._nothing])
        how(answer)

    def _all(self, answer: bytes) -> None:
        self._sock.sendall(answer)

    def _part(self, answer: bytes) -> None:
        self._sock.sendall(answer[: self._random.randrange(len(answer))])
        self._hang_up()

    def _slowly(self, answer: bytes) -> None:
        for byte in answer:
            if not self._is_alive():
                break
            self._sock.sendall(bytes([byte]))
            time.sleep(0.01)

    def _for_ever(self, answer: bytes) -> None:
        self._sock.sendall(answer)
        piece = self._random.choice(
            [bytes(_PIECE), b"+" * _PIECE, b"*1\r\n" * 16384, b":1\r\n" * 16384]
        )
        while self._is_alive():
            self._sock.sendall(piece)

    def _nothing(self, answer: bytes) -> None:
        while self._is_alive():
            time.sleep(0.05)

    def _hang_up(self) -> None:
        if self._random.random() < 0.5:
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        raise ConnectionAbortedError

    def _good(self, words: list[bytes]) -> bytes:
        r = self._random
        match words[0].upper():
            case b"EXISTS":
                return b":%d\r\n" % r.randrange(5)
            case b"STRLEN":
                return b":%d\r\n" % r.choice([0, 3200])
            case b"GET" | b"GETEX":
                length = r.choice([3200, r.randrange(161, 3200)])  # of a value as it is, compressed
                return r.choice([b"$-1\r\n", b"$%d\r\n%b\r\n" % (length, r.randbytes(length))])
            case b"CLUSTER":
                return _slots((0, 16383, b"127.0.0.1", self._port))
            case b"SENTINEL":
                digits = b"%d" % self._port
                return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(digits), digits)
            case b"INFO":
                return b"$14\r\nmaxmemory:5\r\n\n\r\n"
            case b"EXEC":
                return r.choice([b"*-1\r\n", b"*1\r\n:1\r\n"])
        return b"+OK\r\n"


class _Pipe:
    """Leads to the real server."""

    def __init__(self, sock: socket.socket, port: int) -> None:
        self._client = sock
        self._server = socket.create_connection(("127.0.0.1", port))

    def run(self) -> None:
        threading.Thread(target=self._copy, args=(self._server, self._client), daemon=True).start()
        self._copy(self._client, self._server)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _words(stream: Any) -> list[bytes]:
    """One command; empty at the end of the stream."""
    line = stream.readline()
    if not line.startswith(b"*"):
        return []
    words = []
    for _ in range(int(line[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length + 2)[:-2])
    return words
