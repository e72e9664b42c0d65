"""Keeps vLLM's engine running when the scheduler side raises: a failure costs hits only.

Guarded calls raise only interrupts: a failed one answers like a connector without KV, and the side
forgets all requests and jobs; the next plan tells the workers to cancel theirs. The guard keeps
what was promised to vLLM, out of reach of the failure: a request that waits for a load is computed
once no rank writes its blocks any more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_connector.errors import FailureLog
from lmcache_connector.plans import LoadJob, StepPlan
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.vllm_compat.short_loads import ShortLoad, compute_the_rest

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheManager, Request

logger = logging.getLogger(__name__)

CallT = TypeVar("CallT", bound=Callable[..., Any])


def returns_on_failure(answer: object = None) -> Callable[[CallT], CallT]:
    """Decorate a call of vLLM's: it returns ``answer`` if the scheduler side raises. Methods of an
    object whose ``_guard`` is ``None`` (a worker) are not guarded."""

    def decorate(call: CallT) -> CallT:
        @functools.wraps(call)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard: SchedulerGuard | None = self._guard
            if guard is None:
                return call(self, *args, **kwargs)
            if guard.is_down:
                return answer
            try:
                return call(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - logged by the guard
                guard.failed(call.__name__, error)
                return answer

        return guarded  # type: ignore[return-value]

    return decorate


class SchedulerGuard:
    """``has_updates``: something for the next plan. ``is_down``: starting over failed too; each
    plan tries again. ``unsent``: loads planned since the last plan, which vLLM counts on."""

    def __init__(self, side: Scheduler, failures: FailureLog) -> None:
        self.has_updates = False
        self.is_down = False
        self._side = side
        self._failures = failures
        self._must_reset = False
        self._starts_over = False  # not yet told to the workers
        # Requests that vLLM keeps waiting for a load; False: ignore what the load brings.
        self._promised: dict[str, tuple[Request, bool]] = {}
        self.unsent: list[LoadJob] = []
        self._due: list[LoadJob] = []  # in the next plan, whatever the scheduler side knows
        self._last_id = 0

    def failed(self, call: str, error: BaseException) -> None:
        self._failures.note(call, error)
        self._side.tally.count("scheduler_failures")
        self._must_reset |= call == "reset_cache"
        self._due += [j if j.in_step else self._empty_load(j.request_id) for j in self.unsent]
        self.unsent.clear()
        self._promised = {name: (one[0], False) for name, one in self._promised.items()}
        self.has_updates = self._starts_over = True
        self._start_over()

    def promised(self, request: Request, job: LoadJob | None) -> None:
        """vLLM keeps the request waiting for a load from now on, planned or not."""
        self._promised[request.request_id] = request, job is not None
        if job is not None:
            self.unsent.append(job)
        else:
            self._due.append(self._empty_load(request.request_id))
            self.has_updates = True

    def add_updates(self, plan: StepPlan | None, *, is_idle: bool) -> StepPlan:
        """Add to the plan what the workers must know of failures."""
        if self.is_down:
            self._start_over()
        plan = plan or StepPlan(idle=is_idle and not self._side.settings.others_wait)
        plan = replace(plan, starts_over=self._starts_over, loads=(*self._due, *plan.loads))
        self._due.clear()
        self.has_updates = self._starts_over = self.is_down
        return plan

    def ended(self, request_ids: Iterable[str], manager: KVCacheManager | None) -> None:
        """No rank writes the blocks of these loads any more. Call before vLLM learns of the end."""
        for request_id in request_ids:
            request, counts = self._promised.pop(request_id, (None, True))
            if request is None or manager is None or counts:
                continue
            if not request.is_finished():
                compute_the_rest(ShortLoad(request, 0), manager)
                self._side.exclude_from_loads(request)

    def _start_over(self) -> None:
        try:
            self._side.start_over()
            if self._must_reset:
                self._side.reset_cache()
            self.is_down = self._must_reset = False
        except Exception:  # the connector stays passive until starting over succeeds
            if not self.is_down:
                logger.exception("LMCacheTieredConnector could not start over")
            self.is_down = True

    def _empty_load(self, request_id: str) -> LoadJob:
        """A load that ends at once without chunks."""
        self._last_id -= 1
        return LoadJob(self._last_id, request_id, (), 0.0, may_fetch=False, after_job=0)
