"""Engines that hand KV over by vLLM's own ``NixlConnector``, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.engines.instance import VllmInstance, set_environment
from tests.support.engines.p2p_engines import running
from tests.support.engines.ports import free_ports
from tests.support.engines.probe import EngineProbe


def nixl_transfer(role: str) -> dict[str, Any]:
    """Part of the JSON of ``--kv-transfer-config``."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@contextmanager
def running_nixl(
    model: Path, folder: Path, transfers: Sequence[dict[str, Any]], **args: Any
) -> Iterator[list[VllmInstance]]:
    """Engines that start at the same time, each on a core of its own."""
    cores, prepares = sorted(os.sched_getaffinity(0)), []
    for index in range(len(transfers)):
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)),
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)]),
        }
        prepares.append(partial(set_environment, environment))
    with running(model, folder, transfers, prepare=prepares, **args) as instances:
        yield instances


def nixl_transferred(probe: EngineProbe) -> tuple[float, float, float]:
    """Bytes that vLLM's connector has fetched here so far, the seconds of its transfers, and how
    many failed."""
    from prometheus_client import REGISTRY

    probe.serve([1] * 10)  # vLLM counts with the next step
    names = (
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_xfer_time_seconds_sum",
        "vllm:nixl_num_failed_transfers_total",
    )
    sums = dict.fromkeys(names, 0.0)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += float(sample.value)
    return sums[names[0]], sums[names[1]], sums[names[2]]
