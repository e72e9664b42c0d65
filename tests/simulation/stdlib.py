"""The parts of the standard library that wait, or differ from run to run, over a :class:`Kernel`.

The product's modules are loaded with these in the place of Python's (see `loading`), so that its
own code runs unchanged: its threads are tasks, its clock is the kernel's, and its sockets end at
simulated servers.
"""

from __future__ import annotations

import os as real_os
import queue as real_queue
import random as real_random
import threading as real_threading
import time as real_time
import uuid as real_uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from tests.simulation.kernel import Kernel, Process, Task, Waiter


class Runtime:
    """What belongs to the world that runs now: the product's modules are loaded only once."""

    kernel: Kernel
    network: Any  # a Network; see `network`

    @property
    def task(self) -> Task:
        assert self.kernel.current is not None, "outside of any task"
        return self.kernel.current

    @property
    def process(self) -> Process:
        return self.task.process


RUNTIME = Runtime()


class Stand(ModuleType):
    """Stands for a module of the standard library; other names come from that module."""

    def __init__(self, real: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(self._real, name)
        return value


# -- threading -----------------------------------------------------------------------------------


class Lock:
    def __init__(self) -> None:
        self._owner: Task | None = None
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = RUNTIME.kernel
        current = kernel.current
        if current is None or kernel.closing:
            return True
        if kernel.preempt_chance:
            kernel.maybe_preempt()
        seconds = (timeout if timeout >= 0 else None) if blocking else 0.0
        if self._owner is not None and not kernel.wait_for(
            lambda: self._owner is None, self._waiters, seconds
        ):
            return False
        self._owner = current
        return True

    def release(self) -> None:
        kernel = RUNTIME.kernel
        if kernel.current is None or kernel.closing:
            return
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiters:
            self._wake_one(kernel)

    def _wake_one(self, kernel: Kernel) -> None:
        while self._waiters:
            task, ticket = waiter = self._waiters.popleft()
            if task.ticket == ticket:  # else it has given up
                kernel.wake(waiter)
                return

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_own = self._owner is not None and self._owner is RUNTIME.kernel.current
        if not is_own and not super().acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            super().release()


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self._waiters: deque[Waiter] = deque()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel = RUNTIME.kernel
        entry = kernel.waiter()
        self._waiters.append(entry)
        self._lock.release()
        try:
            woken = kernel.park(timeout)
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)
            self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        kernel = RUNTIME.kernel
        end = None if timeout is None else kernel.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - kernel.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            RUNTIME.kernel.wake(self._waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            RUNTIME.kernel.wake(waiter)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return RUNTIME.kernel.wait_for(self.is_set, self._waiters, timeout)


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        seconds = timeout if blocking else 0.0
        is_free = RUNTIME.kernel.wait_for(lambda: self._value > 0, self._waiters, seconds)
        self._value -= is_free
        return is_free

    def release(self, n: int = 1) -> None:
        self._value += n
        for _ in range(min(n, len(self._waiters))):
            RUNTIME.kernel.wake(self._waiters.popleft())


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or f"thread-{RUNTIME.kernel.new_id()}"
        self.daemon = bool(daemon)
        self._task: Task | None = None

    def start(self) -> None:
        kernel = RUNTIME.kernel
        self._task = kernel.spawn(RUNTIME.process, self.run, self.name)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None, "cannot join a thread before it is started"
        RUNTIME.kernel.wait_for(lambda: not self.is_alive(), self._task.joiners, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done


def _ident() -> int:
    task = RUNTIME.kernel.current
    return task.ident if task is not None else 0


threading = Stand(
    real_threading,
    {
        "Lock": Lock,
        "RLock": RLock,
        "Condition": Condition,
        "Event": Event,
        "Semaphore": Semaphore,
        "Thread": Thread,
        "get_ident": _ident,
        "get_native_id": _ident,
    },
)

# -- time, queue, os, random, uuid -----------------------------------------------------------------


def _monotonic() -> float:
    return RUNTIME.kernel.clock()


def _sleep(seconds: float) -> None:
    RUNTIME.kernel.sleep(seconds)


time = Stand(
    real_time,
    {
        "monotonic": _monotonic,
        "perf_counter": _monotonic,
        "time": lambda: 1.8e9 + RUNTIME.kernel.now,
        "time_ns": lambda: int((1.8e9 + RUNTIME.kernel.now) * 1e9),
        "sleep": _sleep,
    },
)


class Queue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition()

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self, *, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout):
                raise real_queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


queue = Stand(real_queue, {"SimpleQueue": Queue})


def _ignore(*_: object) -> None:
    """Priorities of simulated threads mean nothing."""


os = Stand(
    real_os,
    {
        "urandom": lambda size: RUNTIME.kernel.chance.randbytes(size),
        "cpu_count": lambda: RUNTIME.process.num_cores,
        "getpriority": lambda *_: 0,
        "setpriority": _ignore,
    },
)
random = Stand(
    real_random,
    {
        "Random": lambda *seed: real_random.Random(*seed or (RUNTIME.kernel.seed,)),
        "random": lambda: RUNTIME.kernel.chance.random(),
        "uniform": lambda a, b: RUNTIME.kernel.chance.uniform(a, b),
    },
)
uuid = Stand(
    real_uuid,
    {"uuid4": lambda: real_uuid.UUID(int=RUNTIME.kernel.chance.getrandbits(128), version=4)},
)
