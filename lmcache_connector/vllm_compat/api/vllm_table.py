"""Everything of vLLM that the connector uses."""

from __future__ import annotations

from lmcache_connector.vllm_compat.api.connector_table import CONNECTOR
from lmcache_connector.vllm_compat.api.contract import Use
from lmcache_connector.vllm_compat.api.model_table import LATE, MODEL
from lmcache_connector.vllm_compat.api.scheduler_table import KV_EVENTS, SCHEDULING

VLLM: tuple[Use, ...] = (*CONNECTOR, *SCHEDULING, *KV_EVENTS, *MODEL, *LATE)
