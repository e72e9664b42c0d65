"""The arrows between modules, read from the source: who may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest

from tests.support import ROOT

OWN = "lmcache_connector"

# Module, or package: the files that may import it when they run. Imports for type checkers only are
# free. A file not named here is pure.
ALLOWED = {
    "vllm": (
        f"{OWN}/__init__.py",  # the entry point, inside functions
        f"{OWN}/config.py",
        f"{OWN}/connector.py",
        f"{OWN}/cpu_packing.py",  # inside functions
        f"{OWN}/facade.py",
        f"{OWN}/p2p/connector.py",
        f"{OWN}/prom_metrics.py",  # in vLLM's front end
        f"{OWN}/scheduler.py",
        f"{OWN}/vllm_compat.py",
        f"{OWN}/vllm_kv_events.py",
        f"{OWN}/worker.py",
    ),
    "lmcache": (f"{OWN}/engine.py", f"{OWN}/lmcache_parts.py", "storage/lmcache_plugin.py"),
    "redis": ("storage/redis_*.py",),
    "typer": (f"{OWN}/cli/*.py",),
    "rich": (f"{OWN}/cli/*.py",),
    "prometheus_client": (f"{OWN}/cli/*.py",),
    "torch": (
        f"{OWN}/chunk_buffers.py",
        f"{OWN}/copy_*.py",
        f"{OWN}/cpu_amx.py",
        f"{OWN}/cpu_packing.py",
        f"{OWN}/engine.py",
        f"{OWN}/lmcache_parts.py",
        f"{OWN}/forward_timer.py",
        f"{OWN}/kv_layout.py",
        f"{OWN}/p2p/arena.py",
        f"{OWN}/p2p/process_group.py",
        f"{OWN}/p2p/worker.py",
        f"{OWN}/request_identity.py",  # prompt embeddings, inside a function
        f"{OWN}/self_test.py",
        f"{OWN}/worker.py",
        "storage/lmcache_plugin.py",
    ),
    "zmq": (f"{OWN}/p2p/control.py", f"{OWN}/p2p/port_trial.py", f"{OWN}/p2p/worker.py"),
    "numba": (f"{OWN}/copy_*.py",),
    "llvmlite": (f"{OWN}/copy_*.py",),
    "triton": (f"{OWN}/copy_triton.py",),
    f"{OWN}.copy_triton": (f"{OWN}/copy_cuda.py",),
}
# Imported before vLLM's CPU worker is initialised, the first two break its start. Triton is not on
# every machine, so the modules that need it come late too.
LATE = ("numba", "llvmlite", f"{OWN}.copy_cuda")
# No Python objects cross a border, and an instance's modules never load a test's.
FORBIDDEN = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "tests",
    "examples",
    "benchmarks",
}


@dataclass(frozen=True)
class Import:
    """``module`` as written, relative ones resolved. ``late``: inside a function."""

    file: str
    line: int
    module: str
    late: bool = False

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def is_of(self, name: str) -> bool:
        """Whether it is that module or package, or something in it."""
        return f"{self.module}.".startswith(f"{name}.")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def source_files() -> list[str]:
    """Of the product, relative to the root."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in (OWN, "storage")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [file for file in files if not file.startswith(f"{OWN}/storage/")]  # the symlink


def imports_of(file: str, source: str) -> list[Import]:
    """All imports that happen when ``file`` runs: those under ``TYPE_CHECKING`` do not."""
    return list(_walk(ast.parse(source), file, late=False))


