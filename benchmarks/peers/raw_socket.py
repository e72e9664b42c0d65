"""Two processes and a TCP connection with no work around it: the limit for KV transfers."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

from benchmarks.peers.places import num_places, places

_PIECES = (1 << 20, 1 << 22, 1 << 24, 1 << 40)
"""Bytes per call; the fastest counts. The last is the whole transfer."""


class RawSocket:
    """Another process that sends ``num_bytes`` on request."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._places = num_bytes, places(num_bytes)
        self._target = _memory(num_bytes * num_places(num_bytes))
        self._listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        port = self._listener.getsockname()[1]
        self._process = context.Process(target=_send_for_ever, args=(theirs, port, num_bytes))

    def __enter__(self) -> RawSocket:
        self._process.start()
        self._socket, _ = self._listener.accept()
        for _ in range(num_places(self._num_bytes)):
            self._once(_PIECES[0])  # unmeasured
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send_bytes(json.dumps(False).encode())
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self._socket.close()
        self._listener.close()

    def gbps(self) -> float:
        """The fastest of several ways, from the first to the last received byte."""
        return max(self._once(piece_bytes) for piece_bytes in _PIECES)

    def _once(self, piece_bytes: int) -> float:
        self._pipe.send_bytes(json.dumps(True).encode())
        place = next(self._places)
        target = self._target[place : place + self._num_bytes]
        done = self._socket.recv_into(target[:1])
        started = time.perf_counter()
        while done < len(target):
            piece = target[done : done + piece_bytes]
            done += self._socket.recv_into(piece, len(piece), socket.MSG_WAITALL)
        return len(target) / (time.perf_counter() - started) / 1e9


def _memory(num_bytes: int) -> memoryview:
    """Memory as transfers use it, touched before."""
    import torch

    return memoryview(torch.ones(num_bytes, dtype=torch.uint8).numpy())


def _send_for_ever(pipe: Connection, port: int, num_bytes: int) -> None:
    source, offsets = _memory(num_bytes * num_places(num_bytes)), places(num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while json.loads(pipe.recv_bytes()):
            place = next(offsets)
            connection.sendall(source[place : place + num_bytes])
