"""Which package may import which, and how many lines each may have.

A package is a folder, or a file in the product's root. Imports go to lower layers only.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import pytest

from tests.support import ROOT

OWN = "lmcache_connector"

# Outermost layer first; each package with its largest number of lines. A package imports from
# itself and from lower layers, never from its own layer. Type-only imports count.
LAYERS: tuple[dict[str, int], ...] = (
    {"cli": 1922, "handover": 57, "transformers": 811},
    {"connector": 586, "stepwise": 1339},
    {"integrations": 325, "scheduler": 3292, "worker": 3384},
    {"lookup": 767, "vllm_compat": 2545},
    {"config": 830, "copy_kv_blocks": 1098, "peers": 2852},
    {
        "audit": 340,
        "cost_model": 1200,
        "kv_events": 292,
        "kv_layout": 428,
        "metrics": 488,
        "requests": 950,
        "retention": 689,
        "storage/redis": 2999,
        "tracing": 80,
        "weight_names": 279,
    },
    {"plans": 458, "storage": 510, "storage/redis/client": 704, "vllm_compat/api": 256},
    {
        "bounded": 45,
        "change_count": 75,
        "errors": 55,
        "keys": 595,
        "kv_parts": 415,
        "net": 509,
        "threads": 172,
    },
)
MAX_LAYERS = 8
# Packages that may import only these of the lower packages.
ONLY = {
    package: set(names.split())
    for package, names in {
        "storage": "keys kv_parts",
        "storage/redis": "storage/redis/client storage kv_parts keys net bounded threads",
        "storage/redis/client": "net",
        "peers": "bounded kv_parts storage/redis storage/redis/client storage keys net plans"
        " threads",
        "plans": "kv_parts",
        "audit": "bounded plans storage",
        "retention": "bounded plans",
        "kv_events": "plans vllm_compat/api",
        "cost_model": "kv_parts plans",
        "tracing": "vllm_compat/api",
        "integrations": "config errors keys storage storage/redis threads vllm_compat",
        "lookup": "bounded cost_model kv_events kv_parts keys metrics net peers plans storage"
        " storage/redis storage/redis/client threads",
    }.items()
}

# By module or package: the files that may import it at run time. Type-only imports are free, except
# of vLLM. Files not named here import none of these.
ALLOWED = {
    "vllm": (
        f"{OWN}/__init__.py",  # the entry point, also in engines without our connectors
        f"{OWN}/vllm_compat/*.py",
        f"{OWN}/integrations/vllm_tier.py",  # a class that vLLM loads, and no module of ours
    ),
    "lmcache": (f"{OWN}/worker/lmcache_*.py",),
    "redis": ("storage/redis/client/*.py",),  # bounded replies; imported only with a Redis
    "typer": (f"{OWN}/cli/*.py",),
    "rich": (f"{OWN}/cli/*.py",),
    "prometheus_client": (f"{OWN}/cli/*.py",),
    "torch": (
        f"{OWN}/audit/compare.py",
        f"{OWN}/copy_kv_blocks/*.py",
        f"{OWN}/kv_layout/*.py",
        f"{OWN}/requests/content_digest.py",  # images and embeddings, inside functions
        f"{OWN}/stepwise/*.py",
        f"{OWN}/transformers/*.py",
        f"{OWN}/vllm_compat/c*.py",  # how the CPU packs a block; the names of dtypes
        f"{OWN}/vllm_compat/loaded_weights.py",
        f"{OWN}/vllm_compat/tensor_*.py",  # digests of weights
        f"{OWN}/worker/*.py",
    ),
    "opentelemetry": (f"{OWN}/tracing/*.py",),  # inside functions: it comes with vLLM, if at all
    "blosc2": ("storage/compression.py",),  # its import takes a second
    "numba": (f"{OWN}/copy_kv_blocks/cpu*.py",),
    "llvmlite": (f"{OWN}/copy_kv_blocks/cpu*.py",),
    "triton": (f"{OWN}/copy_kv_blocks/cuda_gather.py", f"{OWN}/vllm_compat/tensor_sums.py"),
    f"{OWN}.copy_kv_blocks.cuda_gather": (f"{OWN}/copy_kv_blocks/cuda.py",),
    f"{OWN}.vllm_compat.tensor_sums": (f"{OWN}/vllm_compat/tensor_digest.py",),
}
# Modules that the command line starts in their own process.
PROGRAMS = {"vllm.entrypoints.openai.api_server"}
# If imported before vLLM's CPU worker starts, the first two break its start. Triton is not on every
# machine, so the modules that need it are imported late, too.
LATE = (
    *("numba", "llvmlite"),
    *(f"{OWN}.copy_kv_blocks.cuda", f"{OWN}.vllm_compat.tensor_sums"),
)
LAYER = {package: number for number, layer in enumerate(LAYERS) for package in layer}
# Pickled objects are loaded nowhere, and the product imports no tests.
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
    """``module`` is absolute. ``late``: inside a function. ``is_for_types``: under
    ``TYPE_CHECKING``."""

    file: str
    line: int
    module: str
    late: bool = False
    is_for_types: bool = False

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def is_of(self, name: str) -> bool:
        """Whether it imports ``name`` or something in it."""
        return f"{self.module}.".startswith(f"{name}.")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def source_files() -> list[str]:
    """Paths of the product's files, relative to the root."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in (OWN, "storage")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [file for file in files if not file.startswith(f"{OWN}/storage/")]  # the symlink


