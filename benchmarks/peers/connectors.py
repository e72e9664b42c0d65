"""The connectors to compare with, each run as its makers intend.

``LMCacheMPConnector`` needs ``lmcache server`` beside it; without a GPU the server must let the
engine copy (``--supported-transfer-mode auto``). The others run as shipped; vLLM's own two need a
memory size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import running_process, wait_until_healthy
from tests.support.redis.servers import free_port

_START_SECONDS = 240.0


def transfers(cpu_bytes: int = 2 << 30) -> dict[str, dict[str, Any]]:
    """``--kv-transfer-config`` of connectors without a server, by their names in results.
    ``cpu_bytes``: memory of vLLM's own two."""
    offload = {"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes}}
    return {
        "lmcache_v1": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        "vllm_offloading": {"kv_connector": "OffloadingConnector", **offload},
        "vllm_simple_offload": {"kv_connector": "SimpleCPUOffloadConnector", **offload},
    }


def let_numba_come_early() -> None:
    """Lets vLLM's CPU worker start in a process where LMCache has imported numba.

    The worker reads the ``__dict__`` of every object. llvmlite's library handle takes any attribute
    for a C function, ``__dict__`` too, and the start would fail with an ``AttributeError``.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


@contextmanager
def lmcache_server(log: Path, gib: float, *more: str) -> Iterator[dict[str, Any]]:
    """``lmcache server`` with ``gib`` of memory and the arguments ``more``; yields its
    ``--kv-transfer-config``.

    Raises :class:`~tests.support.processes.ServerError` if it does not start.
    """
    port, http_port = free_port(), free_port()
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server"),
        *("--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)),
        *("--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
        *("--l1-size-gb", str(gib), "--l1-init-size-gb", "1", "--disable-metrics"),
        *more,
    ]
    with running_process(command, log, {"LMCACHE_TRACK_USAGE": "false"}) as server:
        health = f"http://127.0.0.1:{http_port}/healthcheck"
        wait_until_healthy(server, health, _START_SECONDS, log)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
            },
        }


def reason(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
