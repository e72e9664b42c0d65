"""A storm of requests on an engine whose caches are too small, while its Valkey is tampered
with.

Runs in the engine's process. What lies in a request's blocks when its first token comes is kept,
and compared in the end with what the same prompt's KV is when nothing is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from lmcache_connector.metrics.samples import Samples
from tests.support.engines.calls import check_integrity, preemptions
from tests.support.engines.kv_digests import NULL_BLOCK, logical
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt

_MAX_IN_FLIGHT = 8
_LENGTHS = (300, 513, 700, 1024, 400, 900, 640, 1200)
_MAX_STEPS = 6000
"""So many steps without any output mean that the engine hangs."""
_FAR = 0.1
"""KV computed in another batch is some hundredths of its size away, that of another token more than
its size."""

Blocks = dict[tuple[str, int], Any]
"""By layer and by the block's first token."""


@dataclass(frozen=True)
class Weather:
    """Chances per step: ``aborts`` of a request, ``damages`` of a value in the Valkey at ``port``,
    ``resets`` of vLLM's prefix cache while requests run, and ``updates`` of the weights, each with
    such a reset."""

    port: int
    aborts: float = 0.005
    damages: float = 0.0
    resets: float = 0.0
    updates: float = 0.0
    num_requests: int = 24


@dataclass
class StormReport:
    """``far``: request, layer, first token and distance of each block that was wrong.
    ``nearest``: the largest distance of a block that was right."""

    requests: int = 0
    aborted: int = 0
    damaged: int = 0
    resets: int = 0
    updates: int = 0
    preemptions: int = 0
    checked_blocks: int = 0
    nearest: float = 0.0
    far: list[tuple[int, str, int, float]] = field(default_factory=list)
    counts: Samples = field(default_factory=Samples, repr=False)


@dataclass
class _Kept:
    number: int
    prompt: list[int]
    blocks: Blocks
    weights: int


