"""A vLLM instance in a process of its own, driven from this one.

What the instance prints goes to a log file. Its answers are plain data over a pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar

from lmcache_connector.metrics.samples import Samples
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import set_limits

_START_SECONDS = 600.0
_ANSWER_SECONDS = 1500.0  # a storm on a busy machine; other tests have a limit of their own
_STOP_SECONDS = 60.0
_LOG_TAIL_BYTES = 4000
_NO_LIMITS: Mapping[str, float] = MappingProxyType({})


def forks_from(module: str) -> ForkServerContext:
    """Processes that fork from one that has imported ``module``, and inherit its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def set_environment(variables: dict[str, str]) -> None:
    """For ``prepare``, by :func:`functools.partial`."""
    os.environ.update(variables)


@dataclass(frozen=True, slots=True)
class _News:
    """Something of an answer before its end."""

    item: Any


class InstanceError(RuntimeError):
    """The instance ended or did not answer. The message holds the end of its log."""


class VllmInstance:
    """Runs an :class:`EngineProbe` in a new process; use it in a ``with``.

    ``engine_args`` go to :class:`EngineProbe`. ``prepare()``, a top-level function, runs in the new
    process before the engine starts. ``limits``: see :func:`set_limits`. Entering waits until the
    engine serves, and raises :class:`InstanceError` if it does not.

    ``context`` starts the processes. A test session, which starts dozens, lets them fork from one
    that has imported vLLM (:func:`forks_from`): importing is most of a start.
    """

    context: ClassVar[SpawnContext | ForkServerContext] = multiprocessing.get_context("spawn")

    def __init__(
        self,
        model: Path,
        kv_transfer: dict[str, Any] | None,
        log: Path,
        prepare: Callable[[], None] | None = None,
        limits: Mapping[str, float] = _NO_LIMITS,
        **engine_args: Any,
    ) -> None:
        self._log = log
        self._pipe, theirs = self.context.Pipe()
        how = (prepare, dict(limits), engine_args)
        self._process = self.context.Process(
            target=_run, args=(theirs, str(model), kv_transfer, str(log), *how)
        )

    def __enter__(self) -> VllmInstance:
        self._process.start()
        try:
            self._receive(_START_SECONDS)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive() and kind is None:
            with contextlib.suppress(OSError):  # it may have been killed
                self._pipe.send(None)
        self._process.join(_STOP_SECONDS if kind is None else 0)
        self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        """Id of the process that runs the engine."""
        assert self._process.pid is not None, "it has not been started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of its process; ``None`` while it runs, negative if it was killed."""
        return self._process.exitcode

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return self._log.read_text(errors="replace")

    def serve(self, prompt: Sequence[int], max_tokens: int = 2, **sampling: Any) -> Served:
        served: Served = self.call(EngineProbe.serve, list(prompt), max_tokens, **sampling)
        return served

    def reset_prefix_cache(self) -> None:
        self.call(EngineProbe.reset_prefix_cache)

    def counts(self) -> Samples:
        """What the connector has counted since the start, on all its sides."""
        counts: Samples = self.call(EngineProbe.counts)
        return counts

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(probe, *args, **kwargs)``, a top-level function, in the instance's process.

        Raises :class:`InstanceError` with what the function raised, or when no answer comes.
        """
        self._pipe.send((function, args, kwargs))
        return self._receive(_ANSWER_SECONDS)

    def listen(
        self, on_item: Callable[[Any], None], function: Callable[..., Any], *args: Any
    ) -> Any:
        """As :meth:`call`, for a function whose last argument is a callable that takes items."""
        self._pipe.send((_telling, (function, *args), {}))
        while isinstance(answer := self._receive(_ANSWER_SECONDS), _News):
            on_item(answer.item)
        return answer

    def _receive(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                answer = self._pipe.recv()
                if isinstance(answer, Exception):
                    raise InstanceError(f"{answer}\n{self._log_tail()}")
                return answer
        except EOFError:
            pass
        raise InstanceError(f"the vLLM instance does not answer; its log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


StartInstance = Callable[..., VllmInstance]
"""Makes an instance, to be used in a ``with``: ``(transfer, folder, **engine_args)``."""


def _run(
    pipe: Connection,
    model: str,
    kv_transfer: dict[str, Any] | None,
    log: str,
    prepare: Callable[[], None] | None,
    limits: dict[str, float],
    engine_args: dict[str, Any],
) -> None:
    """The other process: one answer per command until it is told to stop."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        set_limits(limits)
        if prepare is not None:
            prepare()
        probe = EngineProbe(model, kv_transfer, **engine_args)
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            function, args, kwargs = command
            if function is _telling:
                function, *args = args
                args.append(lambda item: pipe.send(_News(item)))
            pipe.send(function(probe, *args, **kwargs))
        probe.shutdown()
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def _telling() -> None:
    """Marks a command whose function sends items while it works."""
