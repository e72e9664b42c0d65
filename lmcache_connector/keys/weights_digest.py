"""Identity of weights by what they are, not by where they lie.

The same model folder under another path, served name or host gets the same digest; a changed byte,
or a file of another name, makes another. Loaders choose files by their names, and an index refers
to them by name, so names count. What of a folder no loader computes with is excused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from lmcache_connector.keys.file_digests import file_digests
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.prefix_hash import canonical_bytes

_TOKENS = "turns text into token ids, which are in the keys"
_TRAINING = "what training left behind; vLLM reads none of it"
_POOLING = "concerns what is done with the model's output"

EXCUSED_FILES: MappingProxyType[str, str] = MappingProxyType(
    {
        "config.json": "what vLLM resolves from it is in the keys",
        "params.json": "what vLLM resolves from it is in the keys",
        "generation_config.json": "sampling",
        "tokenizer.json": _TOKENS,
        "tokenizer_config.json": _TOKENS,
        "special_tokens_map.json": _TOKENS,
        "added_tokens.json": _TOKENS,
        "vocab.json": _TOKENS,
        "tekken.json": _TOKENS,
        "chat_template.json": _TOKENS,
        "modules.json": _POOLING,
        "sentence_bert_config.json": _POOLING,
        "config_sentence_transformers.json": _POOLING,
        "trainer_state.json": _TRAINING,
        "all_results.json": _TRAINING,
        "train_results.json": _TRAINING,
        "eval_results.json": _TRAINING,
        "training_args.bin": _TRAINING,
        "optimizer.bin": _TRAINING,
        "optimizer.pt": _TRAINING,
        "scheduler.pt": _TRAINING,
        "scaler.pt": _TRAINING,
    }
)
"""JSON and weight files in a model folder that are no part of its identity, each with its reason.

Every other JSON file counts: an index chooses among the weight files, others hold scales and which
layers are quantized how.
"""


def files_digest(files: Mapping[str, Path], kept: KeptDigests | None = None) -> str:
    """Hexadecimal digest of files by their names, the keys, and what they hold.

    ``kept``: digests of earlier starts; ``None``: read every byte. Raises ``OSError`` if a file
    cannot be read.
    """
    names = sorted(files)
    digests = file_digests([files[name] for name in names], kept)
    pairs = [[name, digest.hex()] for name, digest in zip(names, digests, strict=True)]
    return str(blake3(canonical_bytes(["sha256", pairs])).hexdigest())


def weight_files(
    path: Path, suffixes: Sequence[str], *, in_subfolders: bool = False
) -> dict[str, Path]:
    """All files of the first suffix of which there is one, as a loader picks them; none if there is
    none. ``path``: a folder, or the one file, whose name then says nothing."""
    if path.is_file():
        return {"": path}
    files = list(_files_below(path)) if in_subfolders else list(path.glob("*"))
    for suffix in suffixes:
        if found := _named(files, suffix, path):
            return found
    return {}


def side_files(folder: Path) -> dict[str, Path]:
    """JSON files beside the weights that a loader may compute with."""
    return _named(folder.glob("*"), ".json", folder)


def code_files(folder: Path) -> dict[str, Path]:
    """The Python files of a model that brings its own code, packages included."""
    return _named(_files_below(folder), ".py", folder)


def _named(files: Iterable[Path], suffix: str, folder: Path) -> dict[str, Path]:
    return {
        str(file.relative_to(folder)): file
        for file in files
        if file.suffix == suffix and file.name not in EXCUSED_FILES and file.is_file()
    }


def _files_below(folder: Path) -> Iterable[Path]:
    """Also behind links, as imports and loaders follow them; not in hidden folders."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(root))
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(Path(root, name)) not in seen
        ]
        yield from (Path(root, name) for name in names)
