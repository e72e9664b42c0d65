"""One ``generate`` with the tiers, in a process of its own where there is no vLLM.

Prints one JSON object: counts, the digest of the first tokens' KV, all tokens, seconds.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from tests.support import ROOT


class NoVllm(MetaPathFinder):
    """As if it were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def generate_elsewhere(
    model: Path,
    config: Mapping[str, Any],
    token_ids: Sequence[int],
    *,
    new_tokens: int = 2,
    kv_tokens: int = 0,
    warm_up: int = 0,
    threads: int = 1,
) -> dict[str, Any]:
    """Run it in another process. ``kv_tokens``: whose KV is digested. ``warm_up``: the length of
    a prompt of its own before it. ``threads``: of torch."""
    task = {
        "model": str(model),
        "config": dict(config),
        "token_ids": list(token_ids),
        "new_tokens": new_tokens,
        "kv_tokens": kv_tokens,
        "warm_up": warm_up,
        "threads": threads,
    }
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, json.dumps(task)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def kv_digest(tensors: Sequence[Any], num_tokens: int) -> str:
    """Of the first tokens' KV, ``[1, heads, tokens, content]`` each."""
    import torch

    hasher = hashlib.sha256()
    for each in tensors:
        hasher.update(each[:, :, :num_tokens].contiguous().view(torch.uint8).cpu().numpy())
    return hasher.hexdigest()


def main() -> None:
    task = json.loads(sys.argv[1])
    sys.meta_path.insert(0, NoVllm())
    import torch
    from transformers import AutoModelForCausalLM

    from lmcache_connector.transformers import KVTiers
    from tests.support.device import DEVICE

    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.bfloat16).to(DEVICE)
    prompt = torch.tensor([task["token_ids"]], device=DEVICE)
    limits = {"do_sample": False, "max_new_tokens": task["new_tokens"]}
    with KVTiers(model, task["config"]) as tiers:
        if task["warm_up"]:
            generator = torch.Generator().manual_seed(7)
            other = torch.randint(2, 64, (1, task["warm_up"]), generator=generator).to(DEVICE)
            model.generate(other, past_key_values=tiers.new_cache(), **limits)
        before = tiers.counts
        cache = tiers.new_cache()
        started = time.perf_counter()
        output = model.generate(prompt, past_key_values=cache, **limits)
        seconds = time.perf_counter() - started
        counts = {k: v - getattr(before, k) for k, v in asdict(tiers.counts).items()}
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)
    found = {
        "counts": counts,
        "kv": kv_digest(cache.tensors(), task["kv_tokens"]),
        "tokens": output[0].tolist(),
        "seconds": seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
