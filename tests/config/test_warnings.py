"""Valid but useless settings get one sentence each; sound settings none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.config.warnings import (
    available_memory,
    settings_warnings,
    size_warnings,
)

MIB, GIB = 1 << 20, 1 << 30
SOUND = {"max_model_len": 8192, "chunk_bytes": 16 * MIB, "available_bytes": 64 * GIB}


def of_settings(kv_role: str = "kv_both", **extra: Any) -> list[str]:
    return list(map(str, settings_warnings(parse_config(extra), kv_role)))


def of_sizes(sizes: dict[str, Any] = SOUND, ranks: int = 1, **extra: Any) -> list[str]:
    config = parse_config({"chunk_size": 256, "cpu_gib": 8.0} | extra)
    config = config.fitted(config.chunk_size, ranks)
    return list(map(str, size_warnings(config, **sizes)))


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_producer", "kv_consumer"])
def test_sound_settings_get_no_warning(kv_role: str) -> None:
    extra: dict[str, Any] = {"redis_url": "redis://h", "redis_ttl_seconds": 60}
    assert of_settings(kv_role, **extra, redis_ttl_refresh=True) == []
    assert of_sizes() == []


def test_a_label_that_never_changes_names_no_update(tmp_path: Path) -> None:
    (warning,) = of_settings(weights_label="step 7")
    assert "weights_label 'step 7' never changes" in warning
    assert "set file:PATH" in warning
    write(tmp_path / "label", "step 7")
    assert of_settings(weights_label=f"file:{tmp_path / 'label'}") == []


def test_chunks_wider_than_a_window_get_a_warning() -> None:
    assert of_sizes({**SOUND, "narrowest_window": 256}) == []
    (warning,) = of_sizes({**SOUND, "narrowest_window": 128})
    assert "chunk_size 256 is more than the 128 tokens of the model's narrowest window" in warning


def test_a_tier_too_small_for_one_prompt_says_the_size_it_needs() -> None:
    (warning,) = of_sizes(cpu_gib=0.25)  # 16 chunks; the longest prompt has 32, 0.5 GiB
    assert "max_model_len 8192" in warning
    assert "raise cpu_gib to 0.6 or more" in warning
    assert of_sizes(cpu_gib=0.6) == []
    (warning,) = of_sizes(ranks=2, cpu_gib=0.6)
    assert "raise cpu_gib to 1.1 or more" in warning


V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
V1 = (
    *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "total_inactive_file",
)


@pytest.mark.parametrize(("folder", "limit", "used", "reclaimable"), [V2, V1])
def test_a_containers_limit_counts(
    tmp_path: Path, folder: str, limit: str, used: str, reclaimable: str
) -> None:
    write(tmp_path / "proc/meminfo", f"MemAvailable: {4 * GIB // 1024} kB\n")
    write(tmp_path / folder / limit, f"{3 * GIB}\n")
    write(tmp_path / folder / used, f"{2 * GIB}\n")
    assert available_memory(tmp_path) == GIB
    write(tmp_path / folder / "memory.stat", f"anon 1\n{reclaimable} {GIB // 2}\n")
    assert available_memory(tmp_path) == GIB * 3 // 2  # the page cache counts as used
    write(tmp_path / folder / limit, f"{9 * GIB}\n")
    assert available_memory(tmp_path) == 4 * GIB
    write(tmp_path / folder / limit, "max\n")
    assert available_memory(tmp_path) == 4 * GIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_sharing_settings_apply_to_peers() -> None:
    peers = {"peers": ["127.0.0.1:7450"], "redis_timeout_seconds": 1.0}
    assert list(settings_warnings(parse_config(peers), "kv_consumer")) == []
    serves = parse_config({"peer_listen": "127.0.0.1:7450"})
    assert list(settings_warnings(serves, "kv_producer")) == []
    (warning,) = settings_warnings(parse_config({**peers, "redis_codec": "none"}), "kv_both")
    assert "redis_codec" in str(warning)
