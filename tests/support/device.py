"""What tests need to know of the machine."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the models run that no engine places."""
NEEDS_FP8_KV = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="runs on a CPU with AVX-512 or AMX: others have no KV of 8 bits in vLLM",
)
