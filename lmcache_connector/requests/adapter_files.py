"""What a LoRA adapter is: the content of the files vLLM reads of it, nothing of where they lie."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM reads the first that is there (``LoRAModel.from_local_checkpoint``)."""
_MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Tells a file from what it was before: writing to it, or replacing it, changes the stamp.

    Nobody can set ``changed_ns``, the time of the last change as the file system keeps it.
    """

    path: str
    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


AdapterStamp = tuple[FileStamp, ...]


def adapter_stamp(folder: Path) -> AdapterStamp:
    """Of the files that vLLM reads of an adapter. Raises ``OSError`` if it is none."""
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder} holds no adapter weights")
    return _stamp(folder / _CONFIG), _stamp(weights)


def _stamp(file: Path) -> FileStamp:
    stat = file.stat()
    return FileStamp(
        str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    )


class AdapterDigests:
    """Hexadecimal digests of adapters; files are read again once their stamps have changed.

    Calls may take seconds. One thread makes them.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[AdapterStamp, str] = OrderedDict()

    def digest(self, folder: Path, stamp: AdapterStamp | None = None) -> str:
        """With ``stamp``, of the files as they were then.

        Raises ``OSError`` if they cannot be read, or change meanwhile, or have changed since.
        """
        stamp = stamp or adapter_stamp(folder)
        digest = self._known.get(stamp)
        if digest is None:
            digest = _digest_files(stamp)
        if adapter_stamp(folder) != stamp:
            raise OSError(f"the adapter in {folder} is being changed")
        self._known[stamp] = digest
        self._known.move_to_end(stamp)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return digest


def _digest_files(stamp: AdapterStamp) -> str:
    hasher = blake3()
    for file in map(Path, (each.path for each in stamp)):
        # Its ending says how it is read. Both parts have a fixed length.
        hasher.update(blake3(file.suffix.encode()).digest())
        hasher.update(blake3().update_mmap(file).digest())
    return str(hasher.hexdigest())


def adapter_name(digest: str, is_3d: bool) -> str:
    """What tells an adapter from others: its content, and how vLLM is told to read it."""
    return f"{digest}:3d" if is_3d else digest
