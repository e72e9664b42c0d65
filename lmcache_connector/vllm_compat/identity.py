"""What makes a model's KV its own, by subtraction.

A model's identity is everything vLLM has resolved about it, minus the fields listed with reasons in
:mod:`~lmcache_connector.vllm_compat.identity_tables`. Every worker reads the configuration
(:func:`configuration_digests`) after building the model, since a model may change it while being
built, and with tensor parallelism only in the workers. One process reads the weight files
(:mod:`~lmcache_connector.vllm_compat.weights`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from vllm import envs
from vllm.config import LoRAConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import MambaSpec

from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.keys.weights_digest import code_files, files_digest
from lmcache_connector.vllm_compat.canonical import IsIgnored, canonical
from lmcache_connector.vllm_compat.drafter import find_drafter
from lmcache_connector.vllm_compat.identity_tables import (
    CONDITIONALLY_IGNORED,
    IGNORED_ENVIRONMENT,
    INDEPENDENT_OF_LENGTH,
    INDEPENDENT_ROPE_TYPES,
    NOT_PART_OF_IDENTITY,
    PLAIN_LOAD_FORMATS,
    is_new,
    rope_types,
    same_form,
    values,
)
from lmcache_connector.vllm_compat.support import layer_specs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_OWNERS = ("vllm.", "transformers.")


# -- configuration -------------------------------------------------------------------------------


def configuration_digests(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, packings: Sequence[str | None]
) -> dict[str, str]:
    """Hexadecimal digests of all parts of the configuration, by name; equal on all ranks that have
    the part.

    Each kind of layer in the KV cache spec is a separate part, named by its digest, since a
    pipeline stage may lack some kinds. ``packings``: names of the order of bytes inside a block,
    for each part of the model. Versions of vLLM that lay out a token's KV alike have equal digests
    for the same model. Raises :class:`UnsupportedError` for a part without a canonical form.
    """
    is_ignored = _ignored_fields(vllm_config)
    parts: dict[str, object] = {
        name: value
        for name, value in vars(vllm_config).items()
        if not is_ignored(vllm_config, name) and not is_new("VllmConfig", name, value)
    }
    parts["lora_config"] = _lora_config(vllm_config)
    # A plugin may register its own class under a known name.
    parts["model_class"] = ModelRegistry.models.get(vllm_config.model_config.architecture)
    classes = [parts["model_class"]]
    if (drafter := find_drafter(vllm_config)) is not None:
        classes.append(ModelRegistry.models.get(drafter.model.architecture))
        parts["drafter"] = [vllm_config.speculative_config, classes[-1]]
    if any(code := [model_code(each) for each in classes]):
        parts["model_code"] = code
    parts["environment"] = _environment()
    # Values of a model with several parts have another geometry than those of a model with one: a
    # list here makes all of its keys differ.
    parts["packing"] = packings[0] if len(packings) == 1 else list(packings)
    specs = [
        spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group).values()
    ]
    if any(isinstance(spec, MambaSpec) for spec in specs):
        parts["state_order"] = envs.VLLM_SSM_CONV_STATE_LAYOUT or "SD"
    if vllm_config.model_config.is_mm_prefix_lm:  # runner V1 lets a large image's tokens see more
        parts["is_v2_model_runner"] = vllm_config.use_v2_model_runner
    if any(isinstance(spec, MambaSpec) and not spec.tp_replicated for spec in specs):
        # Each rank's piece of a state is one value.
        parts["state_pieces"] = vllm_config.parallel_config.tensor_parallel_size
    found = {name: _digest(canonical(value, name, is_ignored)) for name, value in parts.items()}
    for spec in specs:
        digest = _digest(canonical(spec, "kv_cache_spec", is_ignored))
        found[f"kv_cache_spec {digest[:16]}"] = digest
    return found


def _digest(form: object) -> str:
    return str(blake3(canonical_bytes(same_form(form))).hexdigest())


def _environment() -> dict[str, str]:
    """vLLM's variables that are set: some change quantization or the routing of experts."""
    ignored = tuple(IGNORED_ENVIRONMENT)
    return {
        name: os.environ[name]
        for name in envs.environment_variables
        if name in os.environ and not name.startswith(ignored)
    }


