"""The device of real storms, rehearsed without a GPU: it finds wrong KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_storms.cuda_device import HostDevice
from benchmarks.gpu_storms.passes import BLOCK_SIZE, MODEL, GpuShape, Work, digests_of

PROMPT = list(range(5 * BLOCK_SIZE))
TABLE = (3, 1, 7, 0, 4)
SHAPE = GpuShape(
    model=replace(MODEL, num_layers=2, num_kv_heads=2, num_heads=2, head_dim=16), num_blocks=8
)


def work(start: int, end: int) -> Work:
    return Work("r", TABLE, digests_of(PROMPT), start, end)


@pytest.fixture
def device() -> HostDevice:
    """It has computed the first four blocks of a prompt, in two passes."""
    device = HostDevice(SHAPE)
    device.launch(0.0, TABLE, [work(0, 40)])
    device.launch(0.0, TABLE, [work(40, 64)])
    return device


@pytest.mark.parametrize("layer", SHAPE.layer_names)
def test_one_wrong_byte_is_found(device: HostDevice, layer: str) -> None:
    device.kv_caches[layer].view(torch.uint8)[7, 1, 15, -1] ^= 1
    device.launch(0.0, TABLE, [work(64, 80)])
    with pytest.raises(RuntimeError, match=r"WRONG BYTES.* 1 wrong words"):
        device.check()
