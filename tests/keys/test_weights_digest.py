"""A model is what its bytes are, wherever they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lmcache_connector.keys.weights_digest import directory_digest

SHAPES = {"embed": (300, 128), "layer.0": (64, 64), "layer.1": (7,), "head": (1,)}


def weights(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    tensors = {
        name: chance.integers(0, 256, shape, dtype=np.uint8) for name, shape in SHAPES.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def start_of_data(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_the_same_weights_elsewhere_are_the_same(tmp_path: Path) -> None:
    folder = weights(tmp_path / "here")
    elsewhere = tmp_path / "there"
    shutil.copytree(folder, elsewhere)
    (elsewhere / "model.safetensors").rename(elsewhere / "other-name.safetensors")
    (elsewhere / "README.md").write_text("notes")
    assert directory_digest(folder) == directory_digest(elsewhere)


@given(at=st.integers(0, 300 * 128 - 1))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_counts(tmp_path: Path, at: int) -> None:
    folder = weights(tmp_path / "m")
    file = folder / "model.safetensors"
    before = directory_digest(folder)
    flip(file, start_of_data(file) + at)
    assert directory_digest(folder) != before


def test_64_retrained_rows_of_32_000_are_another_model(tmp_path: Path) -> None:
    """A digest of samples took them for the same."""
    rows = np.random.default_rng(0).integers(0, 256, (32_000, 64), dtype=np.uint8)
    save_file({"embed_tokens.weight": rows}, tmp_path / "model.safetensors")
    before = directory_digest(tmp_path)
    rows[16_000:16_064] += 1
    save_file({"embed_tokens.weight": rows}, tmp_path / "model.safetensors")
    assert directory_digest(tmp_path) != before


def test_another_layout_or_length_is_another_model(tmp_path: Path) -> None:
    digests = set()
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        for shard in range(count):
            (folder / f"model-{shard}.bin").write_bytes(b"\0" * 100)
        digests.add(directory_digest(folder))
    (tmp_path / "3" / "model-0.bin").write_bytes(b"\0" * 101)
    digests.add(directory_digest(tmp_path / "3"))
    assert len(digests) == 4


def test_no_weights_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert directory_digest(tmp_path) is None


def test_a_format_may_ask_for_other_files(tmp_path: Path) -> None:
    folder = weights(tmp_path / "m")
    (folder / "model.bin").write_bytes(b"torch")
    plain, torch = directory_digest(folder), directory_digest(folder, suffixes=(".bin",))
    assert plain != torch
    (folder / "model.bin").write_bytes(b"other")
    assert directory_digest(folder) == plain
    assert directory_digest(folder, suffixes=(".bin",)) != torch


def test_files_of_no_size_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    assert directory_digest(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno"):
        directory_digest(tmp_path / "gone", suffixes=()) or (tmp_path / "gone").stat()
