"""Where an engine's ranks are among those of all data-parallel engines and machines, and which of a
machine's cores they compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from lmcache_connector.vllm_compat.api.cpu_cores import RESERVED_CORES, cores_are_chosen

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def engine_index(parallel: ParallelConfig) -> int:
    """Of this engine among its data-parallel siblings. ``data_parallel_rank`` is 0 in all of them
    unless the model has experts."""
    return int(parallel.data_parallel_index)


def engine_header(parallel: ParallelConfig, engine_id: str) -> int:
    """What ``X-data-parallel-rank`` leads a request of the common API to this engine; -1 if the API
    is this engine's alone, or takes no such header."""
    has_header = _is_one_of_many(parallel, engine_id) and not parallel.local_engines_only
    return engine_index(parallel) if has_header else -1


def core_warning(config: VllmConfig) -> str | None:
    """What to tell people whose engine computes with fewer cores, or beside its own scheduler, for
    having a connector; ``None``: nothing.

    vLLM's build for CPUs sets a core per rank aside for its scheduler, and with any connector
    another one, meant for NIXL's thread that never sleeps; where too few are left it sets none
    aside (its ``OMPProcessManager``). This connector's threads sleep unless they copy.
    """
    if not current_platform.is_cpu() or cores_are_chosen() or not _is_without_nixl(config):
        return None
    return (
        "with a KV connector vLLM sets one more core aside per rank, or none where there are too "
        "few. This connector needs none: set "
        f"{RESERVED_CORES}={config.parallel_config.local_world_size} to compute with the cores "
        "that vLLM has without it"
    )


def _is_without_nixl(config: VllmConfig) -> bool:
    """Whether there are connectors, and none is vLLM's own for NIXL."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return False
    others = transfer.kv_connector_extra_config.get("connectors", ())
    names = [transfer.kv_connector, *(other.get("kv_connector") for other in others)]
    return not any("nixl" in str(name).lower() for name in names)


def _is_one_of_many(parallel: ParallelConfig, engine_id: str) -> bool:
    """vLLM tells the engines of a model without experts that each is alone, but names them."""
    named = engine_id.endswith(f"_dp{parallel.data_parallel_index}")
    return named or parallel.data_parallel_size > 1
