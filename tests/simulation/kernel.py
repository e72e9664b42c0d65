"""One seeded clock, and the tasks that live by it.

Every simulated thread is a *task*: a greenlet that runs until it waits. The kernel then runs the
task whose wait ends next, and moves the clock there. One operating-system thread runs everything,
so a seed decides the whole course of events: how long a wake-up takes, who gets a lock first, and
where a task is interrupted although it need not wait.

A *process* groups the tasks of one simulated machine. Killed, it stops in the middle of whatever it
does, as a machine does that loses power.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

_MAX_READINGS = 200_000
"""So many readings of the clock without a wait mean that a task spins: the world would stop."""


class SimulationFailure(BaseException):
    """A promise was broken. The seed that led here leads here again.

    Not an ``Exception``: the product survives exceptions of its jobs, and must not survive this.
    """


class TaskKilled(BaseException):
    """Thrown into tasks that are left when the world ends."""


@dataclass(eq=False)
class Process:
    """A machine, or one process on it. Its clock counts from a moment of its own."""

    name: str
    clock_offset: float = 0.0
    num_cores: int = 4
    alive: bool = True
    frozen_until: float = 0.0
    frozen_seconds: float = 0.0  # so far, in all
    tasks: list[Task] = field(default_factory=list)
    on_kill: list[Callable[[], None]] = field(default_factory=list)


class Task:
    """A simulated thread. ``ticket`` grows whenever it goes on: a wake-up with an old one is
    void."""

    def __init__(self, kernel: Kernel, process: Process, run: Callable[[], None], name: str):
        self.process = process
        self.name = name
        self.ticket = 0
        self.is_done = False
        self.joiners: list[Waiter] = []
        self.ident = kernel.new_id()
        self.greenlet = greenlet(self._main, kernel.hub)
        self._kernel = kernel
        self._run = run

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"

    def _main(self, _: object) -> None:
        try:
            self._run()
        except TaskKilled:
            pass
        except SimulationFailure as failure:
            self._kernel.fail(str(failure))
        except BaseException:  # noqa: BLE001 - whatever ends a thread is a broken promise
            self._kernel.fail(f"{self} died:\n{traceback.format_exc()}")
        finally:
            self.is_done = True
            for joiner in self.joiners:
                self._kernel.wake(joiner)


Waiter = tuple[Task, int]
"""A task, and its ticket when it began to wait."""
Waiters = list[Waiter] | deque[Waiter]


class Kernel:
    """The clock and the tasks of one world. ``seed`` decides everything."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.seed = seed
        self.chance = random.Random(seed)
        self.hub = getcurrent()
        self.current: Task | None = None
        self.failures: list[str] = []
        self.processes: list[Process] = []
        self.closing = False
        self.preempt_chance = self.chance.choice([0.0, 0.01, 0.05])
        self.stall_chance = self.chance.choice([0.0, 0.02])
        self.num_switches = 0
        self._trace = trace
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last_id = 0
        self._readings = 0

    # -- what happens, and when ----------------------------------------------------------------

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def new_process(self, name: str) -> Process:
        process = Process(name, clock_offset=self.chance.uniform(0, 1e6))
        self.processes.append(process)
        return process

    def trace(self, message: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:10.6f} {self.current or 'world'}: {message}")

    @property
    def is_traced(self) -> bool:
        return self._trace is not None

    def fail(self, message: str) -> None:
        self.trace(f"FAILURE {message}")
        self.failures.append(f"at {self.now:.6f} s: {message}")

    def at(self, when: float, callback: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (when, self.chance.random(), self._sequence, callback))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.at(self.now + seconds, callback)

    def spawn(self, process: Process, run: Callable[[], None], name: str) -> Task:
        task = Task(self, process, run, name)
        process.tasks.append(task)
        if process.alive and not self.closing:
            self.wake((task, 0))
        return task

    def kill(self, process: Process) -> None:
        """Its tasks never go on, not even to clean up."""
        process.alive = False
        for callback in process.on_kill:
            callback()
        process.on_kill.clear()

    def freeze(self, process: Process, seconds: float) -> None:
        """It stands still, as one that was sent SIGSTOP, and goes on as if nothing had been."""
        process.frozen_until = max(process.frozen_until, self.now + seconds)
        process.frozen_seconds += seconds

    def describe_tasks(self) -> str:
        """Tasks that have not ended, of processes that live."""
        return ", ".join(
            str(t) for p in self.processes if p.alive for t in p.tasks if not t.is_done
        )

    # -- for tasks -----------------------------------------------------------------------------

    def clock(self) -> float:
        """A reading of the clock of the current task's process, in seconds."""
        self._readings += 1
        if self._readings > _MAX_READINGS:
            self._readings = 0
            raise SimulationFailure(f"{self.current} spins: it looks at the clock and never waits")
        task = self.current
        return self.now + task.process.clock_offset if task is not None else self.now

    def park(self, seconds: float | None = None) -> bool:
        """Wait to be woken, for at most ``seconds``. Returns whether it was woken."""
        if self.closing:
            raise TaskKilled
        task = self.current
        if task is None:
            raise SimulationFailure("only a task can wait")
        if seconds is not None:
            self.after(max(0.0, seconds), partial(self._go_on, task, task.ticket, False))
        woken: bool = self.hub.switch()
        if self.closing:
            raise TaskKilled
        return woken

    def waiter(self) -> Waiter:
        """The current task, which is about to park."""
        assert self.current is not None, "only a task can wait"
        return self.current, self.current.ticket

    def wait_for(
        self, holds: Callable[[], Any], waiters: Waiters, seconds: float | None = None
    ) -> bool:
        """The current task waits among ``waiters`` until ``holds()``, for ``seconds`` at most."""
        end = None if seconds is None else self.now + seconds
        while not (held := holds()) and (end is None or self.now < end):
            waiters.append(self.waiter())
            self.park(None if end is None else end - self.now)
        return bool(held)

    def wake(self, waiter: Waiter) -> None:
        """Unless its wait has ended meanwhile."""
        self.after(self._delay(), partial(self._go_on, *waiter, True))

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.park(until - self.now)

    def maybe_preempt(self) -> None:
        """Another thread may run here."""
        if self.current is None or self.closing or not self.preempt_chance:
            return
        if self.chance.random() < self.preempt_chance:
            self.sleep(self._delay())

    def maybe_stall(self) -> None:
        """The machine may leave the current thread aside for a while, where it stands."""
        if self.stall_chance and self.chance.random() < self.stall_chance:
            self.sleep(0.02 * self.chance.random())

    # -- for whoever runs the world --------------------------------------------------------------

    def run(self, until: Callable[[], bool], max_seconds: float) -> bool:
        """Let things happen until ``until()``, or a failure. False after ``max_seconds``."""
        end = self.now + max_seconds
        while not self.failures and not until():
            if not self._events or self._events[0][0] > end:
                return False
            self.now, _, _, callback = heapq.heappop(self._events)
            callback()
        return True

    def close(self) -> None:
        """End all tasks where they stand."""
        self.closing = True
        for process in self.processes:
            for task in process.tasks:
                if task.greenlet:  # it has begun: otherwise the exception would end the caller
                    self.current = task
                    task.greenlet.throw(TaskKilled)
        self.current = None
        self._events.clear()

    def _go_on(self, task: Task, ticket: int, woken: bool) -> None:
        if task.ticket != ticket or task.is_done or not task.process.alive:
            return
        if self.now < task.process.frozen_until:
            self.at(task.process.frozen_until, partial(self._go_on, task, ticket, woken))
            return
        self._readings = 0
        self.num_switches += 1
        task.ticket += 1
        self.current = task
        task.greenlet.switch(woken)
        self.current = None

    def _delay(self) -> float:
        """Seconds from a wake-up to the first instruction: mostly microseconds."""
        draw = self.chance.random()
        return 1e-5 * draw if draw < 0.97 else 1e-3 * self.chance.random()
