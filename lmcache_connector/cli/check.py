"""``check``: would an engine start with this configuration, and would everything it names work?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from lmcache_connector.cli.report import (
    BAD_INPUT,
    FOUND_WRONG,
    UNREACHABLE,
    CliError,
    Report,
    duration,
    harmless,
    size,
)
from lmcache_connector.cli.target import (
    P2P,
    TIERED,
    USUAL_BLOCK,
    connector_config,
    connector_meant,
    own_entry,
    read_transfer_config,
)
from lmcache_connector.config.strict import unknown_keys
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.warnings import available_memory, settings_warnings
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.api import versions

# The keys of vLLM's KVTransferConfig, which refuses others; a test compares the two.
TRANSFER_KEYS = (
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_port", "engine_id"),
    *("kv_buffer_device", "kv_connector_module_path", "enable_permute_local_kv"),
    "kv_load_failure_policy",
)
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``check``.

    ``verdict`` is ``ok``, ``warning`` or ``error``; ``hint`` is the remedy; ``seconds`` is the
    duration, if it matters; ``code`` is the exit code of an error.
    """

    name: str
    verdict: str
    detail: str
    hint: str = ""
    seconds: float | None = None
    code: int = FOUND_WRONG

    @property
    def exit_code(self) -> int:
        return self.code if self.verdict == "error" else 0

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "code"}

    def as_text(self) -> Text:
        took = f" ({duration(self.seconds)})" if self.seconds is not None else ""
        text = Text.assemble((f"{self.verdict:9}", _COLORS[self.verdict]))
        text.append(harmless(f"{self.name}: {self.detail}{took}"))
        return text.append(harmless(f"\n         -> {self.hint}") if self.hint else "")


def run(report: Report, text_or_path: str) -> int:
    from lmcache_connector.cli import check_peers, check_redis

    document = read_transfer_config(text_or_path)
    findings, own = [check_transfer(document)], own_entry(document)
    try:
        config = connector_config(own)
        findings.extend(_settings(config, own.get("kv_role")))
        findings.extend(check_peers.findings(config, str(own.get("kv_role"))))
        findings.extend(check_redis.findings(config.redis_tier_config()))
    except CliError as error:
        name = "redis" if error.code == UNREACHABLE else "settings"
        findings.append(Finding(name, "error", str(error), error.hint, code=error.code))
    codes = {finding.exit_code for finding in findings}
    code = BAD_INPUT if BAD_INPUT in codes else max(codes)
    lines: list[str | Text] = [finding.as_text() for finding in findings]
    if code == BAD_INPUT:
        lines.append("An engine would refuse this configuration, or start without the connector.")
    documents = [finding.as_json() for finding in findings]
    report.emit({"ok": code == 0, "exit_code": code, "findings": documents}, *lines)
    return code


# -- what vLLM itself reads ------------------------------------------------------------------------


def check_transfer(document: Mapping[str, Any]) -> Finding:
    """Check connector, role and keys."""
    own, problems, hints = own_entry(document), [], []
    if own.get("kv_connector") not in (TIERED, P2P):
        problems.append(f"kv_connector must be {TIERED!r} or {P2P!r}")
    if any(each.get("kv_role") not in _ROLES for each in (document, own)):
        problems.append(f"kv_role must be one of {', '.join(_ROLES)}")
    if problems:
        hints.append(f'"kv_connector": "{connector_meant(own)}", "kv_role": "kv_both"')
        if "kv_connector_extra_config" not in own:
            hints.append("put the connector's own settings into kv_connector_extra_config")
    keys = {**document, **own}
    outside = [key for key in keys if key in ConnectorConfig.model_fields]
    problems += [f"{key!r} belongs inside kv_connector_extra_config" for key in outside]
    unknown = [key for key in keys if key not in (*outside, *TRANSFER_KEYS)]
    problems += unknown_keys(unknown, TRANSFER_KEYS, "vLLM knows")
    if problems:
        text, hint = "; ".join(problems), "; ".join(hints)
        return Finding("kv-transfer-config", "error", text, hint, code=BAD_INPUT)
    detail = f"{own['kv_connector']} as {own['kv_role']}"
    return Finding("kv-transfer-config", "ok", detail)


# -- settings and this host ------------------------------------------------------------------------


def _settings(config: ConnectorConfig, kv_role: str | None) -> Iterator[Finding]:
    parts = [
        f"namespace {config.namespace}",
        f"chunks of {config.chunk_size} tokens",
        f"CPU tier {config.cpu_gib:g} GiB",
        f"hash_key {'set' if config.hash_key else 'not set'}",
        f"compute_or_load {config.compute_or_load}",
        f"audit_share {config.audit_share:g}",
    ]
    yield Finding("settings", "ok", ", ".join(parts))
    if config.chunk_size % USUAL_BLOCK:
        text = f"chunk_size {config.chunk_size} is not a multiple of {USUAL_BLOCK} tokens"
        hint = "an engine refuses this chunk_size unless it is a multiple of its --block-size"
        yield Finding("settings", "warning", text, hint)
    for warning in settings_warnings(config, kv_role):
        yield Finding("settings", "warning", warning.problem, warning.remedy)
    yield check_versions()
    yield check_memory(config.cpu_gib)


def check_versions() -> Finding:
    try:
        text = versions.installed()
    except UnsupportedError as error:
        return Finding("versions", "warning", str(error), "run this where the engine runs")
    try:
        standing = versions.check_versions()
    except UnsupportedError as error:
        return Finding("versions", "error", text, str(error), code=BAD_INPUT)
    for warning in versions.warnings(standing):
        return Finding("versions", "warning", text, warning)
    return Finding("versions", "ok", text)


def check_memory(cpu_gib: float) -> Finding:
    wanted, available = cpu_gib * 2**30, available_memory()
    if available is None:
        return Finding("cpu tier", "ok", size(wanted))
    text = f"{size(wanted)} of {size(available)} available here"
    if wanted > available:
        hint = f"lower cpu_gib to {available / 2**30 * 0.8:.1f}"
        return Finding("cpu tier", "error", text, hint)
    if wanted > 0.8 * available:
        return Finding("cpu tier", "warning", text, "leave memory for vLLM")
    return Finding("cpu tier", "ok", text)
