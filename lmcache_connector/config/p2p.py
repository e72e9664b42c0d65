"""Settings of ``LMCacheP2PConnector``: those of the tiered connector, and where it serves.

``kv_port`` is vLLM's own setting, and its port the one that a peer server listens on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.errors import ConfigError
from lmcache_connector.peers.address import Address

_LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
_PULLED = "no setting any more, leave it out: decode instances fetch what has been computed"
_GONE = {
    "secret": "no setting any more: set 'hash_key', the same everywhere, which names and seals KV, "
    "and 'router_secret' for a proxy that wants signed registrations",
    "send_type": _PULLED,
    "transport": "no setting any more, leave it out: KV goes over the port that is 'kv_port'",
    "data_port": "no setting any more, leave it out: KV goes over the port that is 'kv_port'",
    "kv_buffer_size": "'cpu_gib' now, whose fourth may wait to be fetched",
    "overflow_bytes": "'cpu_gib' now, whose fourth may wait to be fetched",
    "buffer_wait_seconds": "no setting any more, leave it out: no prompt waits for room",
    "checksum": "no setting any more, leave it out: everything is verified",
    "unknown_grace_seconds": "no setting any more, leave it out: it is a second",
    "stall_seconds": "'redis_timeout_seconds' now",
    "peer_listen": "'host', 'bind_host' and vLLM's 'kv_port' here",
    "peer_host": "'host' here",
    "peer_insecure": "'insecure' here",
    **dict.fromkeys(
        ("kv_port", "kv_role", "engine_id", "kv_load_failure_policy"),
        "vLLM's own: put it beside 'kv_connector'",
    ),
}


def parse_p2p_config(
    extra_config: Mapping[str, Any], kv_port: int, *, loads: bool = True
) -> ConnectorConfig:
    """``loads``: ``kv_role`` has it fetch. Raises :class:`ConfigError`, one line per problem."""
    known = {key: value for key, value in extra_config.items() if key not in _GONE}
    problems = [f"{key!r} is {_GONE[key]}" for key in extra_config if key in _GONE]
    host = known.pop("host", "127.0.0.1")
    bind_host = known.pop("bind_host", None) or host
    listens: dict[str, Any] = {"peer_listen": _joined(bind_host, kv_port), "peer_host": host}
    listens["peer_insecure"] = known.pop("insecure", False)
    try:
        is_local = Address(host, 1).check().is_loopback
    except (TypeError, ValueError):
        is_local = True  # it is refused below
    if is_local:
        known.setdefault("peer_hosts", list(_LOOPBACK))
    elif loads and not known.get("peer_hosts"):
        problems.append("'peer_hosts': name the hosts that requests may have this instance dial")
    try:
        config = parse_config({**known, **listens})
    except ConfigError as error:
        problems += str(error).replace("'peer_insecure'", "'insecure'").splitlines()[1:]
    if problems:
        lines = "\n".join(f"  - {p.removeprefix('  - ')}" for p in problems)
        raise ConfigError(f"kv_connector_extra_config cannot be used:\n{lines}")
    return config


def _joined(host: object, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
