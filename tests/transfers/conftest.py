"""Engines that all cases share: one prefill engine, two decode engines.

A case runs once for each way of moving KV in ``WAYS``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.p2p_engines import DEADLINE_SECONDS, Engines, kv_transfer, running
from tests.support.redis.servers import free_ports

Way = Callable[..., dict[str, Any]]
"""``(role, port, **settings)``: the JSON of ``--kv-transfer-config``."""


def by_peers(role: str, port: int, **settings: Any) -> dict[str, Any]:
    """The decode engine loads from the CPU tier of the prefill engine."""
    shared = {"hash_key": "shared by all of them", "cpu_gib": 0.5, "audit_share": 0.0}
    # By default 30 s, in which a slow or busy machine does not compute all the prompts of a case.
    shared |= {"transfer_deadline_seconds": DEADLINE_SECONDS} | settings
    return kv_transfer(role, port, **{k: v for k, v in shared.items() if v is not None})


_FOLDER = tempfile.TemporaryDirectory(prefix="lmc-transfers-")


def by_memory(role: str, port: int, **settings: Any) -> dict[str, Any]:
    """The same for engines that find each other on this host: chunks are copied from the peer's
    memory."""
    return by_peers(role, port, host_sharing=True, host_folder=f"{_FOLDER.name}/host", **settings)


WAYS: dict[str, Way] = {"peers": by_peers, "memory": by_memory}


@pytest.fixture(scope="session", params=["peers", pytest.param("memory", marks=pytest.mark.soak)])
def way_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def way(way_name: str) -> Way:
    return WAYS[way_name]


@pytest.fixture(scope="session")
def engines(
    way: Way, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """The prefill engine computes long prompts in several steps."""
    ports = [free_ports(1) for _ in range(3)]
    roles = "kv_producer", "kv_consumer", "kv_consumer"
    transfers = [way(role, port) for role, port in zip(roles, ports, strict=True)]
    folder = tmp_path_factory.mktemp("transfers")
    with running(tiny_model, folder, transfers, max_num_batched_tokens=[512, None, None]) as found:
        pairs = list(zip(found, ports, strict=True))
        yield Engines(pairs[:1], pairs[1:], count())
        mapped = [each.counts().total("peer_mapped_chunks") for each in found[1:]]
        assert any(mapped) == (way is by_memory)
