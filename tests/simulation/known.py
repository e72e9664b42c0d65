"""The checks that are off, and why. ``--everything`` has them on."""

from __future__ import annotations

OFF: dict[str, str] = {
    "old slot map": "mended since the world was written; no long run has had it on",
    "slow node": "mended likewise; which share of a quick node's chunks must be there in time has"
    " not been measured without a slow one",
}
