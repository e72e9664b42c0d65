"""Versions of code that vLLM names alike are told apart."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from vllm.model_executor.models import ModelRegistry

from lmcache_connector.vllm_compat import identity
from tests.support.vllm_configs import kv_cache, vllm_config


def plug_in(folder: Path, text: str) -> None:
    """A plugin of two files, one of which the other imports."""
    package = folder / "a_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(text)
    (package / "model.py").write_text("from a_plugin.layers import *")


@pytest.fixture
def digests(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Of an engine whose model a plugin has registered."""
    config = vllm_config(model)
    own = ModelRegistry.models["LlamaForCausalLM"]
    other = dataclasses.replace(own, module_name="a_plugin.model")
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", other)
    return lambda: identity.configuration_digests(config, kv_cache(), [None])


def test_two_versions_of_a_plugin_are_two_models(
    digests: Callable[[], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, text in (("one", "scale = 1"), ("two", "scale = 2"), ("copy", "scale = 1")):
        plug_in(tmp_path / name, text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / name)
            importlib.invalidate_caches()
            found.append(digests())
    one, two, copy = found
    assert {name for name in one if one[name] != two[name]} == {"model_code"}
    assert one == copy
    assert "a_plugin" not in sys.modules, "this process may not be one that loads models"


def test_vllms_own_models_have_no_code_of_their_own_in_the_key(model: Path) -> None:
    found = identity.configuration_digests(vllm_config(model), kv_cache(), [None])
    assert "model_code" not in found


def test_models_of_a_library_go_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = ModelRegistry.models["TransformersForCausalLM"]
    here = identity.model_code(registered)
    assert here is not None
    assert here[0].startswith("transformers ")
    monkeypatch.setattr(identity, "version", lambda name: "another")
    assert identity.model_code(registered) == ["transformers another"]


def test_a_library_between_two_releases_goes_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit of it has the same number."""
    registered = ModelRegistry.models["TransformersForCausalLM"]
    monkeypatch.setattr(identity, "version", lambda name: "5.9.0.dev0")
    found = identity.model_code(registered)
    assert found is not None
    assert found[0] == "transformers 5.9.0.dev0"
    assert len(found) == 2
    monkeypatch.setattr(identity, "code_files", lambda folder: {})
    assert identity.model_code(registered) != found


def test_a_class_of_the_users_script_goes_by_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that is run, as ``__main__``, cannot be found by import."""
    found = []
    for name, text in (("one", "scale = 1"), ("two", "scale = 2"), ("copy", "scale = 1")):
        script = ModuleType("__main__")
        script.__file__ = str(tmp_path / f"{name}.py")
        Path(script.__file__).write_text(text)
        monkeypatch.setitem(sys.modules, "__main__", script)
        own = type("OwnModel", (), {"__module__": "__main__"})
        found.append(identity.model_code(SimpleNamespace(model_cls=own)))
    assert found[0] != found[1]
    assert found[0] == found[2]
