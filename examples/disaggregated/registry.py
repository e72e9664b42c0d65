"""Prefill and decode instances that have registered and still send heartbeats."""

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmcache_connector.peers.heartbeat import sign

_PLACE = re.compile(r"[A-Za-z0-9.\-\[\]:]{1,260}:[0-9]{1,5}\Z")
_MAX_INSTANCES = 1024
_MAX_AGE_SECONDS = 30.0


class RegistrationError(ValueError):
    """No registration, or a forged one."""


class Role(Enum):
    PREFILL = "kv_producer"
    DECODE = "kv_consumer"
    BOTH = "kv_both"

    def plays(self, part: Role) -> bool:
        return self in (part, Role.BOTH)


@dataclass
class Instance:
    """``http``: its API; ``kv``: its control plane, both HOST:PORT. ``data_parallel_rank``: of
    several engines behind one API; -1 for a single engine. ``running``: requests of this proxy.
    Times are on the registry's clock."""

    role: Role
    http: str
    kv: str
    engine_id: str
    data_parallel_rank: int
    seen_at: float
    running: int = 0
    shunned_until: float = 0.0


class Registry:
    """Instances are dropped ``missed`` heartbeats after their last one.

    With a ``secret`` registrations need its signature, see
    :mod:`lmcache_connector.peers.heartbeat`. Not thread-safe.
    """

    def __init__(
        self,
        heartbeat_seconds: float,
        missed: int = 3,
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._lifetime_seconds = heartbeat_seconds * missed
        self._secret = secret
        self._clock = clock
        self._wall_clock = wall_clock
        self._instances: dict[tuple[str, int], Instance] = {}
        self._told_at: dict[tuple[str, int], float] = {}  # on the instances' clocks

    def register(self, body: bytes, signature: str = "") -> None:
        """Process one posted heartbeat. Raises :class:`RegistrationError`."""
        if self._secret:
            expected = sign(body, self._secret)
            if not hmac.compare_digest(expected.encode(), signature.encode()):
                raise RegistrationError("the signature was not made with the shared secret")
        fields = _fields(body)
        place = fields["http"], fields["data_parallel_rank"]
        if self._secret:
            self._check_time(place, fields["time"])
        if fields["leaves"]:
            self._instances.pop(place, None)
            return
        known = self._instances.get(place)
        if known is not None and known.engine_id == fields["engine_id"]:
            known.seen_at = self._clock()
            return
        if len(self.alive()) >= _MAX_INSTANCES:
            raise RegistrationError("there are too many instances")
        self._instances[place] = Instance(
            Role(fields["role"]),
            fields["http"],
            fields["kv"],
            fields["engine_id"],
            fields["data_parallel_rank"],
            self._clock(),
        )

    def _check_time(self, place: tuple[str, int], told_at: float) -> None:
        """Refuses registrations and good-byes that are sent again."""
        oldest = self._wall_clock() - _MAX_AGE_SECONDS
        self._told_at = {p: at for p, at in self._told_at.items() if at >= oldest}
        is_new = told_at > self._told_at.get(place, oldest)
        if not is_new or told_at > oldest + 2 * _MAX_AGE_SECONDS:
            raise RegistrationError("the registration is too old, or a clock is wrong")
        self._told_at[place] = told_at

    def alive(self, part: Role | None = None) -> list[Instance]:
        """Instances of this role with a recent heartbeat; without a role, of all roles."""
        now = self._clock()
        self._instances = {
            name: instance
            for name, instance in self._instances.items()
            if now - instance.seen_at <= self._lifetime_seconds
        }
        return [i for i in self._instances.values() if part is None or i.role.plays(part)]

    def pick(self, part: Role, besides: frozenset[str] = frozenset()) -> Instance | None:
        """The least busy instance, except ``besides``. Recently failed ones come last."""
        now = self._clock()
        candidates = [i for i in self.alive(part) if i.http not in besides]
        return min(candidates, key=lambda i: (i.shunned_until > now, i.running), default=None)

    def shun(self, instance: Instance) -> None:
        """The instance failed: prefer others for a while."""
        instance.shunned_until = self._clock() + self._lifetime_seconds


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RegistrationError("not JSON") from error
    kinds: dict[str, type] = dict.fromkeys(("role", "http", "kv", "engine_id"), str)
    kinds |= {"data_parallel_rank": int, "leaves": bool, "time": float}
    if not isinstance(fields, dict) or fields.keys() != kinds.keys():
        raise RegistrationError(f"a registration has the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise RegistrationError(f"{name} is not a {kind.__name__}")
    if fields["role"] not in {role.value for role in Role}:
        raise RegistrationError("role is not one of vLLM's kv_role")
    for name in ("http", "kv"):
        if not _PLACE.match(fields[name]):
            raise RegistrationError(f"{name} is not HOST:PORT")
    return fields
