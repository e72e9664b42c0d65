"""All that the connector uses of vLLM and of LMCache, by the package's name in `versions`."""

from __future__ import annotations

from tests.contract.contract import Use
from tests.contract.tables.connector import CONNECTOR
from tests.contract.tables.lmcache import LMCACHE
from tests.contract.tables.model import LATE, MODEL
from tests.contract.tables.scheduler import KV_EVENTS, SCHEDULING

TABLES: dict[str, tuple[Use, ...]] = {
    "vLLM": (*CONNECTOR, *SCHEDULING, *KV_EVENTS, *MODEL, *LATE),
    "LMCache": LMCACHE,
}
