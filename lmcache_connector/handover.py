"""``LMCacheP2PConnector``: the tiered connector with the roles of a KV transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_connector.config.tiered import ConnectorConfig, parse_p2p_config
from lmcache_connector.connector import LMCacheTieredConnector
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.peers.heartbeat import Heartbeat, Registration
from lmcache_connector.vllm_compat.machines import engine_header, engine_index

if TYPE_CHECKING:
    import torch

    from lmcache_connector.worker.adapter import WorkerAdapter

_SEVERAL_HOSTS = "lmcache-connector: an engine on several hosts cannot transfer KV; use redis_url."


class LMCacheP2PConnector(LMCacheTieredConnector):
    """Transfers the KV of prompts from prefill to decode instances. See docs/disaggregated.md."""

    _does_both = True
    _heartbeat: Heartbeat | None = None

    def _parse_config(self) -> ConnectorConfig:
        transfer = self._kv_transfer_config
        if self._vllm_config.parallel_config.nnodes_within_dp > 1:
            raise UnsupportedError(_SEVERAL_HOSTS)
        extra = transfer.kv_connector_extra_config
        return parse_p2p_config(extra, transfer.kv_port, str(transfer.kv_role))

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> WorkerAdapter:
        worker = super()._make_worker(kv_caches)
        if worker.rank == 0:
            self._heartbeat = self._make_heartbeat()
        return worker

    def _make_heartbeat(self) -> Heartbeat | None:
        """``None`` without a router to register with."""
        config, parallel = self._config, self._vllm_config.parallel_config
        first_rank = engine_index(parallel) * parallel.world_size
        address = config.advertised_address(first_rank)
        if config.router is None or config.http_address is None or address is None:
            return None
        engine_id, role = str(self._kv_transfer_config.engine_id), self._kv_transfer_config.kv_role
        header = engine_header(parallel, engine_id)
        told = Registration(str(role), config.http_address, str(address), engine_id, header)
        return Heartbeat(told, config.router, config.heartbeat_seconds, config.router_secret_bytes)

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        super().shutdown()
