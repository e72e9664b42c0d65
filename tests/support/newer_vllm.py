"""A vLLM newer than any tested one. Our modules are imported only after vLLM is changed."""

from __future__ import annotations

import importlib.metadata
from multiprocessing.connection import Connection

_BASE = """
from abc import abstractmethod
from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector
"""


def make_connector(change: str, says: Connection) -> None:
    """In a process of its own: change vLLM, and send what our connector's checks say of it."""
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return "0.34.0" if distribution_name.startswith("vllm") else real(distribution_name)

    importlib.metadata.version = version
    exec(f"{_BASE}\n{change}")
    try:
        from lmcache_connector.connector import LMCacheTieredConnector
        from lmcache_connector.vllm_compat.api import names, versions

        versions.check_overrides(LMCacheTieredConnector, names.KVConnectorBase_V1)
        says.send("is made")
    except ValueError as error:
        says.send(str(error))
