"""Permission to use AMX, the CPU's tile registers, asked of the kernel in time.

A process has to ask once. oneDNN does so with the first large matrix product, vLLM's CPU attention
not at all: an instance whose very first forward pass is a decode step, because its prompt's KV came
from elsewhere, would die of an illegal instruction.
"""

from __future__ import annotations

import torch


def ask_for_amx() -> bool:
    """Whether the process may use it; ``False`` where there is none."""
    granted: bool = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return granted
