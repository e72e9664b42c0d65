"""The ports of an instance that hands over KV: are they free, and may we have them?"""

from __future__ import annotations

import contextlib

from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.sockets import listening_socket
from lmcache_connector.p2p.errors import AddressError, PeerError


def check_ports(config: P2PConfig, port: int, *, receives: bool) -> Finding:
    """Whether this host lets us listen on them. ``receives``: KV comes in at a port of its own."""
    host = config.bind_host or config.host
    data_port = config.data_port if receives else None
    if data_port == port:
        detail = f"kv_port and data_port are both {port}"
        return Finding("ports", "error", detail, "leave data_port out, or choose another")
    try:
        _try_ports(host, port, data_port)
    except (PeerError, AddressError) as error:
        hint = "stop what listens there or choose other ports; bind_host is an address of this host"
        return Finding("ports", "error", str(error), hint)
    detail = f"{host}: {port}, and one more for each further rank"
    if data_port:
        apart = abs(data_port - port)
        detail += f"; KV at {data_port}, and so on; from {apart + 1} ranks on the two meet"
    elif receives:
        detail += "; KV at any free port"
    return Finding("ports", "ok", detail)


def _try_ports(host: str, control_port: int, data_port: int | None) -> None:
    """Bind both at once and let go of them.

    ``data_port`` 0 is any, ``None`` is for a rank that receives nothing. Raises ``PeerError`` or
    ``AddressError``.
    """
    with contextlib.ExitStack() as stack:
        if data_port is not None:
            stack.enter_context(listening_socket(host, data_port))
        stack.enter_context(listening_socket(host, control_port))
