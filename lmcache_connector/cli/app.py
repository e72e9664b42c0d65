"""The commands and their options. What a command does lies in the module it imports."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lmcache_connector import __version__
from lmcache_connector.cli.report import CliError, Report

app = typer.Typer(
    name="lmcache-connector",
    help="Check, watch and tend the KV cache of lmcache-connector.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One line of JSON instead of tables.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        help="As in the connector's configuration: a URL, env:NAME or file:PATH.",
        envvar="LMCACHE_CONNECTOR_REDIS_URL",
        show_envvar=True,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="Take URL, namespace and hash_key from this JSON or file."),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Only this namespace; all without it.")
]
Urls = Annotated[
    list[str], typer.Argument(metavar="URL...", help="Engines, such as localhost:8000.")
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def check(
    config: Annotated[
        str,
        typer.Argument(help="The JSON of --kv-transfer-config, a file with it, or - for stdin."),
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option(help="A running engine, for example localhost:8000: what its audits found."),
    ] = None,
    json_: Json = False,
) -> None:
    """Try a configuration as the engine would, and every tier it names."""
    from lmcache_connector.cli.check import command

    _run(json_, lambda report: command.run(report, config, engine or ()))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [VLLM OPTIONS]",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name or folder of a model.")],
    cpu_gib: Annotated[
        float | None, typer.Option(help="CPU tier of each rank, GiB.", show_default="8")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Share through it: a URL, env:NAME or file:PATH.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Instead: the JSON of --kv-transfer-config, or a file with it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say vLLM's line.")] = False,
    json_: Json = False,
) -> None:
    """Start vLLM's API server with the connector. Other options go to vllm serve."""
    from lmcache_connector.cli.engine import serve as command

    options = command.Options(model, cpu_gib, redis_url, config, tuple(context.args))
    _run(json_, lambda report: command.run(report, options, dry_run=dry_run))


@app.command()
def stats(urls: Urls, json_: Json = False) -> None:
    """What engines have done since their start, from their /metrics."""
    from lmcache_connector.cli.engine import stats as command

    _run(json_, lambda report: command.run(report, urls))


@app.command()
def top(
    urls: Urls,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 2.0,
    count: Annotated[int, typer.Option(help="Looks; 0 goes on until Ctrl-C.", min=0)] = 0,
    json_: Json = False,
) -> None:
    """Watch engines: hit rates, bandwidths, queues, as they are now."""
    from lmcache_connector.cli.engine import top as command

    _run(json_, lambda report: command.run(report, urls, interval, count))


@app.command()
def warm(
    file: Annotated[
        str, typer.Argument(help="Prompts: a text per line, or JSON in *.jsonl; - for stdin.")
    ],
    url: Annotated[str, typer.Option(help="A running engine, such as localhost:8000.")],
    jsonl: Annotated[bool, typer.Option("--jsonl", help="JSON, whatever its name.")] = False,
    concurrency: Annotated[
        int, typer.Option(help="Prompts that are asked at once.", min=1, max=256)
    ] = 4,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one prompt may take.", min=1.0)
    ] = 600.0,
    model: Annotated[
        str | None, typer.Option(help="As the engine calls it; its first one without.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of the engine's API: the key, env:NAME or file:PATH.")
    ] = None,
    json_: Json = False,
) -> None:
    """Bring prompts, or what they begin with, from a file into a running engine's cache."""
    from lmcache_connector.cli.engine import warm as command

    _run(
        json_,
        lambda report: command.run(
            report,
            command.Options(
                file,
                url,
                jsonl or file.endswith(".jsonl"),
                concurrency,
                timeout,
                model,
                command.read_key(api_key),
            ),
        ),
    )


@app.command()
def ls(
    redis_url: RedisUrl = None,
    config: ConfigOption = None,
    namespace: Namespace = None,
    json_: Json = False,
) -> None:
    """Namespaces and models in Redis: chunks, bytes, ages."""
    from lmcache_connector.cli.redis import ls as command
    from lmcache_connector.cli.target import Target

    _run(json_, lambda report: command.run(report, Target(redis_url, config), namespace))


@app.command()
def inspect(
    chunk: Annotated[str, typer.Argument(help="First hex digits of a chunk key.")],
    redis_url: RedisUrl = None,
    config: ConfigOption = None,
    namespace: Namespace = None,
    json_: Json = False,
) -> None:
    """One chunk in Redis: its values and what their headers say."""
    from lmcache_connector.cli.redis import inspect as command
    from lmcache_connector.cli.target import Target

    _run(json_, lambda report: command.run(report, Target(redis_url, config), namespace, chunk))


@app.command()
def verify(
    redis_url: RedisUrl = None,
    config: ConfigOption = None,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(help="Most values to read; 0: all.", min=0)] = 0,
    json_: Json = False,
) -> None:
    """Read values and check header and checksum of each. Exit code 1 if any is unsound."""
    from lmcache_connector.cli.redis import verify as command
    from lmcache_connector.cli.target import Target

    _run(json_, lambda report: command.run(report, Target(redis_url, config), namespace, limit))


@app.command()
def purge(
    redis_url: RedisUrl = None,
    config: ConfigOption = None,
    namespace: Namespace = None,
    everything: Annotated[bool, typer.Option("--all", help="All namespaces.")] = False,
    idle: Annotated[
        str | None, typer.Option(help="Only values unused for so long: 90s, 15m, 12h, 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: Json = False,
) -> None:
    """Remove values from Redis, in small batches, freed in the background."""
    from lmcache_connector.cli.redis import purge as command
    from lmcache_connector.cli.target import Target

    options = command.Options(namespace, everything, idle, dry_run, yes)
    _run(json_, lambda report: command.run(report, Target(redis_url, config), options))


@app.command()
def bench(
    redis_url: RedisUrl = None,
    config: ConfigOption = None,
    model: Annotated[
        str | None, typer.Option(help="Folder of a model, for the size of its KV cache.")
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="KV bytes per token, instead of --model.", min=1)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Take the prefill speed from this engine's metrics.")
    ] = None,
    prefill: Annotated[
        float | None, typer.Option(help="Prefill speed in tokens per second.", min=0.001)
    ] = None,
    mib: Annotated[int, typer.Option(help="MiB to move each way.", min=1, max=4096)] = 64,
    json_: Json = False,
) -> None:
    """Measure this host and Redis: from which prefix length on does loading beat recompute?"""
    from lmcache_connector.cli.engine import bench as command
    from lmcache_connector.cli.target import Target

    options = command.Options(model, token_bytes, engine, prefill, mib)
    _run(json_, lambda report: command.run(report, Target(redis_url, config), options))


def _run(as_json: bool, command: Callable[[Report], int | None]) -> None:
    # Commands say themselves what the tiers would log.
    logging.getLogger("lmcache_connector").addHandler(logging.NullHandler())
    logging.getLogger("lmcache_connector").propagate = False
    report = Report.to_terminal(as_json)
    try:
        code = command(report) or 0
    except CliError as error:
        if as_json:
            report.emit(error.as_json())
        else:
            report.complain(error)
        code = error.code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0  # `| head` has seen enough
    raise typer.Exit(code)


def main(**options: Any) -> None:
    """The console script."""
    sys.exit(app(**options))
