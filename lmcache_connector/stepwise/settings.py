"""The settings of an engine without vLLM: the same keys, and the versions that are installed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.errors import ConfigError
from lmcache_connector.vllm_compat.api.versions import check_lmcache

logger = logging.getLogger(__name__)


def read_settings(config: Mapping[str, Any]) -> ConnectorConfig:
    """Of ``kv_connector_extra_config``. With an LMCache that nobody has tested, nothing is
    shared with tested ones. Raises ``ConfigError`` with all that is wrong, or
    ``UnsupportedError``."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"settings are a dict of kv_connector_extra_config, not {config!r:.60}")
    settings, standing = parse_config(config), check_lmcache()
    if settings.peer_listen is not None or settings.peers:
        raise ConfigError("'peer_listen' and 'peers' are vLLM's connector's: share through Redis")
    if not standing.unverified:
        return settings
    logger.warning(
        "%s was not tested with this release: nothing is shared with instances of tested versions",
        ", ".join(standing.unverified),
    )
    return settings.model_copy(update={"namespace": standing.namespace(settings.namespace)})
