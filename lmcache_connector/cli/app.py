"""The commands and their options. Each command is implemented in the module that it imports."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lmcache_connector import __version__
from lmcache_connector.cli.report import CliError, Report

_ENGINE = "localhost:8000"

app = typer.Typer(
    name="lmcache-connector",
    help="Inspect and manage the KV cache of lmcache-connector.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        metavar="URL",
        help="Address of Redis, as in the connector's settings: a URL, env:NAME or file:PATH.",
        envvar="LMCACHE_CONNECTOR_REDIS_URL",
        show_envvar=True,
    ),
]
KvConfig = Annotated[
    str | None,
    typer.Option(
        "--kv-config",
        metavar="JSON|FILE",
        help="The engine's --kv-transfer-config, for its redis_url and hash_key.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Only this namespace (default: all)."),
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
        typer.Argument(
            metavar="CONFIG",
            help="The value of --kv-transfer-config: JSON, a file with it, or - for stdin.",
        ),
    ],
    json_: Json = False,
) -> None:
    """Try a configuration, and every tier it names."""
    from lmcache_connector.cli import check as command

    _run(json_, lambda report: command.run(report, config))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],  # -h would take a letter out of vLLM's -dph
    },
    options_metavar="[OPTIONS] [VLLM OPTIONS]",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or folder of a model.")],
    cpu_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="CPU tier of the engine.", show_default="8")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Share through this Redis: a URL, env:NAME or file:PATH."),
    ] = None,
    kv_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="The whole --kv-transfer-config, in place of both."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print vLLM's command.")] = False,
    json_: Json = False,
) -> None:
    """Start vLLM's API server with the connector. Other options go to vllm serve."""
    from lmcache_connector.cli import serve as command

    options = command.Options(model, cpu_gib, redis_url, kv_config, tuple(context.args))
    _run(json_, lambda report: command.run(report, options, dry_run=dry_run))


@app.command()
def stats(
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST:PORT", help="Running engines.", show_default=_ENGINE),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show current rates, again and again.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time between two samples.", min=0.1, max=86400)
    ] = 2.0,
    count: Annotated[
        int, typer.Option(metavar="N", help="Stop after this many samples; 0: never.", min=0)
    ] = 0,
    json_: Json = False,
) -> None:
    """Show what running engines have done. With --watch: what they do now.

    Without --watch, the exit code is 1 if an audit found wrong KV.
    """
    from lmcache_connector.cli import stats as command

    urls = engines or [_ENGINE]
    if watch:
        _run(json_, lambda report: command.watch(report, urls, interval, count))
    else:
        _run(json_, lambda report: command.run(report, urls))


@app.command()
def ls(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="First digits of a chunk key: show that chunk's values."
        ),
    ] = None,
    redis_url: RedisUrl = None,
    kv_config: KvConfig = None,
    namespace: Namespace = None,
    json_: Json = False,
) -> None:
    """List what is in Redis. By namespace and model; with a key, a chunk's values."""
    from lmcache_connector.cli import values
    from lmcache_connector.cli.target import redis_config

    def run(report: Report) -> None:
        tier = redis_config(redis_url, kv_config)
        if key is None:
            values.ls(report, tier, namespace)
        else:
            values.ls_chunk(report, tier, namespace, key)

    _run(json_, run)


@app.command()
def verify(
    redis_url: RedisUrl = None,
    kv_config: KvConfig = None,
    namespace: Namespace = None,
    limit: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of values to read; 0: all.", min=0)
    ] = 0,
    json_: Json = False,
) -> None:
    """Check every byte in Redis. The exit code is 1 if any value is unsound."""
    from lmcache_connector.cli import values
    from lmcache_connector.cli.target import redis_config

    def run(report: Report) -> int:
        return values.verify(report, redis_config(redis_url, kv_config), namespace, limit)

    _run(json_, run)


@app.command()
def purge(
    redis_url: RedisUrl = None,
    kv_config: KvConfig = None,
    namespace: Namespace = None,
    everything: Annotated[bool, typer.Option("--all", help="All namespaces.")] = False,
    idle: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only values unused for this long: 90s, 15m, 12h, 7d."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the values.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask to confirm.")] = False,
    json_: Json = False,
) -> None:
    """Remove values from Redis. In small batches, freed in the background."""
    from lmcache_connector.cli import values
    from lmcache_connector.cli.target import redis_config

    options = values.PurgeOptions(namespace, everything, idle, dry_run, yes)
    _run(json_, lambda report: values.purge(report, redis_config(redis_url, kv_config), options))


def _run(as_json: bool, command: Callable[[Report], int | None]) -> None:
    # The commands report what the tiers would log.
    logging.getLogger("lmcache_connector").addHandler(logging.NullHandler())
    logging.getLogger("lmcache_connector").propagate = False
    report = Report.to_terminal(as_json)
    try:
        code = command(report) or 0
    except CliError as error:
        code = report.fail(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0  # e.g. `| head`
    raise typer.Exit(code)


def main(**options: Any) -> None:
    sys.exit(app(**options))
