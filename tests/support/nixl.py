"""Tests that need NIXL."""

from __future__ import annotations

import importlib.util

import pytest

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None or importlib.util.find_spec("nixl_cu13") is None,
    reason="runs where the wheels nixl and nixl-cu13 are installed: there are some for Linux",
)
