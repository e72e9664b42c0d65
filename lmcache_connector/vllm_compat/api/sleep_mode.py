"""When vLLM may take away the memory of its paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

from lmcache_connector.vllm_compat.api.names import KVConnectorBase_V1

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def may_sleep_unseen(vllm_config: VllmConfig) -> bool:
    """Whether that may happen between two steps, and without a word to the ranks' connectors.

    Since 0.33 every rank is told. Before that, an engine in a process of its own first makes steps
    until no copy runs. One that its user steps does not; there the scheduler side stops the copies
    of ranks in its own process, but cannot reach others.
    """
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return False
    sleeps = bool(vllm_config.model_config.enable_sleep_mode)
    parallel = vllm_config.parallel_config
    has_workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    return sleeps and has_workers and not envs.VLLM_ENABLE_V1_MULTIPROCESSING
