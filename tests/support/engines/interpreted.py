"""What vLLM's CPU build lacks for drafts beside recurrent states, as ``prepare`` of an engine.

vLLM copies the states of accepted tokens by Triton's kernels, and its CPU build has no Triton. Here
Triton's interpreter runs these kernels of vLLM's. All else is vLLM's own, too, but for two faults
of its CPU kernels among drafts, for which the connector refuses CPUs even with Triton.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def copy_states_without_a_gpu() -> None:
    interpret_triton()
    from lmcache_connector.vllm_compat import support

    vars(support)["runs_drafted_states"] = lambda: True
    _draft_as_many_as_asked()
    _take_a_step_of_one_token()


def interpret_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):  # Triton decides when it is loaded whether it interprets
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    import triton
    import triton.language
    import vllm.triton_utils
    from vllm.v1.worker import mamba_utils

    places: dict[str, Any] = vars(vllm.triton_utils)
    places.update(triton=triton, tl=triton.language)
    vars(importlib.reload(mamba_utils))["_TEMPORAL_TILES"] = 1  # one thread interprets them all


def _draft_as_many_as_asked() -> None:
    """vLLM's CPU kernels raise an error if there are fewer drafts than the last step had accepted
    (``_spec_forward`` in ``gdn_attention.py``). An n-gram that is not found drafts none."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    propose = runner.propose_draft_token_ids

    def filled_up(self: Any, output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        found = propose(self, output, sampled, *args, **kwargs)
        if not isinstance(found, list):  # of a head, which always drafts as many
            return found
        return [
            [*drafts, *ids[-1:] * (self.num_spec_tokens - len(drafts))]
            for drafts, ids in zip(found, sampled, strict=True)
        ]

    runner.propose_draft_token_ids = filled_up


def _take_a_step_of_one_token() -> None:
    """vLLM's CPU kernel of a step without drafts refuses the first column of a table with drafts if
    one request runs (``_spec_aware_nonspec``): torch takes the one number for contiguous."""
    from vllm import _custom_ops

    places: dict[str, Any] = vars(_custom_ops)
    update = places["fused_sigmoid_gating_delta_rule_update_cpu"]

    def with_copied_column(*, initial_state_indices: Any, **kwargs: Any) -> Any:
        column = initial_state_indices.new_tensor(initial_state_indices.tolist())
        return update(initial_state_indices=column, **kwargs)

    places["fused_sigmoid_gating_delta_rule_update_cpu"] = with_copied_column
