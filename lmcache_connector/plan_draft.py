"""What the next step's plan will say, as it comes up."""

from __future__ import annotations

from lmcache_connector.plans import Hold, LoadJob, PrefillWork, StepPlan, StoreJob

# The plan of nearly every decode step.
_NOTHING_NEW = StepPlan()


class PlanDraft:
    """Collects on the scheduler's thread until the step's plan is taken."""

    def __init__(self) -> None:
        self.loads: list[LoadJob] = []
        self.stores: list[StoreJob] = []
        self.holds: list[Hold] = []
        self.cancelled_loads: list[int] = []

    def take(
        self,
        *,
        vacated_stores: tuple[int, ...],
        idle: bool,
        prefill: PrefillWork | None,
        probe: bool,
    ) -> StepPlan:
        """The plan of a step of which the rest is known now. The draft is empty then."""
        jobs = self.loads or self.stores or self.holds or self.cancelled_loads
        if not (idle or jobs or vacated_stores or prefill or probe):
            return _NOTHING_NEW
        plan = StepPlan(
            loads=tuple(self.loads),
            stores=tuple(self.stores),
            holds=tuple(self.holds),
            cancelled_loads=tuple(self.cancelled_loads),
            vacated_stores=vacated_stores,
            idle=idle,
            prefill=prefill,
            probe=probe,
        )
        self.loads, self.stores, self.holds, self.cancelled_loads = [], [], [], []
        return plan
