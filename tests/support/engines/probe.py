"""One vLLM engine in this process, opened up: exact times, exact KV bytes.

The demo, the tests and the benchmarks use it to prove what they claim. :class:`EngineProbe` steps a
real ``LLM`` by hand, so that it can look at a request's blocks while they are still its own. With
several ranks the workers have processes of their own; the scheduler always runs in this one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import PREFIX
from tests.support.engines.kv_digests import (
    Digests,
    block_digests,
    digest_layers_on_rank,
    digest_on_rank,
    merged,
    shard_digests,
)
from tests.support.engines.settings import BLOCK_SIZE

DIGEST_TOKENS = 256
_MAX_STEPS = 200_000
_PAUSE_SECONDS = 0.001
_Digests = tuple[tuple[str, ...], tuple[tuple[str, ...], ...], Digests]
"""By block, by shard, and by layer."""
_NO_TOKEN: tuple[float, _Digests] = (0.0, ((), (), {}))


@dataclass(frozen=True)
class Served:
    """What came of one request.

    ``block_digests``: one per KV block that the prompt fills, over all layers. ``shard_digests``:
    one per ``DIGEST_TOKENS`` tokens of the prompt and KV head of the model, the same for any block
    size and number of ranks. ``layer_digests``: instead of these, of a model whose layers follow
    several rules, or a window. ``cached_tokens``: what vLLM did not have to compute.
    ``external_hit_tokens``: what the connector loaded meanwhile, for all requests served together.
    """

    token_ids: tuple[int, ...]
    ttft_seconds: float
    cached_tokens: int
    external_hit_tokens: int
    block_digests: tuple[str, ...]
    shard_digests: tuple[tuple[str, ...], ...] = ()
    layer_digests: Digests = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A request that has ended, with vLLM's last output for it."""

    served: Served
    output: Any