def imports_of(file: str, source: str) -> list[Import]:
    return list(_walk(ast.parse(source), file, late=False))


def _walk(node: ast.AST, file: str, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for statement in node.body:
            yield from (replace(found, is_for_types=True) for found in _walk(statement, file, late))
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
    # `from package import name` may load package.name: the rules see it.
    yield from (Import(file, node.lineno, f"{base}.{alias.name}", late) for alias in node.names)


def _module_of(file: str) -> str:
    """The installed module name; a package's own file ends in ``__init__``."""
    dotted = file.removesuffix(".py").replace("/", ".")
    return f"{OWN}.{dotted}" if file.startswith("storage/") else dotted


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def wrong_arrows(file: str, source: str) -> list[str]:
    """The forbidden imports of ``file``, one line each."""
    return [f"{found}: {why}" for found in imports_of(file, source) if (why := _objection(found))]


def _objection(found: Import) -> str | None:
    if found.is_for_types:
        return _wrong_layer(found)
    if found.package in FORBIDDEN:
        return "the product uses no such module"
    for name, allowed in ALLOWED.items():
        if found.is_of(name) and not any(fnmatch(found.file, pattern) for pattern in allowed):
            return f"only {', '.join(allowed)} may"
    if not found.late and any(map(found.is_of, LATE)):
        return "only inside functions"
    if found.package == "storage":
        return f"its name is {OWN}.storage"
    return _wrong_layer(found)


def _wrong_layer(found: Import) -> str | None:
    importer = package_of(found.file.removesuffix(".py"))
    imported = package_of(found.module.replace(".", "/")) if found.package == OWN else None
    if importer is None or imported in (None, importer):
        return None
    if LAYER[importer] >= LAYER[imported]:
        return f"{importer} does not stand above {imported}"
    if imported not in ONLY.get(importer, {imported}):
        return f"{importer} imports {', '.join(sorted(ONLY[importer]))} alone"
    return None


def package_of(path: str) -> str | None:
    """The package of a file or module, by its path; ``None`` for the product's root."""
    inside = path.removeprefix(f"{OWN}/")
    fitting = [package for package in LAYER if f"{inside}/".startswith(f"{package}/")]
    return max(fitting, key=len, default=None)


def test_every_import_is_allowed() -> None:
    files = source_files()
    assert {f"{OWN}/connector.py", "storage/redis/tier.py"} <= {*files}
    assert [w for file in files for w in wrong_arrows(file, (ROOT / file).read_text())] == []


def test_vllm_is_named_only_where_its_import_is_allowed() -> None:
    others = [f for f in source_files() if not any(fnmatch(f, each) for each in ALLOWED["vllm"])]
    assert {f: names for f in others if (names := vllm_names((ROOT / f).read_text()))} == {}


def vllm_names(source: str) -> list[str]:
    """Modules of vLLM that the source names, in imports or strings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            found.append(str(node.value))
    return [name for name in found if name.split(".")[0] == "vllm" and name not in PROGRAMS]


def test_without_redis_its_client_is_not_imported() -> None:
    """blosc2 starts a thread per core and changes the environment of the process. redis-py takes
    half a second, unless vLLM has imported it."""
    used = ("connector", "scheduler.build", "worker.build", "worker.adapter", "stepwise.tiers")
    names = ", ".join(f"{OWN}.{name}" for name in used)
    brings = {"blosc2", "numexpr", f"{OWN}.storage.redis.client.dial"}
    code = f"import sys, {names}; assert not sys.modules.keys() & {brings}"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240.0, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_every_file_has_a_package() -> None:
    files = [file for file in source_files() if not file.endswith("__init__.py")]
    assert [file for file in files if not package_of(file.removesuffix(".py"))] == []


def test_layers_are_few_and_packages_within_their_budgets() -> None:
    """A larger budget needs a change of the table ``LAYERS``."""
    assert len(LAYERS) <= MAX_LAYERS
    lines: Counter[str] = Counter()
    for file in source_files():
        if package := package_of(file.removesuffix(".py")):
            lines[package] += len((ROOT / file).read_text().splitlines())
    budgets = {package: most for layer in LAYERS for package, most in layer.items()}
    assert {name: n for name, n in lines.items() if n > budgets[name]} == {}
    assert set(budgets) == set(lines)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (f"{OWN}/keys/prefix_hash.py", "def f():\n    from vllm.config import VllmConfig"),
        (f"{OWN}/worker/adapter.py", "from lmcache.utils import CacheEngineKey"),
        (f"{OWN}/scheduler/build.py", f"from {OWN}.worker.build import build_worker"),
        (f"{OWN}/copy_kv_blocks/plan.py", f"from {OWN}.copy_kv_blocks.cuda_gather import Kernel"),
        (f"{OWN}/worker/lmcache_engine.py", "from storage.geometry import ChunkGeometry"),
        (f"{OWN}/worker/lmcache_engine.py", "from tests.support.redis.servers import Server"),
        ("storage/redis/tier.py", "from ...plans import LoadJob"),
        ("storage/geometry.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("storage/geometry.py", "from .redis import tier"),
        (f"{OWN}/scheduler/build.py", f"if TYPE_CHECKING:\n    from {OWN}.worker import adapter"),
    ],
)
def test_bad_imports_are_found(file: str, source: str) -> None:
    assert len(wrong_arrows(file, source)) == 1
