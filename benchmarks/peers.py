"""The other connectors the benchmarks compare with, each as its makers mean it to be run.

``LMCacheMPConnector`` needs ``lmcache server`` beside it; without a GPU that server must be told to
let the engine do the copying (``--supported-transfer-mode auto``). The others run as shipped;
vLLM's own two need to be told how much memory they may use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import free_port

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0

_OFFLOAD = {"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30}}
TRANSFERS: dict[str, dict[str, Any]] = {
    "lmcache_v1": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "vllm_offloading": {"kv_connector": "OffloadingConnector", **_OFFLOAD},
    "vllm_simple_offload": {"kv_connector": "SimpleCPUOffloadConnector", **_OFFLOAD},
}
"""``--kv-transfer-config`` of those that need no server, by the name they have in results."""


class PeerError(RuntimeError):
    """A peer does not run here. The first line of the message says why."""


def let_numba_come_early() -> None:
    """For an engine in a process where LMCache imports numba before vLLM's CPU worker starts.

    The worker looks at the ``__dict__`` of everything there is. llvmlite's handle of its library
    takes any name for a C function, that one too, and the start ends in an ``AttributeError``.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


@contextmanager
def lmcache_server(log: Path, gib: float) -> Iterator[dict[str, Any]]:
    """``lmcache server`` with ``gib`` of memory; yields the ``--kv-transfer-config`` to reach it.

    Raises :class:`PeerError` when it does not start.
    """
    port, http_port = free_port(), free_port()
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server"),
        *("--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)),
        *("--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
        *("--l1-size-gb", str(gib), "--l1-init-size-gb", "1", "--disable-metrics"),
    ]
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        _wait_until_healthy(server, http_port, log)
        settings = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
    finally:
        server.terminate()
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def reason(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _wait_until_healthy(server: subprocess.Popen[bytes], http_port: int, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/healthcheck", timeout=1).close()
            return
        except OSError:  # not there yet, or it answers that it is not ready
            time.sleep(0.2)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise PeerError(f"lmcache server does not start: {''.join(last)}")
