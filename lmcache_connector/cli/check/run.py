"""``check``: would an engine start with this configuration, and would every tier work?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_connector.cli.check import p2p
from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.check.host import check_memory, check_versions
from lmcache_connector.cli.check.transfer import P2P, check_transfer, connector_meant
from lmcache_connector.cli.redis.ls import describe_server
from lmcache_connector.cli.report import BAD_INPUT, UNREACHABLE, CliError, Report, size
from lmcache_connector.cli.target import connector_config, open_admin, read_transfer_config
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.warnings import settings_warnings
from lmcache_connector.storage.redis.admin import RedisAdmin, ServerFacts
from lmcache_connector.storage.redis.config import RedisTierConfig

_CHUNKS = 4
_WAIT_SECONDS = 10.0


def run(report: Report, text_or_path: str) -> int:
    document = read_transfer_config(text_or_path)
    findings = [check_transfer(document)]
    more = p2p.findings if connector_meant(document) == P2P else _tiered
    try:
        for finding in more(document):
            findings.append(finding)  # noqa: PERF402 - those before an error count
    except CliError as error:
        name = "redis" if error.code == UNREACHABLE else "settings"
        findings.append(Finding(name, "error", str(error), error.hint, code=error.code))
    code = max(finding.exit_code for finding in findings)
    _show(report, findings, code)
    return code


def _tiered(document: Mapping[str, Any]) -> Iterator[Finding]:
    config = connector_config(document)
    yield Finding("settings", "ok", _settings(config))
    for warning in settings_warnings(config, document.get("kv_role")):
        yield Finding("settings", "warning", warning.problem, warning.remedy)
    yield check_versions()
    yield check_memory("cpu tier", "cpu_gib", int(config.cpu_gib * 2**30), 2**30)
    tier = config.redis_tier_config()
    if tier is None:
        yield Finding("redis", "ok", "none is configured")
    else:
        yield from _check_redis(tier)


def _settings(config: ConnectorConfig) -> str:
    parts = [
        f"namespace {config.namespace}",
        f"chunks of {config.chunk_size} tokens",
        f"CPU tier {config.cpu_gib:g} GiB per rank",
        f"hash_key {'set' if config.hash_key else 'not set'}",
        f"compute_or_load {config.compute_or_load}",
    ]
    return ", ".join(parts)


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
    from lmcache_connector.cli.redis.trial import Trial

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
        document = [finding.as_json() for finding in findings]
        report.emit({"ok": code == 0, "exit_code": code, "findings": document})
        return
    for finding in findings:
        finding.show(report)
    if code == BAD_INPUT:
        report.say("The engine would refuse to start.")
