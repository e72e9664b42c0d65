"""Files are hashed once: digests come from names, earlier starts, or bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmcache_connector.keys import file_digests as module
from lmcache_connector.keys.file_digests import file_digests
from lmcache_connector.keys.kept_digests import MAX_ENTRIES, KeptDigests, Signature
from lmcache_connector.keys.weights_digest import code_files, files_digest, side_files, weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose bytes were read, in order."""
    found: list[Path] = []
    plain = module._sha256

    def spied(file: Path) -> object:
        found.append(file)
        return plain(file)

    monkeypatch.setattr(module, "_sha256", spied)
    return found


def old_file(path: Path, data: bytes) -> Path:
    """A file that was written long ago, by its own times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file counts as unchanged at once, not after two seconds."""
    monkeypatch.setattr(module, "_SETTLED_NS", -(10**12))


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_a_file_is_read_once(
    tmp_path: Path, folder: Path, reads: list[Path], settled: None
) -> None:
    files = [old_file(tmp_path / f"{i}.bin", bytes([i]) * 5_000_000) for i in range(3)]
    digests = [sha256(file.read_bytes()) for file in files]
    assert file_digests(files, KeptDigests(folder)) == digests
    assert sorted(reads) == files
    assert file_digests(files, KeptDigests(folder)) == digests
    assert sorted(reads) == files
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("change", ["content", "same times"])
def test_a_changed_file_is_read_again(
    tmp_path: Path, folder: Path, settled: None, change: str
) -> None:
    file = old_file(tmp_path / "a.bin", b"one")
    file_digests([file], KeptDigests(folder))
    before = file.stat()
    file.write_bytes(b"two")
    if change == "same times":  # ctime cannot be set back
        os.utime(file, ns=(10**18, 10**18))
        while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock ticks
            os.utime(file, ns=(10**18, 10**18))
    assert file_digests([file], KeptDigests(folder)) == [sha256(b"two")]


def test_a_file_just_written_is_not_remembered(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"one")
    for _ in range(2):
        assert file_digests([file], KeptDigests(folder)) == [sha256(b"one")]
    assert reads == [file, file]


def blob(tmp_path: Path, name: str, data: bytes) -> Path:
    """A link into a Hugging Face cache."""
    target = old_file(tmp_path / "hub" / "blobs" / name, data)
    link = tmp_path / "hub" / "snapshots" / "main" / "model.safetensors"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


def test_a_file_of_the_hub_is_named_by_its_digest(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    link = blob(tmp_path, sha256(b"data").hex(), b"data")
    copy = old_file(tmp_path / "copy" / "model.safetensors", b"data")
    assert file_digests([link], KeptDigests(folder)) == [sha256(b"data")]
    assert reads == []
    assert file_digests([copy], KeptDigests(folder)) == [sha256(b"data")]


def test_a_blob_replaced_by_a_copy_that_keeps_its_times_is_read(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    """``cp -p`` and ``rsync --inplace -t`` keep them."""
    link = blob(tmp_path, sha256(b"data").hex(), b"data")
    link.write_bytes(b"trained on")
    while link.stat().st_ctime_ns <= link.lstat().st_ctime_ns:  # the clock ticks
        os.utime(link, ns=(10**18, 10**18))
    assert file_digests([link], KeptDigests(folder)) == [sha256(b"trained on")]
    assert reads == [link]


@pytest.mark.parametrize("name", ["a" * 40, "g" * 64, "A" * 64])
def test_other_names_of_blobs_are_ignored(tmp_path: Path, folder: Path, name: str) -> None:
    link = blob(tmp_path, name, b"data")
    assert file_digests([link], KeptDigests(folder)) == [sha256(b"data")]


HOSTILE = [
    b"",
    b"not json",
    b"\xff\xfe",
    b"[" * 200_000,
    b"[]",
    b"7",
    b'{"%s": 7}',
    b'{"%s": "short"}',
    b'{"%s": {"a": 1}}',
    b'{"1:2": "' + b"0" * 64 + b'"}',
    b'{"pad": "' + b"0" * (1 << 20) + b'"}',
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_broken_cache_file_is_ignored_and_replaced(
    tmp_path: Path, folder: Path, settled: None, content: bytes
) -> None:
    file = old_file(tmp_path / "a.bin", b"one")
    signature = str(Signature.of(file.stat()))
    folder.mkdir()
    (folder / "digests.json").write_bytes(content.replace(b"%s", signature.encode()))
    assert file_digests([file], KeptDigests(folder)) == [sha256(b"one")]
    assert KeptDigests(folder).load() == {signature: sha256(b"one").hex()}


def lie(file: Path, folder: Path) -> Path:
    folder.mkdir()
    lying = folder / "digests.json"
    lying.write_text(json.dumps({str(Signature.of(file.stat())): "0" * 64}))
    return lying


def test_a_cache_file_that_others_can_write_is_ignored(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    file = old_file(tmp_path / "a.bin", b"one")
    lie(file, folder).chmod(0o666)
    assert file_digests([file], KeptDigests(folder)) == [sha256(b"one")]
    assert reads == [file]


def test_a_folder_in_its_place_is_ignored(folder: Path) -> None:
    (folder / "digests.json").mkdir(parents=True)
    assert KeptDigests(folder).load() == {}


def test_the_cache_is_bounded(folder: Path) -> None:
    kept = KeptDigests(folder)
    kept.add({f"1:{i}:3:4:5": "0" * 64 for i in range(MAX_ENTRIES)})
    kept.add({"1:1:1:1:1": "1" * 64})
    entries = kept.load()
    assert len(entries) == MAX_ENTRIES
    assert list(entries)[-1] == "1:1:1:1:1"
    assert "1:0:3:4:5" not in entries
    assert (folder / "digests.json").stat().st_mode & 0o777 == 0o600


# -- which files -----------------------------------------------------------------------------------


SUFFIXES = (".safetensors", ".bin", ".pt")


def directory_digest(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    return files_digest({**weight_files(folder, suffixes), **side_files(folder)})


def test_an_index_counts(tmp_path: Path) -> None:
    """The index names the files that are read."""
    folder = tmp_path / "m"
    folder.mkdir()
    digests = set()
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(name.encode())
    for name in ("a", "b"):
        index = f'{{"weight_map": {{"embed": "{name}.safetensors"}}}}'
        (folder / "model.safetensors.index.json").write_text(index)
        digests.add(directory_digest(folder))
    # The same files in the same order, under swapped names.
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    digests.add(directory_digest(folder))
    assert len(digests) == 3


def test_code_files_behind_links_count(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    (folder / "layers").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (folder / "model.py", folder / "layers" / "norm.py", elsewhere / "rope.py"):
        file.write_text("")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)  # a loop of links
    assert sorted(code_files(folder)) == ["layers/norm.py", "linked/rope.py", "model.py"]


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno"):
        files_digest({"gone": tmp_path / "gone"})
