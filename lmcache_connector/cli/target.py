"""The target of a command: an engine's address, a connector's configuration, or a Redis."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lmcache_connector.cli.report import UNREACHABLE, CliError
from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.config.tiered import ConnectorConfig, parse_config, parse_p2p_config
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.redis.admin import RedisAdmin, RedisAdminError
from lmcache_connector.storage.redis.config import RedisTierConfig

TIERED = "LMCacheTieredConnector"
P2P = "LMCacheP2PConnector"
DEFAULT_KV_PORT = 14579
USUAL_BLOCK = 16
"""Tokens; vLLM's block sizes are multiples of it unless ``--block-size`` says otherwise."""
_METRICS_SECONDS = 5.0
_MAX_METRICS_BYTES = 64 << 20
_EXAMPLE = (
    '{"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"cpu_gib": 8, "redis_url": "redis://localhost:6379"}}'
)


# -- engines ---------------------------------------------------------------------------------------


def engine_url(text: str) -> SplitResult:
    """Complete an address such as ``localhost:8000``. Raises :class:`CliError`."""
    if "@" in text:
        raise CliError("leave user and password out of an engine's address")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{text!r} is not the address of an engine", "for example localhost:8000")
    return parts


def metrics_text(text: str) -> str:
    """The engine's ``/metrics``. Raises :class:`CliError` without an answer."""
    parts = engine_url(text)
    url = parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()
    try:
        with urllib.request.urlopen(url, timeout=_METRICS_SECONDS) as response:
            return str(response.read(_MAX_METRICS_BYTES).decode(errors="replace"))
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        hint = "is the engine up, and is this its API port?"
        raise CliError(f"{text}: {reason}", hint, UNREACHABLE) from None


# -- configurations --------------------------------------------------------------------------------


def read_transfer_config(text_or_path: str) -> dict[str, Any]:
    """The object of ``--kv-transfer-config``. Raises :class:`CliError`, whose text repeats no
    value: it may be a secret."""
    text = text_or_path.strip()
    if text and not text.startswith("{"):
        text = _read(text).strip()
    if not text:
        raise CliError("the configuration is empty", _EXAMPLE)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise CliError(
            f"this is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            f"quote the whole of it for the shell: '{_EXAMPLE}'",
        ) from None
    except (ValueError, RecursionError):  # ValueError: a number of thousands of digits
        raise CliError("this JSON is nested too deeply, or has a huge number", _EXAMPLE) from None
    if not isinstance(document, dict):
        raise CliError("the configuration must be one JSON object", _EXAMPLE)
    return document


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        # A text that names no file may be a URL with a password.
        is_path = name.isprintable() and "@" not in name
        shown = (is_path and Path(name).name) or "the argument"
        raise CliError(
            f"cannot read {shown}: {reason}", f"give a file, or the JSON itself: '{_EXAMPLE}'"
        ) from None


def own_entry(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """This connector's entry among those of vLLM's MultiConnector; else the document."""
    extra = document.get("kv_connector_extra_config")
    is_multi = document.get("kv_connector") == "MultiConnector"
    entries = extra.get("connectors") if is_multi and isinstance(extra, dict) else None
    for each in entries if isinstance(entries, list) else ():
        if isinstance(each, dict) and each.get("kv_connector") in (TIERED, P2P):
            return each
    return document


def connector_meant(document: Mapping[str, Any]) -> str:
    """The connector that the settings are for, even if its name is misspelt."""
    return P2P if "p2p" in str(document.get("kv_connector")).lower() else TIERED


def connector_config(document: Mapping[str, Any]) -> ConnectorConfig:
    """The configuration that the engine would read. Raises :class:`CliError`."""
    extra = document.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise CliError("kv_connector_extra_config must be an object", _EXAMPLE)
    hint = "docs/settings.md lists all settings"
    try:
        if connector_meant(document) == TIERED:
            return parse_config(extra)
        hint = "see the settings in docs/disaggregated.md"
        port = document.get("kv_port", DEFAULT_KV_PORT)
        return parse_p2p_config(extra, port, str(document.get("kv_role")))
    except ConfigError as error:
        raise CliError(str(error), hint) from None


def secret(option: str, reference: str | None) -> str | None:
    """See :func:`resolve_secret`. Raises :class:`CliError`."""
    try:
        return resolve_secret(reference, os.environ) if reference is not None else None
    except ValueError as error:
        raise CliError(f"{option}: {error}") from None


# -- Redis -----------------------------------------------------------------------------------------


def redis_config(redis_url: str | None, kv_config: str | None) -> RedisTierConfig:
    """The Redis of ``--redis-url`` or, without it, of ``--kv-config``. Settings other than the URL
    come from ``--kv-config``. Raises :class:`CliError` if they name no usable Redis."""
    found = None
    if kv_config is not None:
        found = connector_config(own_entry(read_transfer_config(kv_config))).redis_tier_config()
    if redis_url is None:
        if found is not None:
            return found
        if kv_config is not None:
            raise CliError("this configuration has no redis_url", "add one, or give --redis-url")
        raise CliError(
            "no Redis was named",
            "give --redis-url redis://HOST:6379, or --kv-config with the engine's configuration",
        )
    url = secret("--redis-url", redis_url) or ""
    try:
        return replace(found or RedisTierConfig(url="redis://localhost"), url=url)
    except ValueError as error:
        raise CliError(str(error), "for example --redis-url redis://localhost:6379") from None


@contextmanager
def open_admin(config: RedisTierConfig) -> Iterator[RedisAdmin]:
    """A connected client. Redis' errors inside the ``with`` become :class:`CliError`."""
    try:
        with RedisAdmin(config) as admin:
            admin.nodes()
            yield admin
    except RedisAdminError as error:
        raise CliError(str(error), error.hint, UNREACHABLE) from None
