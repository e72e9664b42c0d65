"""The tables hold of every version that the release names, read from their sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lmcache_connector.vllm_compat.api.versions import (
    LMCACHE_PACKAGE,
    VLLM_PACKAGE,
    Package,
    installed_version,
    release_of,
)
from tests.contract import kept
from tests.contract.attribute_uses import AND, attribute_uses, bases
from tests.contract.contract import Found, Use, missing
from tests.contract.installed import installed
from tests.contract.tables import TABLES
from tests.support import ROOT

KEPT = [
    pytest.param(package, file, id=file.stem)
    for package in (VLLM_PACKAGE, LMCACHE_PACKAGE)
    for file in kept.versions(package.distributions[0])
]


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_every_release_that_is_named_is_kept(package: Package) -> None:
    found = {
        release_of(package, kept.read(f).version) for f in kept.versions(package.distributions[0])
    }
    assert found >= set(package.releases)


@pytest.mark.parametrize(("package", "file"), KEPT)
def test_a_version_has_all_that_is_used_of_it(package: Package, file: Path) -> None:
    version = kept.read(file)
    release = release_of(package, version.version)
    if release not in package.releases:
        pytest.skip("no version that this release names")
    faults = missing(TABLES[package.name], version.surface)
    expected = {
        use
        for use in TABLES[package.name]
        if use.since and release < release_of(package, use.since)
    }
    assert {fault.use for fault in faults} == expected


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_the_source_tree_says_what_the_running_process_says(package: Package) -> None:
    name = package.distributions[0]
    version = installed_version(package)
    files = [f for f in kept.versions(name) if kept.read(f).version == version]
    if not files:
        pytest.skip(f"{name} {version} is not kept")
    surface = kept.read(files[0]).surface
    table = [use for use in TABLES[package.name] if not use.late]
    assert missing(table, installed) == missing(table, surface)


def product_imports(package: str) -> set[tuple[str, str]]:
    """(module, name) of every import from a package, those for type checkers included.

    Without the classes that vLLM loads: it has what they are made of, or never names them.
    """
    found = set()
    for file in (ROOT / "lmcache_connector").rglob("*.py"):
        if file.parent.name == "integrations":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                found |= {(name, "") for name in names if name.split(".")[0] == package}
    return found


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_every_name_that_is_imported_is_in_the_table(package: Package) -> None:
    declared = {(use.module, use.name.partition(".")[0]) for use in TABLES[package.name]}
    imported = product_imports(package.distributions[0])
    assert len(imported) > 5
    assert imported <= declared


# What class some fields are of. Of two more the sources use what classes of ours add to them.
FIELDS = {
    ("KVCacheManager", "block_pool"): "BlockPool",
    ("ModelConfig", "multimodal_config"): "MultiModalConfig",
    ("MultiModalFeatureSpec", "mm_position"): "PlaceholderRange",
    ("Request", "lora_request"): "LoRARequest",
    ("SchedulerOutput", "kv_connector_block_state"): "KVConnectorBlockState",
    ("SchedulerOutput", "scheduled_cached_reqs"): "CachedRequestData",
    ("SpeculativeConfig", "draft_load_config"): "LoadConfig",
    ("SpeculativeConfig", "draft_model_config"): "ModelConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "compilation_config"): "CompilationConfig",
    ("VllmConfig", "kv_events_config"): "KVEventsConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "lora_config"): "LoRAConfig",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "observability_config"): "ObservabilityConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "scheduler_config"): "SchedulerConfig",
    ("VllmConfig", "speculative_config"): "SpeculativeConfig",
}
EXTENDED = {"KVConnectorMetadata", "KVConnectorWorkerMetadata"}


@pytest.mark.parametrize(
    ("package", "files", "least"),
    [(VLLM_PACKAGE, "**/*.py", 100), (LMCACHE_PACKAGE, "worker/lmcache_*.py", 8)],
    ids=lambda each: getattr(each, "name", ""),
)
def test_every_attribute_that_is_read_is_in_the_table(
    package: Package, files: str, least: int
) -> None:
    declared: dict[str, set[str]] = {}
    for use in TABLES[package.name]:
        owner, _, method = use.name.partition(".")
        declared.setdefault(owner, set()).update((*use.members, method))
    classes = ({*declared, *FIELDS.values()} if package is VLLM_PACKAGE else {*declared}) - EXTENDED
    sources = [file.read_text() for file in (ROOT / "lmcache_connector").glob(files)]
    read = {use for source in sources for use in attribute_uses(source, classes, FIELDS)}
    assert len(read) > least
    assert {
        (kind, name)
        for kind, name in read
        if not any(name in declared.get(each, ()) for each in kind.split(AND))
    } == set()


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_of_what_we_derive_from_every_abstract_method_is_known(package: Package) -> None:
    known = {use.name for use in TABLES[package.name] if use.abstract is not None}
    classes = {use.name.partition(".")[0] for use in TABLES[package.name]}
    found = {
        base
        for file in (ROOT / "lmcache_connector").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and file.parent.name != "integrations"
        for base in bases(node, classes)
    }
    assert len(found) > 3
    assert found <= known


FOUND = Found((("a", True), ("b", False)), members=frozenset("y"), abstract=frozenset("fg"))


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        (Use("m", "f", passes=("a",)), None),
        (Use("m", "f", passes=("a", "c")), "m.f(c)"),
        (Use("m", "f", passes=()), "m.f asks for a parameter a that is not known here"),
        (Use("m", "f", takes=("a", "b")), None),
        (Use("m", "f", takes=("a",)), "m.f is called with a parameter b that is not known here"),
        (Use("m", "f", takes=("a", "b", "c")), "m.f is no longer called with a parameter c"),
        (Use("m", "f", takes=("b", "a")), "m.f is called with its parameters in another order"),
        (Use("m", "f", abstract=("f",)), "m.f asks for a method g that is not known here"),
        (Use("m", "f", members=("x", "y")), "m.f.x"),
    ],
)
def test_each_difference_is_named(use: Use, fault: str | None) -> None:
    assert [each.what for each in missing([use], lambda module, name: FOUND)] == [
        *filter(None, [fault])
    ]
