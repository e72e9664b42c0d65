"""The installed tools accept the command lines that benchmarks give them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.field import models
from benchmarks.field.lmcache_bench import LongDocQa, MultiRoundChat
from benchmarks.field.tool import Target, Tool
from benchmarks.field.vllm_bench import VllmBench

LOAD = models.LOADS["trained"]


def target(folder: Path) -> Target:
    return Target("127.0.0.1:8000", "tiny", folder / "model", LOAD, folder / "out")


def test_vllm_accepts_its_command(tmp_path: Path) -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(VllmBench(shares_prefixes=False).command(target(tmp_path))[3:])
    assert (args.dataset_name, args.random_input_len) == ("random", LOAD.context_tokens)
    args = parser.parse_args(VllmBench().command(target(tmp_path))[3:])
    assert args.dataset_name == "prefix_repetition"
    prompt = args.prefix_repetition_prefix_len + args.prefix_repetition_suffix_len
    assert prompt == LOAD.context_tokens
    assert args.num_prompts == 3 * args.prefix_repetition_num_prefixes


@pytest.mark.parametrize(
    ("tool", "lengths"),
    [
        (LongDocQa(), ["ldqa_document_length"]),
        (MultiRoundChat(), ["mrc_shared_prompt_length", "mrc_chat_history_length"]),
    ],
)
def test_lmcache_accepts_its_command(tmp_path: Path, tool: Tool, lengths: list[str]) -> None:
    from lmcache.cli.commands.bench.engine_bench.command import add_engine_arguments

    command = tool.command(target(tmp_path))
    assert command[1:3] == ["bench", "engine"]
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    args = parser.parse_args(command[3:])
    assert args.kv_cache_volume * args.tokens_per_gb_kvcache / LOAD.context_tokens == 10
    assert sum(getattr(args, length) for length in lengths) == LOAD.context_tokens
