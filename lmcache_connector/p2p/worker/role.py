"""What a rank does in each step as a producer or a consumer of hand-overs."""

from __future__ import annotations

from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.plans import HandoverPlan, HandoverReport
from lmcache_connector.plans import StepOutput


class Role:
    """A role overrides what it has to do; everything else does nothing.

    Called from the engine's step thread, but for :meth:`answer`.
    """

    def handle_preemptions(self, plan: HandoverPlan) -> None:
        """Before the forward pass overwrites blocks of preempted requests."""

    def start_forward(self, plan: HandoverPlan) -> None:
        """Right before the forward pass."""

    def save_layer(self, layer_name: str) -> None:
        """The forward pass has just written a layer."""

    def start_loads(self, plan: HandoverPlan) -> None:
        """After the forward pass was submitted."""

    def end_forward(self, plan: HandoverPlan) -> None:
        """After the forward pass."""

    def take_output(self) -> StepOutput[HandoverReport]:
        """What ended since the last call."""
        return StepOutput()

    def wait(self, seconds: float, *, for_room: bool) -> bool:
        """Wait until something ends, ``seconds`` at most. False, at once, if nothing is going to.

        ``for_room``: a prompt waits for buffer space to be free.
        """
        return False

    def answer(self, peer: Peer, message: Message) -> Message | None:
        """``None`` for a message to the other role. Runs on the control server's thread."""
        return None

    def let_go(self) -> bool:
        """Between two steps: wait until no copy reads the paged cache. False if one still does
        after some seconds."""
        return True

    def close(self, seconds: float) -> None:
        """End everything, within a few times ``seconds``."""