class Storm:
    """Requests on shared prefixes, own ones, and conversations."""

    def __init__(self, probe: EngineProbe, seed: int, weather: Weather) -> None:
        import torch

        self._probe = probe
        self._weather = weather
        self._chance = random.Random(seed)
        self._prefixes = [random_prompt(7000 + i, n) for i, n in enumerate(_LENGTHS)]
        self._prompts: dict[str, list[int]] = {}
        self._wanted: dict[str, int] = {}
        self._kept: list[_Kept] = []
        self._valkey = redis.Redis(port=weather.port)
        self._embeddings = torch.cat(probe.on_ranks(copy_embeddings))
        self._weights = 0  # which of two
        self._is_updating = False  # vLLM has not taken the reset yet
        self.report = StormReport()

    def blow(self, preempted: Sequence[str]) -> None:
        """Goes on, up to four times as long, until vLLM has preempted a request: whether it does
        depends on how long loads take."""
        probe, weather, chance = self._probe, self._weather, self._chance
        steps = 0

        def has_more() -> bool:
            most = weather.num_requests * (1 if preempted else 4)
            return self.report.requests < most

        while has_more() or self._wanted:
            while has_more() and self._has_room():
                self._add()
            steps += 1
            for output in probe.engine.step():
                steps = 0
                self._heard(output)
            if steps > _MAX_STEPS:
                raise RuntimeError(f"it hangs: {self._state()}")
            if self._wanted and chance.random() < weather.aborts:
                self._abort(chance.choice(list(self._wanted)))
            if chance.random() < weather.damages:
                self._damage()
            if chance.random() < weather.updates and not self._is_updating:
                self._change_weights(1 - self._weights)
            if self._is_updating or chance.random() < weather.resets:
                self._reset()
        probe.drain()
        check_integrity(probe)

    def compare(self) -> None:
        """With what is computed when nothing is loaded, one prompt at a time."""
        chosen = self._chance.sample(self._kept, min(8, len(self._kept)))
        for kept in sorted(chosen, key=lambda each: each.weights):
            if kept.weights != self._weights:
                self._change_weights(kept.weights)
                self._reset()
            fresh = self._compute(kept.prompt)
            for place in sorted(kept.blocks.keys() & fresh.keys()):
                far = _distance(kept.blocks[place], fresh[place])
                self.report.checked_blocks += 1
                if far > _FAR:
                    self.report.far.append((kept.number, *place, round(far, 3)))
                else:
                    self.report.nearest = max(self.report.nearest, far)

    # -- details -------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._wanted) < _MAX_IN_FLIGHT and self._chance.random() < 0.3

    def _add(self) -> None:
        chance = self._chance
        prefix = chance.choice(self._prefixes)
        prompt = [*prefix, *random_prompt(chance.randrange(10**9), chance.choice([1, 5, 60, 300]))]
        room = self._probe.scheduler.max_model_len - len(prompt)
        wanted = min(chance.choice([2, 10, 60, 150]), room)
        name = self._probe.add(prompt, wanted)
        self._prompts[name], self._wanted[name] = prompt, wanted
        self.report.requests += 1

    def _heard(self, output: Any) -> None:
        name = output.request_id
        if name not in self._wanted:
            return
        answer = output.outputs[0].token_ids
        prompt = self._prompts[name]
        if len(answer) and output.num_cached_tokens and not self._is_updating:
            blocks = blocks_of(self._probe, name, len(prompt))
            is_kept = any(k.prompt is prompt and k.weights == self._weights for k in self._kept)
            if blocks and not is_kept:
                number = int(name.split("-")[1])
                self._kept.append(_Kept(number, prompt, blocks, self._weights))
        if output.finished:
            wanted, reason = self._wanted.pop(name), output.outputs[0].finish_reason
            assert len(answer) == wanted, (name, len(prompt), len(answer), wanted, reason)
            if len(prompt) + len(answer) < 1700 and self._chance.random() < 0.3:
                self._prefixes[self._chance.randrange(len(self._prefixes))] = [*prompt, *answer]

    def _abort(self, name: str) -> None:
        del self._wanted[name]
        self._probe.engine.abort_request([name])
        self.report.aborted += 1

    def _damage(self) -> None:
        """One value, in one of the ways in which values go bad."""
        names = [n for n in self._valkey.scan_iter("lmc:*", count=1000) if b"}:" in n]
        if not names:
            return
        name = self._chance.choice(names)
        with suppress(redis.ResponseError):
            value = self._valkey.get(name) or b"\0"
            how = self._chance.choice(("gone", "cut", "flip", "other", "type"))
            if how in ("gone", "type"):
                self._valkey.delete(name)
            if how == "type":
                self._valkey.rpush(name, b"x")
            elif how == "cut":
                self._valkey.set(name, value[: self._chance.randrange(len(value))])
            elif how == "flip":
                at = self._chance.randrange(len(value))
                self._valkey.setrange(name, at, bytes([value[at] ^ 1]))
            elif how == "other":
                other = self._valkey.get(self._chance.choice(names))
                self._valkey.set(name, other or b"")
            self.report.damaged += 1

    def _reset(self) -> None:
        """vLLM refuses while a load holds blocks, also that of a request that was aborted."""
        with suppress(RuntimeError):
            assert self._probe.engine.engine_core.reset_prefix_cache(reset_running_requests=True)
            self.report.resets += 1
            self._is_updating = False

    def _change_weights(self, weights: int) -> None:
        """The connector is told of every other one."""
        self._weights, self._is_updating = weights, True
        factor = (1.0, -1.0)[weights]
        self._probe.on_ranks(set_embeddings, factor * self._embeddings, self.report.updates % 2)
        self.report.updates += 1

    def _compute(self, prompt: list[int]) -> Blocks:
        name = self._probe.add(prompt, 2, skip_reading_prefix_cache=True)
        blocks: Blocks = {}
        while self._probe.engine.has_unfinished_requests():
            for output in self._probe.engine.step():
                if output.outputs[0].token_ids and not blocks:
                    blocks = blocks_of(self._probe, name, len(prompt))
                assert not output.num_cached_tokens
        self._probe.drain()
        return blocks

    def _state(self) -> str:
        scheduler = self._probe.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return (
            f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks} blocks free, "
            + ", ".join(
                f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens}"
                for r in scheduler.requests.values()
            )
            + f", jobs {self._probe.connector._scheduler.jobs._jobs}"
        )


