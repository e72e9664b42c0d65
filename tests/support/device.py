"""Where the models of tests run that no engine places: on a GPU if torch sees one."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
