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

from lmcache_connector.keys.weights_digest import config_digest, directory_digest

MODES = ("sampled", "full")
SHAPES = {"embed": (300, 128), "layer.0": (64, 64), "layer.1": (7,), "head": (1,)}


def weights(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    tensors = {
        name: chance.integers(0, 256, shape, dtype=np.uint8) for name, shape in SHAPES.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def ranges(file: Path) -> dict[str, tuple[int, int]]:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {
        name: (8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_weights_elsewhere_are_the_same(tmp_path: Path, mode: str) -> None:
    folder = weights(tmp_path / "here")
    elsewhere = tmp_path / "there"
    shutil.copytree(folder, elsewhere)
    (elsewhere / "model.safetensors").rename(elsewhere / "other-name.safetensors")
    (elsewhere / "README.md").write_text("notes")
    assert directory_digest(folder, mode) == directory_digest(elsewhere, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("name", SHAPES)
def test_the_first_and_last_byte_of_every_tensor_count(
    tmp_path: Path, name: str, end: int, mode: str
) -> None:
    folder = weights(tmp_path / "m")
    before = directory_digest(folder, mode)
    begin, stop = ranges(folder / "model.safetensors")[name]
    flip(folder / "model.safetensors", begin if end == 0 else stop - 1)
    assert directory_digest(folder, mode) != before


@given(at=st.integers(0, 300 * 128 - 1))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_full_sees_every_byte(tmp_path: Path, at: int) -> None:
    folder = weights(tmp_path / "m")
    before = directory_digest(folder, "full")
    flip(folder / "model.safetensors", ranges(folder / "model.safetensors")["embed"][0] + at)
    assert directory_digest(folder, "full") != before


@pytest.mark.parametrize("mode", MODES)
def test_another_layout_or_length_is_another_model(tmp_path: Path, mode: str) -> None:
    digests = set()
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        for shard in range(count):
            (folder / f"model-{shard}.bin").write_bytes(b"\0" * 100)
        digests.add(directory_digest(folder, mode))
    (tmp_path / "3" / "model-0.bin").write_bytes(b"\0" * 101)
    digests.add(directory_digest(tmp_path / "3", mode))
    assert len(digests) == 4


def test_the_modes_never_meet(tmp_path: Path) -> None:
    folder = weights(tmp_path / "m")
    assert directory_digest(folder, "sampled") != directory_digest(folder, "full")


def test_no_weights_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert directory_digest(tmp_path, "sampled") is None


@pytest.mark.parametrize("mode", MODES)
def test_files_of_no_size_are_no_trouble(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    assert directory_digest(tmp_path, mode)


def header(content: object, size: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        header({}, size=2**63),
        header({}, size=9),
        header(b"not json"),
        header(b"\xff\xff"),
        header(b"[" * 100_000 + b"]" * 100_000),
        header([1]),
        header({"t": 1}),
        header({"t": {}}),
        header({"t": {"data_offsets": "ab"}}),
        header({"t": {"data_offsets": [1]}}),
        header({"t": {"data_offsets": []}}),
        header({"t": {"data_offsets": [None, 3]}}),
        header({"t": {"data_offsets": [-5, 3]}}) + b"abc",
        header({"t": {"data_offsets": [3, 0]}}) + b"abc",
        header({"t": {"data_offsets": [0, 4]}}) + b"abc",
        header({"t": {"data_offsets": [0, 10**30]}}) + b"abc",
        header({"a": {"data_offsets": [0, 1]}, "b": {"data_offsets": {}}}) + b"abc",
        header(b'{"t": {"data_offsets": [0, 1e999]}}') + b"abc",
    ],
)
def test_an_unsound_header_is_an_error_in_words(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(OSError, match="not a sound safetensors file"):
        directory_digest(tmp_path, "sampled")


def test_a_configuration_is_what_it_computes_not_what_it_is_called() -> None:
    base = {"hidden_size": 64, "rope": {"theta": 1e4}, "dtype": object}
    named = base | {"_name_or_path": "/elsewhere", "transformers_version": "9"}
    assert config_digest(base) == config_digest(named)
    nested = {"text_config": base, "layers": [base]}
    assert config_digest(nested) == config_digest({"text_config": named, "layers": [named]})
    assert config_digest(nested) != config_digest(nested | {"layers": [base, base]})
    assert config_digest(base) != config_digest(base | {"hidden_size": 65})
    assert config_digest(base) != config_digest(base | {"rope": {"theta": 1e5}})