def _ignored_fields(vllm_config: VllmConfig) -> IsIgnored:
    """Which fields are not part of the identity under this configuration."""
    drafter = find_drafter(vllm_config)
    models = [vllm_config.model_config, *([drafter.model] if drafter is not None else [])]
    is_limit = all(map(_is_independent_of_length, models))
    conditions = {
        "max_model_len": is_limit,
        "original_max_model_len": is_limit,
        "load_format": str(vllm_config.load_config.load_format) in PLAIN_LOAD_FORMATS,
    }

    def is_ignored(owner: object, field: str) -> bool:
        for kind in type(owner).__mro__:
            if kind.__module__.startswith(_OWNERS):
                if field in NOT_PART_OF_IDENTITY.get(kind.__name__, {}):
                    return True
                if field in CONDITIONALLY_IGNORED.get(kind.__name__, {}):
                    return conditions[field]
        return False

    return is_ignored


def _is_independent_of_length(model: ModelConfig) -> bool:
    """Whether KV does not depend on ``max_model_len``."""
    config = canonical(model.hf_config, "hf_config", lambda owner, field: False)
    registered = ModelRegistry.models.get(model.architecture)
    return (
        model.architecture in INDEPENDENT_OF_LENGTH
        and getattr(registered, "module_name", "").startswith(_OWNERS[0])
        and rope_types(config) <= INDEPENDENT_ROPE_TYPES
        and not any(values(config, "dual_chunk_attention_config"))
    )


def _lora_config(vllm_config: VllmConfig) -> LoRAConfig:
    """For requests without adapter, an engine without LoRA computes the same as one with it."""
    if vllm_config.lora_config is not None:
        return vllm_config.lora_config
    absent = LoRAConfig()
    absent.lora_dtype = vllm_config.model_config.dtype
    return absent


def fingerprint(digests: Mapping[str, str]) -> str:
    return _digest(dict(digests))


# -- the code that computes a model, where it is not vLLM's own ------------------------------------
#
# vLLM identifies a model's class by its name, which two versions of a plugin share. Nothing is
# imported here: some processes of an engine must not load a model's code.


_OWN = "vllm.model_executor.models."
# vLLM modules whose classes run a library's layers.
_LIBRARIES = ("transformers", "terratorch")
# Packages of base classes that need no digest. Code that transformers downloads is digested with
# the weights.
_KNOWN = frozenset({"vllm", "torch", "builtins", "typing", "abc", "transformers_modules"})


def model_code(registered: object) -> list[str] | None:
    """Versions of the distributions, and digest of the Python files, of a class in vLLM's registry.
    ``None`` for models whose code is vLLM's alone."""
    module = getattr(registered, "module_name", "")
    if module.startswith(_OWN):
        libraries = [name for name in _LIBRARIES if module.startswith(_OWN + name)]
        return [part for name in libraries for part in (*_versions(name), *_files(name))] or None
    kinds = getattr(registered, "model_cls", type(None)).__mro__
    modules = {module} if module else {kind.__module__ for kind in kinds}
    names = {name.partition(".")[0] for name in modules} - _KNOWN
    return [part for name in sorted(names) for part in (*_versions(name), *_files(name))]


def _versions(package: str) -> Iterator[str]:
    for name in sorted(set(packages_distributions().get(package, ()))):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:  # removed meanwhile
            continue


def _files(package: str) -> Iterator[str]:
    """Digest of a top-level package or single module."""
    if package in _LIBRARIES and not any(".dev" in each for each in _versions(package)):
        return  # a release's version identifies its code
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # for instance a script run by its name
        spec = None
    files: dict[str, Path] = {}
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files |= code_files(Path(folder))
    # A script that registered its own class is a loaded module without spec.
    script = getattr(sys.modules.get(package), "__file__", None)
    origin = spec.origin if spec is not None else script
    if not files and origin is not None and Path(origin).is_file():
        files = {package: Path(origin)}
    yield f"{package} {files_digest(files)}"
