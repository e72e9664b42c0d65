"""``bench``: from which prefix length on does loading from Redis beat recompute, here?

Measured: the way to Redis and back, through the engine's own code. The prefill speed comes from a
running engine's metrics or from the user; without one, the answer is the speed below which loading
wins.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_connector.cli.engine.scrape import fetch, ratio
from lmcache_connector.cli.redis.round_trip import RoundTrip
from lmcache_connector.cli.report import CliError, Report, duration, size
from lmcache_connector.cli.target import Target, open_admin
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.storage.redis.config import MIB, RedisTierConfig

_CHUNK_TOKENS = 128  # the default of chunk_size
_LENGTHS = (256, 1024, 4096, 16384, 65536)
_WAIT_SECONDS = 60.0
_REPEATS = 3
_COLUMNS = ("prefix tokens ", "KV ", "load ", "recompute ", "load wins below ")
_DEFAULT_TOKEN_BYTES = 128 << 10  # a model of 8 billion parameters with 8 KV heads, in bfloat16
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Options:
    """As typed. ``prefill``: tokens per second."""

    model: str | None
    token_bytes: int | None
    engine: str | None
    prefill: float | None
    mib: int


@dataclass(frozen=True, slots=True)
class RedisSpeed:
    """A load of n bytes takes ``latency_seconds + n / read_bytes_per_second``."""

    latency_seconds: float
    read_bytes_per_second: float
    write_bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.read_bytes_per_second


def run(report: Report, target: Target, options: Options) -> None:
    token_bytes, source = _token_bytes(options)
    prefill = _prefill_speed(options)
    tier = target.tier_config()
    speed = _measure(tier, options.mib * MIB, token_bytes * _CHUNK_TOKENS)
    crossover = crossover_tokens(speed, token_bytes, prefill) if prefill else None
    lengths = [_at(speed, token_bytes, prefill, num_tokens) for num_tokens in _LENGTHS]
    if report.as_json:
        report.emit(
            {
                "ok": True,
                "redis": str(tier.address),
                "token_bytes": token_bytes,
                "token_bytes_from": source,
                "prefill_tokens_per_second": prefill,
                "latency_seconds": speed.latency_seconds,
                "read_bytes_per_second": speed.read_bytes_per_second,
                "write_bytes_per_second": speed.write_bytes_per_second,
                "break_even_prefill_tokens_per_second": speed.read_bytes_per_second / token_bytes,
                "crossover_tokens": crossover,
                "lengths": lengths,
            }
        )
        return
    report.say(
        f"{tier.address}: read {size(speed.read_bytes_per_second)}/s after "
        f"{duration(speed.latency_seconds)}, write {size(speed.write_bytes_per_second)}/s; "
        f"{size(token_bytes)} of KV per token ({source})"
    )
    report.table(_COLUMNS, map(_row, lengths))
    report.say(_answer(prefill, crossover))


def _row(length: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{length['tokens']:,}",
        size(length["bytes"]),
        duration(length["load_seconds"]),
        duration(length["recompute_seconds"]),
        f"{length['break_even_tokens_per_second']:,.0f} tok/s",
    )


def crossover_tokens(speed: RedisSpeed, token_bytes: float, prefill: float) -> int | None:
    """The shortest prefix in whole chunks that loads quicker than it is computed; ``None``: none.

    Compute is taken to be linear in tokens; attention makes long prefixes dearer than that, so
    that loading wins earlier than this says, never later.
    """
    gain_per_token = 1 / prefill - token_bytes / speed.read_bytes_per_second
    if gain_per_token <= 0:
        return None
    tokens = speed.latency_seconds / gain_per_token
    return max(1, math.ceil(tokens / _CHUNK_TOKENS)) * _CHUNK_TOKENS


def _answer(prefill: float | None, crossover: int | None) -> str:
    if prefill is None:
        return (
            "How fast this model computes is not known: give --engine URL of a running one, or "
            "--prefill TOKENS_PER_SECOND."
        )
    speed = f"at {prefill:,.0f} tokens of prefill per second"
    if crossover is None:
        return f"Loading from this Redis never beats recompute {speed}."
    return f"Loading beats recompute from {crossover:,} tokens on, {speed}."


def _at(
    speed: RedisSpeed, token_bytes: float, prefill: float | None, num_tokens: int
) -> dict[str, Any]:
    load_seconds = speed.seconds(num_tokens * token_bytes)
    return {
        "tokens": num_tokens,
        "bytes": num_tokens * token_bytes,
        "load_seconds": load_seconds,
        "recompute_seconds": num_tokens / prefill if prefill else None,
        "break_even_tokens_per_second": num_tokens / load_seconds,
    }


def _measure(tier: RedisTierConfig, num_bytes: int, chunk_bytes: int) -> RedisSpeed:
    """Latency from one small chunk, bandwidth from many; the best of a few tries each."""
    chunk_bytes = min(max(chunk_bytes, 64 << 10), 16 * MIB)
    with open_admin(tier) as admin:
        small, large = RoundTrip(tier, 4096), RoundTrip(tier, chunk_bytes)
        try:
            with small:
                _must(small.write(1, _WAIT_SECONDS), small)
                latency = min(_timed(small) for _ in range(5))
            with large:
                started = time.monotonic()
                _must(large.write(max(2, num_bytes // chunk_bytes), _WAIT_SECONDS), large)
                write_seconds = time.monotonic() - started
                read_seconds = min(_timed(large) for _ in range(_REPEATS))
        finally:
            admin.unlink_anywhere([*small.names, *large.names])
    moved = len(large.keys) * large.chunk_bytes
    return RedisSpeed(latency, moved / max(read_seconds - latency, 1e-6), moved / write_seconds)


def _timed(trip: RoundTrip) -> float:
    """Seconds of one read of all chunks. Comparing them takes part of it, at memory speed."""
    started = time.monotonic()
    _must(trip.read(_WAIT_SECONDS), trip)
    return time.monotonic() - started


def _must(good: bool, trip: RoundTrip) -> None:
    """Raises :class:`CliError` if the tier did not do what it should."""
    if not good:
        raise CliError(
            f"Redis did not keep what was written: {trip.why}",
            "`lmcache-connector check` says more",
            code=1,
        )


def _token_bytes(options: Options) -> tuple[int, str]:
    if options.token_bytes is not None:
        return options.token_bytes, "as given"
    if options.model is not None:
        return model_token_bytes(Path(options.model)), "from the model's config.json"
    return _DEFAULT_TOKEN_BYTES, "a model of 8 billion parameters; --model or --token-bytes tell"


def model_token_bytes(folder: Path) -> int:
    """K and V of one token over all layers and heads. Raises :class:`CliError`."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CliError(f"{path} is not readable as JSON", "give the model's folder") from None
    if not isinstance(config, dict):
        raise CliError(f"{path} is no model's configuration")
    config = config.get("text_config") or config
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        width = _DTYPE_BYTES.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
        if "kv_lora_rank" in config:
            return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * width
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CliError(f"{path} does not say {error}", "give --token-bytes instead") from None
    return layers * kv_heads * head_dim * 2 * width


def _prefill_speed(options: Options) -> float | None:
    """Tokens per second. From an engine: what its loads saved, or its requests' prefill times."""
    if options.prefill is not None or options.engine is None:
        return options.prefill
    snapshot = fetch(options.engine)
    saved = ratio(
        snapshot.total(f"{PREFIX}prefill_saved_tokens_total"),
        snapshot.total(f"{PREFIX}prefill_saved_seconds_total"),
    )
    if saved is not None:
        return saved
    computed = snapshot.total("vllm:request_prefill_kv_computed_tokens_sum")
    return ratio(computed, snapshot.total("vllm:request_prefill_time_seconds_sum"))