class EngineProbe:
    """A real engine. ``kv_transfer``: the JSON of ``--kv-transfer-config``, or none."""

    def __init__(
        self, model: str, kv_transfer: dict[str, Any] | None = None, **engine_args: Any
    ) -> None:
        # Not on import: programs that only import this class must not run their engines so.
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # the engine is in this process
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {
            "max_model_len": 16384,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,
            "seed": 0,
        }
        if current_platform.is_cuda():  # several engines share one; blocks as on CPUs
            settings |= {"gpu_memory_utilization": 0.3, "block_size": BLOCK_SIZE}
        settings |= engine_args
        num_ranks = settings.get("tensor_parallel_size", 1)
        num_ranks *= settings.get("pipeline_parallel_size", 1)
        if num_ranks > 1:  # one core each; only vLLM's CPU build looks at it
            cores = "|".join(map(str, range(num_ranks)))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        if kv_transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
        self._ids = count()
        self._llm = LLM(model=model, disable_log_stats=False, **settings)
        self.engine = self._llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.core.post_step = _with_pauses(self.core)

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler side of the connector."""
        return self.scheduler.connector

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(worker, *args)`` in the process of every rank: a top-level function."""
        answers: list[Any] = self.core.model_executor.collective_rpc(function, args=args)
        return answers

    def serve(self, prompt: Sequence[int], max_tokens: int = 2, **sampling: Any) -> Served:
        """Serve one request to its end. ``prompt``: token ids. TTFT includes queueing and loads."""
        return self.serve_many([prompt], max_tokens, **sampling)[0]

    def serve_many(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 2, **sampling: Any
    ) -> list[Served]:
        """Serve requests that arrive together, to the end of the last."""
        started = time.perf_counter()
        names = [self.add(prompt, max_tokens, **sampling) for prompt in prompts]
        return [finished.served for finished in self.finish(names, started)]

    def answer(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[tuple[int, ...]], None]
    ) -> Served:
        """Serve one request to the model's own end; ``on_tokens`` gets all tokens so far."""
        started = time.perf_counter()
        request_id = self.add(prompt, max_tokens, ignore_eos=False)
        (finished,) = self.finish(
            [request_id],
            started,
            on_output=lambda output: on_tokens(tuple(output.outputs[0].token_ids)),
        )
        return finished.served

    def finish(
        self,
        names: Sequence[str],
        started: float,
        *,
        drain: bool = True,
        on_output: Callable[[Any], None] = lambda output: None,
    ) -> list[Finished]:
        """Step until requests have ended and, with ``drain``, connectors have let go of their
        blocks.

        ``names``: their ids, in the order of the result. ``started``: when they arrived, by
        ``time.perf_counter``.
        """
        before = self.external_hit_tokens()
        first_tokens: dict[str, tuple[float, _Digests]] = {}
        outputs: dict[str, Any] = {}
        for _ in range(_MAX_STEPS):
            for output in self.engine.step():
                name = output.request_id
                on_output(output)
                if name not in first_tokens and output.outputs[0].token_ids:
                    seconds = time.perf_counter() - started
                    num_tokens = len(output.prompt_token_ids or ())
                    first_tokens[name] = seconds, self._digest(name, num_tokens)
                if output.finished:
                    outputs[name] = output
            if outputs.keys() == set(names):
                break
        else:
            raise RuntimeError("requests did not finish")
        if drain:
            self.drain()
        external = self.external_hit_tokens() - before
        return [
            _finished(outputs[name], external, *first_tokens.get(name, _NO_TOKEN)) for name in names
        ]

    def add(self, prompt: Sequence[int], max_tokens: int = 2, **sampling: Any) -> str:
        """Add a request without stepping; returns its id."""
        from vllm import SamplingParams, TokensPrompt

        settings = {"temperature": 0.0, "ignore_eos": True} | sampling
        params = SamplingParams(max_tokens=max_tokens, **settings)
        request_id = f"probe-{next(self._ids)}-"
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt)), params)
        return request_id

    def external_hit_tokens(self) -> int:
        """Tokens the connector has planned to load so far."""
        counts = self._scheduler_counts()
        if counts.total("load_jobs"):  # of tiers, which count all they load
            return int(counts.total("hit_tokens"))
        return int(counts.total("hit_tokens") + counts.total("p2p_hit_tokens"))

    def counts(self) -> Samples:
        """What the connector has counted since the start on its scheduler side and on all ranks,
        under the names of its metrics."""
        counts = self._scheduler_counts()
        for rank_counts in self.on_ranks(counts_on_rank):
            counts.merge(rank_counts)
        return counts

    def metrics(self) -> dict[str, float]:
        """The connector's metrics as vLLM's own logger has them for Prometheus, by short name and
        label values: ``loaded_bytes_total cpu``."""
        from prometheus_client import REGISTRY

        return {
            " ".join((sample.name.removeprefix(PREFIX), *_own_labels(sample.labels))): sample.value
            for family in REGISTRY.collect()
            if family.name.startswith(PREFIX)
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }

    def drain(self) -> None:
        """Step until the connector has let go of all blocks."""
        for _ in range(_MAX_STEPS):
            if not self.scheduler.has_requests():
                return
            self.engine.step()
        raise RuntimeError("the engine does not come to rest")

    def reset_prefix_cache(self) -> None:
        """Forget vLLM's own prefix cache, and nothing else."""
        self.drain()
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def shutdown(self) -> None:
        self.engine.engine_core.shutdown()

    @property
    def _has_unlike_layers(self) -> bool:
        """Whether requests let go of blocks as they go on, or a drafter has layers of its own."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        speculative = self.scheduler.vllm_config.speculative_config
        return any(type(g.kv_cache_spec).__name__ == "SlidingWindowSpec" for g in groups) or (
            speculative is not None and speculative.uses_draft_kv_cache()
        )

    def _scheduler_counts(self) -> Samples:
        from lmcache_connector.connector import LMCacheTieredConnector

        counts = Samples()
        for connector in parts_of(self.connector):
            if isinstance(connector, LMCacheTieredConnector):
                counts.merge(connector._scheduler_side.tally.totals)
        return counts

    def _digest(self, request_id: str, num_tokens: int) -> _Digests:
        """Digests of a prompt's KV while the request holds its blocks."""
        running = [name for name in self.scheduler.requests if name.startswith(request_id)]
        if not running:
            return (), (), {}
        groups = self.scheduler.kv_cache_manager.get_block_ids(running[0])
        if len(groups) > 1 or self._has_unlike_layers:
            layers = self.on_ranks(digest_layers_on_rank, groups, num_tokens)
            return (), (), merged(layers)
        (block_ids,) = groups
        size = self.scheduler.block_size
        filled = block_ids[: num_tokens // size]
        ranks = self.on_ranks(digest_on_rank, filled, len(filled) * size, (size, DIGEST_TOKENS))
        return block_digests(ranks, size), shard_digests(ranks, DIGEST_TOKENS), {}


def _with_pauses(core: Any) -> Callable[..., None]:
    """As vLLM's core does in a process of its own: a step that has nothing to compute ends with a
    pause, in which others get the GIL. In this process it would be stepped in a tight loop."""
    post_step = core.post_step

    def pausing(model_executed: bool) -> None:
        post_step(model_executed=model_executed)
        if not model_executed and core.scheduler.has_requests():
            time.sleep(_PAUSE_SECONDS)

    return pausing


def _finished(
    output: Any, external_hit_tokens: int, ttft_seconds: float, digests: _Digests
) -> Finished:
    served = Served(
        token_ids=tuple(output.outputs[0].token_ids),
        ttft_seconds=ttft_seconds,
        cached_tokens=output.num_cached_tokens or 0,
        external_hit_tokens=external_hit_tokens,
        block_digests=digests[0],
        shard_digests=digests[1],
        layer_digests=digests[2],
    )
    return Finished(served, output)


def counts_on_rank(worker: Any) -> Samples:
    """What the tiered connector of one rank has counted; hand-overs are counted by schedulers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_connector.connector import LMCacheTieredConnector

    counts = Samples()
    for connector in parts_of(get_kv_transfer_group()):
        if isinstance(connector, LMCacheTieredConnector):
            counts.merge(connector._worker_side._metrics.tally.totals)
    return counts


def parts_of(connector: Any) -> Sequence[Any]:
    """The connector, or those that vLLM's ``MultiConnector`` puts together."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    if connector is None:
        return ()
    return connector.sub_connectors if isinstance(connector, MultiConnector) else (connector,)


def _own_labels(labels: dict[str, str]) -> list[str]:
    assert labels["engine"] == "0"
    return [value for name, value in labels.items() if name not in {"engine", "model_name"}]
