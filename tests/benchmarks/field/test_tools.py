"""What each tool is asked, as the installed versions understand it, and how its output is read.

The samples are what the tools wrote, of the versions that ``make field`` pins.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.field import aiperf, benchmark, models
from benchmarks.field.aiperf import AiPerf, conversations
from benchmarks.field.cache_pressure import CachePressure
from benchmarks.field.lmcache_bench import LongDocQa, MultiRoundChat
from benchmarks.field.table import MEASURES
from benchmarks.field.tool import Target, Tool
from benchmarks.field.vllm_bench import VllmBench
from benchmarks.harness.block_traces import BlockTrace
from tests.support import ROOT

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


def test_cache_pressure_is_told_the_size_of_the_paged_cache(tmp_path: Path) -> None:
    command = CachePressure().command(target(tmp_path))
    assert command[command.index("--kv-size") + 1] == str(LOAD.paged_tokens)
    assert command[command.index("--base-url") + 1] == "http://127.0.0.1:8000/v1"


def test_aiperf_gets_a_trace_that_fits(tmp_path: Path) -> None:
    command = AiPerf(benchmark.SAMPLE).command(target(tmp_path))
    lines = (tmp_path / "out" / "trace.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    block_tokens = int(command[command.index("--isl-block-size") + 1])
    assert block_tokens == 512 // LOAD.trace_scale
    assert command[command.index("--request-count") + 1] == str(len(requests)) == "40"
    assert all(one["input_length"] == len(one["hash_ids"]) * block_tokens for one in requests)
    assert max(one["input_length"] for one in requests) < LOAD.max_model_len
    asked = [block for one in requests for block in one["hash_ids"]]
    assert len(set(asked)) < len(asked) / 2, "most of it repeats"
    assert len(set(asked)) * block_tokens > LOAD.paged_tokens, "and does not fit"


def trace(*prompts: list[int]) -> BlockTrace:
    return BlockTrace("a-trace", 512, [(float(at), one) for at, one in enumerate(prompts)], 100)


def test_conversations_of_several_turns_are_taken_in_the_order_of_the_trace() -> None:
    a, b, c = [0, 1, 2, 3], [0, 1, 9, 4], [0, 1, 8, 5]
    found = conversations(trace(a, b, c, [*b, 6], [*a, 7]), 10, max_blocks=5)
    assert found == [a, b, [*b, 6], [*a, 7]], "the one of a single turn is left out"


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


def test_the_tools_that_make_field_installs_are_pinned() -> None:
    for name in (aiperf.NAME, CachePressure.name):
        lines = (ROOT / f"requirements-field-{name}.txt").read_text().splitlines()
        assert [line.split("==")[0] for line in lines if "==" in line] == [name]
