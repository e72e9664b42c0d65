"""Which Redis a command is about: from ``--redis-url`` or a connector's configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lmcache_connector.cli.report import UNREACHABLE, CliError
from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.errors import ConfigError
from lmcache_connector.p2p.config import P2PConfig, parse_p2p_config
from lmcache_connector.storage.redis.admin import RedisAdmin, RedisAdminError
from lmcache_connector.storage.redis.config import RedisTierConfig

ConfigT = TypeVar("ConfigT")

_EXAMPLE = (
    '{"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"cpu_gib": 8, "redis_url": "redis://localhost:6379"}}'
)


def read_transfer_config(text_or_path: str) -> dict[str, Any]:
    """The object of ``--kv-transfer-config``. Raises :class:`CliError`, never repeating values."""
    text = text_or_path.strip()
    if text == "-":
        text = _read_stdin()
    elif not text.startswith("{"):
        text = _read_file(Path(text_or_path))
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise CliError(
            f"this is no JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            f"quote the whole of it for the shell: '{_EXAMPLE}'",
        ) from None
    except RecursionError:
        raise CliError("this JSON is nested too deeply", _EXAMPLE) from None
    if not isinstance(document, dict):
        raise CliError("the configuration must be one JSON object", _EXAMPLE)
    return document


def connector_config(document: Mapping[str, Any]) -> ConnectorConfig:
    """Exactly what the engine would make of it."""
    return _parsed(document, parse_config, "see the README's table of settings")


def p2p_config(document: Mapping[str, Any]) -> P2PConfig:
    """Exactly what the engine would make of it."""
    return _parsed(document, parse_p2p_config, "see the settings in docs/disaggregated.md")


def _parsed(
    document: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], ConfigT], hint: str
) -> ConfigT:
    extra = document.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise CliError("kv_connector_extra_config must be an object", _EXAMPLE)
    try:
        return parse(extra)
    except ConfigError as error:
        raise CliError(str(error), hint) from None


@dataclass(frozen=True, slots=True)
class Target:
    """Which Redis the user named: with ``--redis-url``, with ``--config``, or both."""

    redis_url: str | None
    config: str | None

    def tier_config(self) -> RedisTierConfig:
        """Raises :class:`CliError` if there is none, or it cannot be used."""
        found = None
        if self.config is not None:
            found = connector_config(read_transfer_config(self.config)).redis_tier_config()
        if found is None:
            found = RedisTierConfig(url="redis://localhost")
            if self.redis_url is None:
                raise self._nothing_named()
        return _with_url(found, self.redis_url)

    def _nothing_named(self) -> CliError:
        if self.config is not None:
            return CliError("this configuration has no redis_url", "add one, or give --redis-url")
        return CliError(
            "which Redis? None was named",
            "give --redis-url redis://HOST:6379, or --config with the engine's configuration",
        )


@contextmanager
def open_admin(config: RedisTierConfig) -> Iterator[RedisAdmin]:
    """Connected. What goes wrong inside leaves as a :class:`CliError`."""
    try:
        with RedisAdmin(config) as admin:
            admin.nodes()
            yield admin
    except RedisAdminError as error:
        raise CliError(str(error), error.hint, UNREACHABLE) from None


def _with_url(config: RedisTierConfig, redis_url: str | None) -> RedisTierConfig:
    if redis_url is None:
        return config
    try:
        return replace(config, url=resolve_secret(redis_url, os.environ))
    except ValueError as error:
        raise CliError(str(error), "for example --redis-url redis://localhost:6379") from None


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise CliError("what comes on standard input is no text", _EXAMPLE) from None


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        shown = path.name if path.name.replace(".", "").replace("-", "").isalnum() else "that"
        raise CliError(
            f"cannot read {shown}: {reason}", f"give a file, or the JSON itself: '{_EXAMPLE}'"
        ) from None
