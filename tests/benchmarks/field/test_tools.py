"""What each tool is asked, as the installed versions understand it, and how its output is read.

The samples are what the tools wrote, of the versions that ``make field`` pins.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.field import benchmark, models
from benchmarks.field.aiperf import AiPerf
from benchmarks.field.cache_pressure import CachePressure
from benchmarks.field.lmcache_bench import LongDocQa, MultiRoundChat
from benchmarks.field.table import MEASURES
from benchmarks.field.tool import Target, Tool
from benchmarks.field.vllm_bench import VllmBench

SAMPLES = Path(__file__).parent / "samples"
LOAD = models.LOADS["trained"]


def target(folder: Path) -> Target:
    return Target("127.0.0.1:8000", "tiny", folder / "model", LOAD, folder / "out")


def sample(tool: str, file: str, folder: Path, **changes: Any) -> Path:
    """A folder with the sample of ``tool`` called ``file``, its top fields changed."""
    result = json.loads((SAMPLES / f"{tool}.json").read_text()) | changes
    (folder / file).write_text(json.dumps(result))
    return folder


# -- what is asked -------------------------------------------------------------------------------


def test_vllm_understands_what_it_is_asked(tmp_path: Path) -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(VllmBench().command(target(tmp_path))[3:])
    assert args.dataset_name == "prefix_repetition"
    prompt = args.prefix_repetition_prefix_len + args.prefix_repetition_suffix_len
    assert prompt == LOAD.context_tokens
    assert args.num_prompts == 3 * args.prefix_repetition_num_prefixes


@pytest.mark.parametrize("tool", [LongDocQa(), MultiRoundChat()])
def test_lmcache_understands_what_it_is_asked(tmp_path: Path, tool: Tool) -> None:
    from lmcache.cli.commands.bench.engine_bench.command import add_engine_arguments

    command = tool.command(target(tmp_path))
    assert command[1:3] == ["bench", "engine"]
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    args = parser.parse_args(command[3:])
    assert args.kv_cache_volume * args.tokens_per_gb_kvcache / LOAD.context_tokens == 10
    assert args.mrc_shared_prompt_length + args.mrc_chat_history_length in (1024, 12000)


# -- what comes of it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "file"),
    [
        (VllmBench(), "result.json"),
        (LongDocQa(), "bench_summary.json"),
        (MultiRoundChat(), "bench_summary.json"),
        (AiPerf(benchmark.SAMPLE), "profile_export_aiperf.json"),
        (CachePressure(), "result.json"),
    ],
)
def test_a_sample_of_its_output_is_read(tmp_path: Path, tool: Tool, file: str) -> None:
    found = tool.figures(sample(tool.name, file, tmp_path))
    assert set(found) & set(MEASURES)
    assert all(isinstance(value, int | float) for value in found.values())
    assert found["failed"] == 0
