"""Identity of the weights an engine loads: the content of the files vLLM reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.weights_digest import code_files, files_digest, side_files, weight_files
from lmcache_connector.vllm_compat.drafter import find_drafter
from lmcache_connector.weight_names import WeightFiles

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_SAFETENSORS = (".safetensors",)
_ANY = (".safetensors", ".bin", ".pt", ".gguf")
# Load formats that read a model's folder directly, with the suffixes they look for, in order.
# Others read other places, or files they made at an earlier start.
_READ_FROM_FOLDER = {
    "auto": _ANY,
    "hf": _ANY,
    "bitsandbytes": _ANY,
    "gguf": (".gguf",),
    "pt": (".pt",),
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "mistral": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "runai_streamer_sharded": _SAFETENSORS,
    "sharded_state": _SAFETENSORS,
}

# Architectures with weights in subfolders of the model's folder.
WEIGHTS_IN_SUBFOLDERS = frozenset(
    {
        "Cosmos3EdgeForConditionalGeneration",
        "Cosmos3ForConditionalGeneration",
        "MiMoV2OmniForCausalLM",
        "MoonshotKimiaForCausalLM",
    }
)
# Configuration fields that name other models whose weights are loaded (Ultravox).
WEIGHTS_OF_OTHERS = ("audio_model_id", "text_model_id")


def weights_identity(vllm_config: VllmConfig, mode: str, cache_folder: Path) -> WeightFiles:
    """A digest of the files if they are on this host, else name and revision.

    ``mode``: ``full``, or a name chosen by the user. Reads every file without a cached digest (see
    :mod:`~lmcache_connector.keys.file_digests`), so only one process of an engine should call this.
    Dummy weights have no name: they depend on the tensor-parallel size.
    """
    if "dummy" in str(vllm_config.load_config.load_format):
        return WeightFiles("")
    if mode != "full":
        return WeightFiles(f"named:{mode}")
    if files := _files_of_all(vllm_config):
        digest = files_digest(files, KeptDigests(cache_folder))
        links = (_revision(*each) for each in _models(vllm_config))
        return WeightFiles(f"sha256:{digest}", (*files.values(), *filter(None, links)))
    names = " and ".join(f"{_name(each)}@{each.revision}" for each, _ in _models(vllm_config))
    logger.warning(
        "No weight files of %s were found on this host: instances identify them by name and "
        "revision alone. Set model_digest to a name of your own if that is not enough.",
        names,
    )
    return WeightFiles(f"remote:{names}")


def _revision(model: ModelConfig, load: LoadConfig) -> Path | None:
    """The file in a Hugging Face cache that maps a branch to its snapshot."""
    path = _local_path(_name(model), model.revision, load.download_dir)
    if path is None or path.parent.name != "snapshots":
        return None
    found = path.parent.parent / "refs" / (model.revision or "main")
    return found if found.is_file() else None


def folder_identity(path: Path, cache_folder: Path) -> str:
    """A digest of a folder's configuration file and all files that a plain load may read; empty
    without weights there. For callers who know only the model's name."""
    weights = weight_files(path, _ANY)
    if not weights:
        return ""
    files = weights | side_files(path) if path.is_dir() else weights
    if (config := path / "config.json").is_file():
        files = files | {"config.json": config}
    return f"sha256:{files_digest(files, KeptDigests(cache_folder))}"


def _models(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """The model, and its drafter if that has its own KV and weights."""
    model, load = vllm_config.model_config, vllm_config.load_config
    drafter, speculative = find_drafter(vllm_config), vllm_config.speculative_config
    if drafter is None or speculative is None or _name(drafter.model) == _name(model):
        return [(model, load)]
    return [(model, load), (drafter.model, speculative.draft_load_config or load)]


def _name(model: ModelConfig) -> str:
    return str(model.model_weights or model.model)


def _files_of_all(vllm_config: VllmConfig) -> dict[str, Path]:
    """All files of all models, by descriptive names; empty if a model is missing."""
    (model, load), *drafters = _models(vllm_config)
    found = _files(model, load)
    for drafter in drafters:
        more = _files(*drafter)
        found = found | {f"drafter/{n}": f for n, f in more.items()} if found and more else {}
    return found


def _files(model: ModelConfig, load: LoadConfig) -> dict[str, Path]:
    """All files of a model, by descriptive names; empty if a part is missing."""
    suffixes = _suffixes(load)
    path = _local_path(_name(model), model.revision, load.download_dir)
    if path is None or not suffixes:
        return {}
    below = model.architecture in WEIGHTS_IN_SUBFOLDERS
    parts = [(path, weight_files(path, suffixes, in_subfolders=below))]
    others = (getattr(model.hf_config, field, None) for field in WEIGHTS_OF_OTHERS)
    for name in filter(None, others):
        other = _local_path(str(name), None, load.download_dir)
        parts.append((path, {}) if other is None else (other, weight_files(other, suffixes)))
    if not all(weights for _, weights in parts):
        return {}
    found = dict(_beside(model, load, path))
    for number, (folder, weights) in enumerate(parts):
        files = {**weights, **side_files(folder)} if folder.is_dir() else weights
        found |= {f"{number}/{name}": file for name, file in files.items()}
    return found


def _suffixes(load: LoadConfig) -> tuple[str, ...]:
    """Suffixes of the files read from a model's folder; empty if unknown."""
    if "pattern" in (load.model_loader_extra_config or {}):
        return ()
    return _READ_FROM_FOLDER.get(str(load.load_format), ())


def _beside(model: ModelConfig, load: LoadConfig, path: Path) -> Iterator[tuple[str, Path]]:
    """Code and scales used with the weights."""
    if model.trust_remote_code:
        for number, folder in enumerate((path, *_code_elsewhere(model, load))):
            if folder.is_dir():
                yield from ((f"code/{number}/{n}", file) for n, file in code_files(folder).items())
    multimodal, overrides = model.multimodal_config, model.hf_overrides
    if multimodal is not None and multimodal.mm_encoder_fp8_scale_path:
        yield "scales", Path(multimodal.mm_encoder_fp8_scale_path)
    if isinstance(overrides, dict) and (file := overrides.get("quantization_config_file")):
        yield "quantization", Path(file)


def _code_elsewhere(model: ModelConfig, load: LoadConfig) -> Iterator[Path]:
    """Folders of other models whose code this one uses, as ``organization/model--file.Class``."""
    named = getattr(model.hf_config, "auto_map", None) or {}
    names = {name for name in named.values() if isinstance(name, str) and "--" in name}
    for name in sorted({name.partition("--")[0] for name in names}):
        path = _local_path(name, model.code_revision, load.download_dir)
        if path is not None:  # else it was not loaded
            yield path


def _local_path(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError, ValueError):
        return None
