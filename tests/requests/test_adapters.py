"""Stamps notice every change of an adapter's files; a digest is of one state of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_connector.requests.adapters import AdapterDigests, adapter_stamp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"one")
    return tmp_path


def test_a_change_that_keeps_size_and_times_is_noticed(folder: Path) -> None:
    file = folder / "adapter_model.bin"
    before, times = adapter_stamp(folder), file.stat()
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # sets ctime only
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert adapter_stamp(folder) != before
    digests = AdapterDigests()
    with pytest.raises(OSError, match="changed"):
        digests.digest(folder, before)


def test_the_digest_is_of_the_files_that_vllm_reads(folder: Path) -> None:
    digests = AdapterDigests()
    binary = digests.digest(folder)
    (folder / "README.md").write_text("notes")
    assert digests.digest(folder) == binary
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    assert digests.digest(folder) != binary, "vLLM prefers it"
    (folder / "adapter_model.bin").write_bytes(b"left over")
    preferred = digests.digest(folder)
    (folder / "adapter_model.bin").unlink()
    assert digests.digest(folder) == preferred
    (folder / "adapter_config.json").write_text('{"r": 8}')
    assert digests.digest(folder) != preferred


def test_a_link_to_another_folder_is_another_adapter(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "v1")
    digests = AdapterDigests()
    before, stamp = digests.digest(link), adapter_stamp(link)
    link.unlink()
    link.symlink_to(tmp_path / "v2")
    assert adapter_stamp(link) != stamp
    assert digests.digest(link) != before