def _walk(node: ast.AST, file: str, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for statement in node.orelse:
            yield from _walk(statement, file, late)
        return
    if isinstance(node, ast.Import):
        yield from (Import(file, node.lineno, alias.name, late) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from _from_imports(node, file, late)
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, file, late)


def _from_imports(node: ast.ImportFrom, file: str, late: bool) -> Iterator[Import]:
    base = node.module or ""
    if node.level:
        package = _module_of(file).split(".")[: -node.level]
        base = ".".join([*package, *filter(None, [base])])
    # `from package import name` may load the module package.name: the rules see that.
    yield from (Import(file, node.lineno, f"{base}.{alias.name}", late) for alias in node.names)


def _module_of(file: str) -> str:
    """The installed module name; a package's own file ends in ``__init__``."""
    dotted = file.removesuffix(".py").replace("/", ".")
    return f"{OWN}.{dotted}" if file.startswith("storage/") else dotted


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def wrong_arrows(file: str, source: str) -> list[str]:
    """What is wrong with the imports of ``file``, one line each."""
    return [f"{found}: {why}" for found in imports_of(file, source) if (why := _objection(found))]


def _objection(found: Import) -> str | None:
    if found.package in FORBIDDEN:
        return "the product uses no such module"
    for name, allowed in ALLOWED.items():
        if found.is_of(name) and not any(fnmatch(found.file, pattern) for pattern in allowed):
            return f"only {', '.join(allowed)} may"
    if not found.late and any(map(found.is_of, LATE)):
        return "only inside functions"
    if found.package == "storage":
        return f"its name is {OWN}.storage"
    if found.file.startswith("storage/") and _leaves_storage(found.module):
        return "storage/ knows nothing of the adapters"
    return None


def _leaves_storage(module: str) -> bool:
    return module.split(".")[0] == OWN and module.split(".")[:2] != [OWN, "storage"]


@pytest.mark.parametrize("file", source_files())
def test_every_import_is_allowed(file: str) -> None:
    assert wrong_arrows(file, (ROOT / file).read_text()) == []


def test_all_of_the_product_is_read() -> None:
    files = source_files()
    assert f"{OWN}/connector.py" in files
    assert "storage/redis_tier.py" in files


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (f"{OWN}/prefix_hash.py", "import torch"),
        (f"{OWN}/prefix_hash.py", "def f():\n    from vllm.config import VllmConfig"),
        (f"{OWN}/worker.py", "from lmcache.utils import CacheEngineKey"),
        (f"{OWN}/copy_cpu.py", "import numba"),
        (f"{OWN}/copy_cpu.py", "from numba import types"),
        (f"{OWN}/copy_cuda.py", "import triton"),
        (f"{OWN}/engine.py", f"from {OWN}.copy_triton import RowCopyKernel"),
        (f"{OWN}/copy_kv_blocks.py", f"from {OWN}.copy_cuda import CudaCopier"),
        (f"{OWN}/copy_kv_blocks.py", f"from {OWN} import copy_cuda"),
        (f"{OWN}/engine.py", "import redis"),
        (f"{OWN}/engine.py", "from storage.geometry import ChunkGeometry"),
        (f"{OWN}/engine.py", "import pickle"),
        (f"{OWN}/engine.py", "from tests.support.servers import Server"),
        ("storage/redis_tier.py", f"from {OWN}.plans import LoadJob"),
        ("storage/redis_tier.py", f"from {OWN} import plans"),
        ("storage/redis_tier.py", "from ..plans import LoadJob"),
        ("storage/redis_tier.py", "from .. import plans"),
        ("storage/redis_tier.py", "import vllm"),
        ("storage/geometry.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
)
def test_a_wrong_arrow_is_found(file: str, source: str) -> None:
    assert len(wrong_arrows(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (f"{OWN}/copy_cpu.py", "def f():\n    import numba"),
        (f"{OWN}/copy_triton.py", "import triton"),
        (f"{OWN}/worker.py", f"from {OWN}.storage.geometry import ChunkGeometry"),
        (f"{OWN}/request_keys.py", "if TYPE_CHECKING:\n    from vllm.v1.request import Request"),
        ("storage/redis_tier.py", "from .geometry import ChunkGeometry\nimport redis"),
        ("storage/redis_tier.py", f"from {OWN}.storage import geometry"),
    ],
)
def test_a_right_arrow_passes(file: str, source: str) -> None:
    assert wrong_arrows(file, source) == []
