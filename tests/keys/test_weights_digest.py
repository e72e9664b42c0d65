"""A model is what its bytes are, wherever they lie."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lmcache_connector.keys.weights_digest import (
    code_files,
    files_digest,
    side_files,
    weight_files,
)

SUFFIXES = (".safetensors", ".bin", ".pt")
SHAPES = {"embed": (300, 128), "layer.0": (64, 64), "layer.1": (7,), "head": (1,)}


def weights(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    tensors = {
        name: chance.integers(0, 256, shape, dtype=np.uint8) for name, shape in SHAPES.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def directory_digest(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    return files_digest({**weight_files(folder, suffixes), **side_files(folder)})


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
    (elsewhere / "README.md").write_text("notes")
    (elsewhere / "config.json").write_text("{}")  # counts as vLLM resolves it
    (elsewhere / "tokenizer.json").write_text("{}")
    (elsewhere / "checkpoint-500").mkdir()
    (elsewhere / "checkpoint-500" / "model.safetensors").write_bytes(b"")
    assert directory_digest(folder) == directory_digest(elsewhere)


@given(at=st.integers(0, 300 * 128 - 1))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_byte_counts(tmp_path: Path, at: int) -> None:
    folder = weights(tmp_path / "m")
    file = folder / "model.safetensors"
    before = directory_digest(folder)
    flip(file, start_of_data(file) + at)
    assert directory_digest(folder) != before


def test_an_index_counts(tmp_path: Path) -> None:
    """It says which of the files are read."""
    folder = tmp_path / "m"
    folder.mkdir()
    digests = set()
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(name.encode())
    for name in ("a", "b"):
        index = f'{{"weight_map": {{"embed": "{name}.safetensors"}}}}'
        (folder / "model.safetensors.index.json").write_text(index)
        digests.add(directory_digest(folder))
    # The same files in the same order, under the names that this index means otherwise.
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    digests.add(directory_digest(folder))
    assert len(digests) == 3


def test_code_in_packages_counts_also_behind_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    (folder / "layers").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (folder / "model.py", folder / "layers" / "norm.py", elsewhere / "rope.py"):
        file.write_text("")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)  # no endless walk
    assert sorted(code_files(folder)) == ["layers/norm.py", "linked/rope.py", "model.py"]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno"):
        files_digest({"gone": tmp_path / "gone"})