def copy_embeddings(worker: Any) -> Any:
    return worker.model_runner.get_model().model.embed_tokens.weight.detach().clone()


def set_embeddings(worker: Any, embeddings: Any, is_told: int) -> None:
    """Load the embeddings of all ranks by the model's own method, which the connector watches; or,
    unless ``is_told``, flip the sign of this rank's embeddings in place."""
    import torch

    model = worker.model_runner.get_model()
    if is_told:
        model.load_weights([("model.embed_tokens.weight", embeddings)])
    else:
        with torch.no_grad():
            model.model.embed_tokens.weight.neg_()


def blocks_of(probe: EngineProbe, name: str, num_tokens: int) -> Blocks:
    """Copies of a running request's blocks that hold tokens of its prompt alone."""
    running = [n for n in probe.scheduler.requests if n == name or n.startswith(name + "-")]
    if not running:
        return {}
    groups = probe.scheduler.kv_cache_manager.get_block_ids(running[0])
    by_rank = probe.on_ranks(copy_blocks, groups, num_tokens)
    return {
        (f"rank {rank} {layer}", first): copies
        for rank, found in enumerate(by_rank)
        for (layer, first), copies in found.items()
    }


def copy_blocks(worker: Any, groups: Sequence[Sequence[int]], num_tokens: int) -> Blocks:
    """Of one rank."""
    runner = worker.model_runner
    caches = runner.compilation_config.static_forward_context
    found: Blocks = {}
    drafts = runner.vllm_config.speculative_config
    for group, ids in zip(runner.kv_cache_config.kv_cache_groups, groups, strict=True):
        size = group.kv_cache_spec.block_size
        for layer in group.layer_names:
            cache = caches[layer].kv_cache
            is_state = not hasattr(cache, "shape")
            last = num_tokens // size - (is_state and num_tokens % size == 0)
            for index, block in enumerate(ids[:last]):
                if block != NULL_BLOCK:
                    copies = [
                        piece[block : block + 1].clone()
                        for piece in (cache if is_state else (cache,))
                    ]
                    if is_state and drafts is not None:
                        # Behind the convolution's window lies what rejected drafts have left.
                        copies[0] = copies[0][:, : -drafts.num_speculative_tokens]
                    found[layer, index * size] = copies if is_state else copies[0]
    return found


def _distance(one: Any, other: Any) -> float:
    """Of the token, or piece of a state, that differs most, relative to its size."""
    if isinstance(one, list):
        pairs = zip(one, other, strict=True)
        return max(_relative(a.float().flatten(), b.float().flatten()) for a, b in pairs)
    return _relative(_tokens(one), _tokens(other))


def _relative(one: Any, other: Any) -> float:
    far = (one - other).abs().mean(-1) / other.abs().mean(-1).clamp(min=1e-9)
    return float(far.max())


def _tokens(block: Any) -> Any:
    """As floats [heads, tokens, K or V, head size]."""
    import torch

    values = torch.from_numpy(logical(block, [0]).copy()).view(block.dtype).float()
    heads, tokens, content = values.shape
    return values.view(heads, tokens, 2, content // 2)


def run_storm(probe: EngineProbe, seed: int, weather: Weather) -> StormReport:
    storm = Storm(probe, seed, weather)
    with preemptions(probe) as preempted:
        storm.blow(preempted)
    storm.report.preemptions = len(preempted)
    storm.report.counts = probe.counts()
    storm.compare()
    probe.drain()
    check_integrity(probe)
    return storm.report
