"""Whether the ports of an instance can be had on this host, found out as its rank 0 would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from lmcache_connector.p2p.control import bound_socket
from lmcache_connector.p2p.tcp_transport import listening_socket


def try_ports(host: str, control_port: int, data_port: int | None) -> None:
    """Bind both at once and let go of them. ``data_port``: 0 is any, ``None`` for a rank that
    receives nothing. Raises ``PeerError``."""
    with _context() as context, contextlib.ExitStack() as stack:
        if data_port is not None:
            stack.enter_context(listening_socket(host, data_port))
        stack.enter_context(contextlib.closing(bound_socket(context, host, control_port)))


@contextlib.contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Its end waits until the ports are free again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        yield context
    finally:
        context.destroy(linger=0)
