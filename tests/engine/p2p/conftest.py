"""A prefill and a decode engine that several tests use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.engines.p2p_engines import Engines, kv_transfer, running
from tests.support.engines.ports import free_ports


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """One of each; the prefill engine computes long prompts in several steps."""
    ports = free_ports(1), free_ports(1)
    transfers = [
        kv_transfer("kv_producer", ports[0], audit_share=0.0, cpu_gib=0.5),
        kv_transfer("kv_consumer", ports[1], audit_share=0.0, cpu_gib=0.5),
    ]
    with running(
        tiny_model,
        tmp_path_factory.mktemp("engines"),
        transfers,
        max_num_batched_tokens=[512, None],
    ) as (prefill, decode):
        yield Engines([(prefill, ports[0])], [(decode, ports[1])], count())
