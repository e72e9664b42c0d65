"""``serve``: the command line that it makes for vLLM. Tests of the examples run the server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_connector.cli.app import app
from lmcache_connector.cli.report import CliError
from lmcache_connector.cli.serve import Options, plan


def dry_run(*arguments: str) -> dict[str, Any]:
    answer = CliRunner().invoke(app, ["serve", *arguments, "--dry-run", "--json"])
    assert answer.exit_code == 0, answer.output
    document: dict[str, Any] = json.loads(answer.stdout)
    assert document["ok"] is True
    return document


def line(*arguments: str) -> list[str]:
    """vLLM's command line."""
    command: list[str] = dry_run(*arguments)["command"]
    return command


def transfer(command: list[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return document


def test_unknown_options_go_to_vllm() -> None:
    command = line("some/model", "--port", "1234", "--max-model-len=4096", "--cpu-gib", "2")
    assert command[command.index("--port") + 1] == "1234"
    assert "--max-model-len=4096" in command
    assert "--cpu-gib" not in command
    assert "-dph" in line("some/model", "-dph", "10.0.0.7")


@pytest.mark.parametrize(
    "choice", ["--no-enforce-eager", "--enforce-eager", "-O.level=3", "-cc.mode=3"]
)
def test_on_cpus_vllm_runs_eagerly_by_default(choice: str) -> None:
    assert line("some/model")[-1] == "--enforce-eager"
    chosen = line("some/model", choice)
    starts = ("--enforce", "--no-enforce", "-O", "-cc")
    assert [option for option in chosen if option.startswith(starts)] == [choice]


@pytest.fixture
def _twelve_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_connector.cli.serve.available_memory", lambda: 12 << 30)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.mark.usefixtures("_twelve_gib")
@pytest.mark.parametrize(("cpu_gib", "kv_gib"), [("4", 2), ("8", 1.5), ("100", 1.5)])
def test_on_cpus_vllm_gets_a_part_of_the_free_memory(cpu_gib: str, kv_gib: float) -> None:
    """By default vLLM takes 92 % of all memory, and fails where others use some."""
    document = dry_run("some/model", "--cpu-gib", cpu_gib)
    command = document["command"]
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(int(kv_gib * 2**30))
    (note,) = [note for note in document["notes"] if "--kv-cache-memory-bytes" in note]
    assert f"{kv_gib:.1f} GiB" in note
    assert "leaves, or an eighth of all that is available if that is more" in note


@pytest.mark.usefixtures("_twelve_gib")
@pytest.mark.parametrize(
    "choice", ["--kv_cache_memory_bytes=9", "--gpu-memory-utilization=0.5", "-tp=2"]
)
def test_no_memory_size_is_added_to_a_given_one_or_for_several_ranks(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--kv-cache-memory-bytes" not in line("some/model", choice)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "--kv-cache-memory-bytes" not in line("some/model")


def test_a_password_is_not_on_the_line(tmp_path: Path) -> None:
    """vLLM logs its command line, and any user can list processes."""
    command = line("some/model", "--redis-url", "redis://user:hunter2@cache:6379")
    assert not any("hunter2" in word for word in command)
    settings = transfer(command)["kv_connector_extra_config"]
    assert settings["redis_url"] == "env:LMCACHE_CONNECTOR_SERVE_REDIS_URL"
    secret = tmp_path / "redis"
    secret.write_text("redis://user:hunter2@cache:6379")
    named = transfer(line("some/model", "--redis-url", f"file:{secret}"))
    assert named["kv_connector_extra_config"]["redis_url"] == f"file:{secret}"


def test_no_secret_of_a_file_is_on_the_line_either(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    tiered = {"redis_url": "redis://u:hunter2@cache", "hash_key": "hunter2" * 3, "cpu_gib": 1}
    for connector, settings in (
        ("LMCacheTieredConnector", tiered),
        ("LMCacheP2PConnector", {"router_secret": "hunter2" * 3}),
    ):
        document = {"kv_connector": connector, "kv_role": "kv_both"}
        path.write_text(json.dumps({**document, "kv_connector_extra_config": settings}))
        server = plan(Options("some/model", None, None, str(path), ()))
        assert "hunter2" not in str(server.command) + str(server.notes)
        shown = transfer(list(server.command))["kv_connector_extra_config"]
        given = {
            key: server.secrets.get(str(v).removeprefix("env:"), v) for key, v in shown.items()
        }
        assert given == settings
        # Notes name them for users who copy the line.
        assert all(any(name in note for note in server.notes) for name in server.secrets)


def test_a_missing_vllm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache_connector.cli import serve

    monkeypatch.setattr(serve, "_installed_vllm", lambda: (["/no/such/vllm", "serve"], False))
    answer = CliRunner().invoke(app, ["serve", "some/model"])
    assert (answer.exit_code, type(answer.exception)) == (2, SystemExit)
    assert "/no/such/vllm cannot be started" in answer.stderr


TIERED = '{"kv_connector": "LMCacheTieredConnector", %s}'
TOGETHER = json.dumps(
    {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both"}]
        },
    }
)
ODD_CHUNKS = json.dumps(
    {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"chunk_size": 100},
    }
)


@pytest.fixture
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("vLLM was started"))


@pytest.mark.usefixtures("_no_vllm")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cpu-gib", "-1"], "cpu_gib"),
        (["--redis-url", "htp://cache"], "redis_url"),
        (["--kv-config", "{}", "--cpu-gib", "1"], "--kv-config"),
        (["--kv-config", "nowhere.json"], "cannot read"),
        (["--kv-config", '{"kv_connector": "OffloadingConnector"}'], "kv_connector must be"),
        (["--kv-config", '{"kv_connector": ["LMCacheTieredConnector"]}'], "kv_connector must be"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--kv_transfer_config={}"], "--kv-transfer-config"),
        (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config"),
        (["--model", "other/model"], "--model"),
        (["--kv-offloading-size", "1"], "--kv-offloading-size"),
        (["--kv_offloading_backend=lmcache"], "--kv-offloading-backend"),
        (["--kv-off", "1"], "--kv-off"),
        (["--cpu-gb", "2"], "did you mean --cpu-gib?"),
        (["--cpu_gib=2"], "did you mean --cpu-gib?"),
        (["--redis_url", "redis://h"], "did you mean --redis-url?"),
        (["--hash-key", "x"], "put it into --kv-config"),
        (["--config", "{}"], "use --kv-config"),
        (["--kv-config", TOGETHER], "serve starts this connector alone"),
        (["--kv-config", TIERED % '"kv_role": "both"'], "kv_role must be one of"),
        (["--kv-config", TIERED % '"kv_rank": 0'], "kv_role must be one of"),
        (["--kv-config", TIERED % '"cpu_gib": 3'], "belongs inside kv_connector_extra_config"),
        (["--kv-config", ODD_CHUNKS], "chunk_size 100 is not a multiple of the block size 16"),
    ],
)
def test_bad_settings_start_nothing(arguments: list[str], complaint: str) -> None:
    answer = CliRunner().invoke(app, ["serve", "some/model", *arguments, "--json"])
    assert answer.exit_code == 2
    document = json.loads(answer.stdout)
    assert document["ok"] is False
    assert complaint in document["error"] + document["hint"]
    assert "Traceback" not in answer.output


@pytest.mark.parametrize("arguments", [["--port", "8000", "m"], ["--model", "m"], [""]])
def test_an_option_is_no_model(arguments: list[str]) -> None:
    """It is not known here how many values each of vLLM's options takes."""
    answer = CliRunner().invoke(app, ["serve", *arguments, "--dry-run"])
    assert answer.exit_code == 2
    assert "the model must come first" in answer.stderr


def test_every_option_of_vllm_goes_to_vllm() -> None:
    """None is taken for a misspelt option of ours. Options that would replace the connector are
    refused."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    options = {option for action in actions for option in action.option_strings} - {"-h", "--help"}
    assert len(options) > 100
    refused = set()
    for option in options:
        try:
            plan(Options("m", None, None, None, (option,)))
        except CliError:
            refused.add(option)
    ours = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--model")
    assert refused == {*ours, "-kvt"} & options


@pytest.mark.usefixtures("_no_vllm")
@pytest.mark.parametrize(
    ("option", "place"),
    [
        *(("--port {}", ""), ("--port={}", "")),
        ("--host 127.0.0.1 --port {}", " of 127.0.0.1"),
    ],
)
def test_a_taken_port_is_refused_before_a_model_is_loaded(option: str, place: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["some/model", *option.format(port).split(), "--json"]
        answer = CliRunner().invoke(app, ["serve", *options])
    assert answer.exit_code == 2
    error = json.loads(answer.stdout)["error"]
    assert error == f"cannot listen on port {port}{place}: Address already in use"


@pytest.mark.usefixtures("_no_vllm")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        *(("--port 65536", "0-65535"), ("--host a..b", "a..b: ")),
        ("--host 192.0.2.1", "Cannot assign requested address"),
    ],
)
def test_a_place_where_nobody_can_listen_is_refused(option: str, words: str) -> None:
    answer = CliRunner().invoke(app, ["serve", "some/model", *option.split(), "--json"])
    assert answer.exit_code == 2
    assert words in json.loads(answer.stdout)["error"]
