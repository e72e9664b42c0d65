"""Warnings about valid settings that no user wants: a sentence each, with a remedy.

Some depend on the settings alone, some on the model and this host's memory. Settings that stop a
start are errors in :mod:`lmcache_connector.config.tiered`; problems of a server are reported on
connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_connector.config.tiered import ConnectorConfig

_GIB = 2**30
# Memory of a container, cgroup v2 and v1: folder, limit, use, reclaimable part of the use.
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)


@dataclass(frozen=True, slots=True)
class StartupWarning:
    """A problem and its remedy: two clauses without a full stop."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that programs can still get on this host or in this container, whichever is
    less; ``None`` if unknown."""
    host = _number(root / "proc/meminfo", "MemAvailable:")
    rooms = [] if host is None else [host * 1024]
    for folder, limit, used, reclaimable in _CGROUPS:
        try:
            room = int((root / folder / limit).read_text())
            room -= int((root / folder / used).read_text())
        except (OSError, ValueError):  # no such cgroup; or "max", which is no limit
            continue
        rooms.append(max(0, room + (_number(root / folder / "memory.stat", reclaimable) or 0)))
    return min(rooms, default=None)


def _number(path: Path, name: str) -> int | None:
    """The number in the line that begins with ``name``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def settings_warnings(config: ConnectorConfig, kv_role: str | None) -> Iterator[StartupWarning]:
    """Warnings that depend on the settings and the role alone."""
    if config.audit_share == 0:
        yield StartupWarning(
            "audit_share 0 audits no hit, so wrong KV would go unnoticed", "leave it out"
        )
    if config.weights_label is not None and not config.weights_label.startswith("file:"):
        yield StartupWarning(
            f"weights_label {config.weights_label!r} never changes, so it cannot name an "
            "update of the weights",
            "set file:PATH and write each label to that file, or leave it out",
        )
    if config.redis_url is not None:
        return
    reads = config.peers or config.peer_hosts or config.host_sharing
    idle = {name for name in config.model_fields_set if name.startswith("redis_")}
    if reads:
        idle.discard("redis_timeout_seconds")  # peers are read as Redis is
    if idle:
        yield StartupWarning(
            f"without redis_url, these settings have no effect: {', '.join(sorted(idle))}",
            "set redis_url, or leave them out",
        )
    if kv_role == "kv_consumer" and not reads:
        yield StartupWarning(
            "kv_role kv_consumer loads only, and without redis_url nobody stores what it could "
            "load, so every request is a miss",
            "set redis_url, or kv_role kv_both",
        )
    if kv_role == "kv_producer" and config.peer_listen is None and not config.host_sharing:
        yield StartupWarning(
            "kv_role kv_producer stores only, and without redis_url nobody can load what it stores",
            "set redis_url, or kv_role kv_both",
        )


def size_warnings(
    config: ConnectorConfig,
    *,
    max_model_len: int,
    chunk_bytes: int,
    available_bytes: int | None,
    narrowest_window: int | None = None,
) -> Iterator[StartupWarning]:
    """Sizes that do not fit the model or this host.

    ``chunk_bytes``: one rank's part of a chunk. ``available_bytes``: free memory of this host
    before the CPU tiers are allocated; ``None`` if unknown. ``narrowest_window``: of the model's
    layers, in tokens; ``None`` without windows.
    """
    if config.chunk_size > max_model_len:
        yield StartupWarning(
            f"chunk_size {config.chunk_size} is more than max_model_len {max_model_len}, so "
            "no request ever fills a chunk",
            "lower chunk_size",
        )
        return
    if narrowest_window is not None and config.chunk_size > narrowest_window:
        yield StartupWarning(
            f"chunk_size {config.chunk_size} is more than the {narrowest_window} tokens of "
            "the model's narrowest window, which has passed the beginning of a chunk of an answer "
            "before the chunk is full, so no hit ends inside an answer",
            "lower chunk_size, if the block size allows it",
        )
    longest_bytes = max_model_len // config.chunk_size * chunk_bytes
    if longest_bytes > config.rank_gib * _GIB:
        needed_gib = longest_bytes / _GIB * config.cpu_gib / config.rank_gib
        yield StartupWarning(
            f"cpu_gib {config.cpu_gib:g} holds less than one prompt of max_model_len "
            f"{max_model_len}, so such a prompt would evict chunks of its own",
            f"raise cpu_gib to {needed_gib + 0.05:.1f} or more",
        )
    if available_bytes is not None and config.cpu_gib * _GIB > available_bytes:
        yield StartupWarning(
            f"cpu_gib {config.cpu_gib:g} is more than the {available_bytes / _GIB:.1f} GiB that "
            "are free on this host, which may run out of memory as the tier fills",
            "lower cpu_gib",
        )
