"""Where one-sided reads are truly one-sided.

Between processes of one machine the system copies, and RDMA hardware does between machines. Over
plain TCP, UCX has the owner's process answer: slower than the TCP transport, and a peer that dies
in the midst of it can take the process down that it read from.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/net"))
_RDMA_DEVICES = Path("/sys/class/infiniband")
_RDMA, _ANYWHERE = "rdma", "anywhere"


def links(*, is_local: bool, anywhere: bool) -> tuple[str, ...]:
    """What this process can read over. Two that share one may use NIXL with each other.

    ``is_local``: on this machine only. ``anywhere``: else over TCP as well, as somebody said so.
    """
    found = []
    try:
        place = _BOOT_ID.read_text() + "".join(str(name.readlink()) for name in _NAMESPACES)
        found.append(f"machine {blake3(place.encode()).hexdigest()[:16]}")
    except OSError:  # not Linux, or hidden: then nobody is next door
        pass
    if not is_local:
        found += [_RDMA] * has_rdma() + [_ANYWHERE] * anywhere
    return tuple(found)


def has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
