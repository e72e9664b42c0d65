"""Identity of weights by content, not by path.

The same model folder under another path, served name or host has the same digest; a changed byte or
file name changes it. File names count because loaders choose files by name, and an index refers to
names. Files in ``IGNORED_FILES`` do not count, for the reasons given there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from lmcache_connector.keys.file_digests import file_digests
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.keys.reasons import by_field

IGNORED_FILES = by_field(
    {
        "the values that vLLM resolves from it are in the keys": "config.json params.json",
        "it configures sampling": "generation_config.json",
        "it converts text to token ids, which are in the keys": (
            "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
            "vocab.json tekken.json chat_template.json"
        ),
        "it applies to the model's output": (
            "modules.json sentence_bert_config.json config_sentence_transformers.json"
        ),
        "training left it behind, and vLLM does not read it": (
            "trainer_state.json all_results.json train_results.json eval_results.json "
            "training_args.bin optimizer.bin optimizer.pt scheduler.pt scaler.pt"
        ),
    }
)
"""JSON and weight files in a model folder that are not part of its identity, with reasons. All
other JSON files count: an index selects weight files, others hold scales or quantization settings.
"""


def files_digest(files: Mapping[str, Path], kept: KeptDigests | None = None) -> str:
    """Hexadecimal digest of files by name (the keys) and content. ``kept``: cached digests;
    ``None``: read every byte. Raises ``OSError`` for an unreadable file.
    """
    names = sorted(files)
    digests = file_digests([files[name] for name in names], kept)
    pairs = [[name, digest.hex()] for name, digest in zip(names, digests, strict=True)]
    return str(blake3(canonical_bytes(["sha256", pairs])).hexdigest())


def weight_files(
    path: Path, suffixes: Sequence[str], *, in_subfolders: bool = False
) -> dict[str, Path]:
    """All files with the first suffix that occurs, as a loader picks them; empty without any.
    ``path``: a folder, or a single file, whose name does not count."""
    if path.is_file():
        return {"": path}
    files = list(_files_below(path)) if in_subfolders else list(path.glob("*"))
    for suffix in suffixes:
        if found := _named(files, suffix, path):
            return found
    return {}


def side_files(folder: Path) -> dict[str, Path]:
    """JSON files beside the weights that a loader may use."""
    return _named(folder.glob("*"), ".json", folder)


def code_files(folder: Path) -> dict[str, Path]:
    """Python files of a model with its own code, subpackages included."""
    return _named(_files_below(folder), ".py", folder)


def _named(files: Iterable[Path], suffix: str, folder: Path) -> dict[str, Path]:
    return {
        str(file.relative_to(folder)): file
        for file in files
        if file.suffix == suffix and file.name not in IGNORED_FILES and file.is_file()
    }


def _files_below(folder: Path) -> Iterable[Path]:
    """Follows links, as imports and loaders do; skips hidden folders."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(root))
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(Path(root, name)) not in seen
        ]
        yield from (Path(root, name) for name in names)
