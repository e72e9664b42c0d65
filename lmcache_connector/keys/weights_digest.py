"""Identity of a model by what it is, not by where it lies.

The same weights under another path, served name or host get the same digest; other weights do not.
``sampled`` reads the header of every weight file and some pieces of each tensor's bytes, a few
milliseconds per gigabyte; ``full`` reads everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECE_BYTES = 4096
_PIECES_PER_TENSOR = 4
_PIECES_PER_FILE = 1024
_MAX_HEADER_BYTES = 256 * 1024 * 1024

# Keys of a Hugging Face config, at any depth, that do not change KV: names, notes, and what decides
# about text. The dtype is vLLM's choice, and part of the model's root by itself.
_CONFIG_NOISE = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "_commit_hash",
        "dtype",
        "torch_dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_cache",
    }
)


def config_digest(hf_config: Mapping[str, object]) -> str:
    """Hexadecimal digest of a model's configuration, without the keys that do not change KV."""
    plain = json.loads(json.dumps(dict(hf_config), default=str))
    return blake3(canonical_bytes(_without_noise(plain))).hexdigest()


def _without_noise(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_noise(v) for k, v in value.items() if k not in _CONFIG_NOISE}
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value


def directory_digest(path: Path, mode: str) -> str | None:
    """Hexadecimal digest of the weight files in a directory, or of one file.

    ``mode`` is ``sampled`` or ``full``. Returns ``None`` if there are no weights. File names count
    only through their order, so a renamed copy of the same shards is the same. Raises ``OSError``
    if a file cannot be read or is not a sound safetensors file.
    """
    files = _weight_files(path)
    if not files:
        return None
    hasher = blake3(canonical_bytes([mode, len(files)]))
    for file in files:
        hasher.update(_file_digest(file, mode))
    return hasher.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    """All files of the first suffix that is there, as a loader would pick them."""
    if path.is_file():
        return [path]
    for suffix in _WEIGHT_SUFFIXES:
        files = sorted(file for file in path.glob(f"*{suffix}") if file.is_file())
        if files:
            return files
    return []


def _file_digest(file: Path, mode: str) -> bytes:
    if mode == "full":
        return blake3(max_threads=blake3.AUTO).update_mmap(file).digest()
    size = file.stat().st_size
    hasher = blake3(size.to_bytes(8, "little"))
    with file.open("rb", buffering=0) as handle:
        descriptor = handle.fileno()
        for offset, length in _pieces(file, descriptor, size):
            hasher.update(os.pread(descriptor, length, offset))
    return hasher.digest()


def _pieces(file: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths to sample: per tensor of a safetensors file, evenly over others."""
    if file.suffix != ".safetensors" or size < 8:
        yield from _spread(0, size, _PIECES_PER_FILE)
        return
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise OSError(f"{file} is not a sound safetensors file")
    yield 0, 8 + header_bytes
    try:
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        ranges = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1])) for t in tensors)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise OSError(f"{file} is not a sound safetensors file") from error
    for begin, end in ranges:
        if not 0 <= begin <= end <= size - 8 - header_bytes:
            raise OSError(f"{file} is not a sound safetensors file")
        yield from _spread(8 + header_bytes + begin, end - begin, _PIECES_PER_TENSOR)


def _spread(start: int, length: int, num_pieces: int) -> Iterator[tuple[int, int]]:
    """``num_pieces`` pieces over a byte range, its first and its last among them."""
    if length <= num_pieces * _PIECE_BYTES:
        if length > 0:
            yield start, length
        return
    for index in range(num_pieces):
        yield start + index * (length - _PIECE_BYTES) // (num_pieces - 1), _PIECE_BYTES
