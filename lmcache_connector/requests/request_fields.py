"""Which fields of a vLLM request cannot change its KV, each with its reason.

KV may be shared only if the key contains every field that could change it. So each field of the
classes below is in one of two tables: ``KEYED`` for fields that go into the key or make a request
bypass the tiers, ``NOT_PART_OF_IDENTITY`` for fields that cannot change the KV of given tokens at
given positions. :class:`UnknownFields` finds fields in neither table, as a newer vLLM may have:
requests that use them bypass the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from lmcache_connector.keys.reasons import by_class, words

_TOKENS = "it decides which tokens come next, and every token is in the key"
_REPORT = "it decides what is reported of a request, not what is computed"
_SCHEDULE = "it decides when a request runs"
_PROGRESS = "it counts how far a request has come"
_POOLING = "pooling requests bypass the tiers"
_NO_HITS = "it forbids hits, so nothing is loaded for the request"

KEYED: Mapping[str, frozenset[str]] = {
    "Request": words(
        "_all_token_ids cache_salt lora_request mm_features pooling_params prompt_embeds "
        "prompt_is_token_ids resumable"
    ),
    "LoRARequest": words("is_3d_lora_weight load_inplace lora_int_id lora_path"),
    "MultiModalFeatureSpec": words("data identifier mm_hash mm_position modality"),
    "PlaceholderRange": words("is_embed length offset"),
    "MultiModalFieldElem": words("data field"),
    "SamplingParams": frozenset(),
    "PoolingParams": frozenset(),
}

NOT_PART_OF_IDENTITY = by_class(
    {
        "Request": {
            "it is a name, new for each request": "request_id",
            "it decides where the answer goes": "client_index",
            "it is a name for routers; turns of a session share tokens or nothing": "session_id",
            "it serves distributed tracing": "trace_headers",
            _SCHEDULE: (
                "priority arrival_time status abort_immediately next_decode_eligible_step "
                "last_sched_seq is_prefill_chunk"
            ),
            "sessions whose prompt changes bypass the tiers": "streaming_queue",
            "its class has a table of its own": "sampling_params",
            _TOKENS: "structured_output_request max_tokens",
            "it holds drafts, and KV is stored up to the last accepted token": "spec_token_ids",
            _REPORT: (
                "stop_reason events kv_cache_report_mode prefill_stats spec_decode_metrics "
                "num_nans_in_logits num_preemptions"
            ),
            "it is for connectors, and KV that another one loads is not stored": (
                "kv_transfer_params"
            ),
            "it brings encoder outputs, whose KV is not stored": "ec_transfer_params",
            "it gives hints on reuse": "kv_hints",
            _NO_HITS: "skip_reading_prefix_cache",
            "it begins the list of all token ids": "prompt_token_ids",
            "it ends the list of all token ids": "_output_token_ids",
            "it is a view of the list of all token ids": "output_token_ids all_token_ids",
            "it counts the prompt's token ids": "num_prompt_tokens",
            "it caches hashes for vLLM": "_prompt_embeds_per_block_hashes",
            "it names blocks for vLLM": "block_hashes",
            "it makes vLLM's names of blocks": "_block_hasher",
            _PROGRESS: (
                "num_computed_tokens num_output_placeholders num_stale_output_tokens "
                "drop_stale_output num_in_flight_tokens"
            ),
            "it decides where vLLM keeps a recurrent state": "shared_prefix_boundary",
            "models with compressed windows are refused": "replay_start",
        },
        "LoRARequest": {
            "it is only a name; the files identify the adapter": "lora_name",
            "it is a name for the list of models": "base_model_name",
        },
        "MultiModalFeatureSpec": {},
        "PlaceholderRange": {},
        "MultiModalFieldElem": {},
        "SamplingParams": {
            _TOKENS: (
                "n presence_penalty frequency_penalty repetition_penalty temperature watermarking "
                "_watermarking_skipped top_p top_k min_p seed stop stop_token_ids ignore_eos "
                "max_tokens min_tokens _eos_token_id _all_stop_token_ids structured_outputs "
                "logit_bias allowed_token_ids bad_words _bad_words_token_ids "
                "thinking_token_budget repetition_detection trace_decode_token_ids"
            ),
            _REPORT: (
                "logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start "
                "logprob_token_ids flat_logprobs detokenize skip_special_tokens "
                "spaces_between_special_tokens include_stop_str_in_output output_kind "
                "stream_interval output_text_buffer_length routed_experts_prompt_start"
            ),
            "it decides who owns the object": "skip_clone",
            _NO_HITS: "skip_reading_prefix_cache",
            "it is for samplers and connectors, as kv_transfer_params": "extra_args",
        },
        "PoolingParams": {
            _POOLING: (
                "use_activation dimensions step_tag_id returned_token_ids task requires_token_ids "
                "skip_reading_prefix_cache late_interaction_params extra_kwargs output_kind"
            )
        },
    }
)
"""Class -> field -> reason."""


KNOWN_FIELDS = {name: KEYED[name] | NOT_PART_OF_IDENTITY[name].keys() for name in KEYED}
"""Class -> all its fields in the tables."""

logger = logging.getLogger(__name__)


class UnknownFields:
    """Detects requests that use a field in neither table. Warns once per field. A class with fixed
    fields is checked once; others cost a set difference per request.
    """

    def __init__(self) -> None:
        self._unknown: dict[type, tuple[str, ...]] = {}
        self._warned: set[tuple[str, str]] = set()

    def are_used_in(self, request: Any) -> bool:
        """Whether an unknown field of the request or its parts has a value."""
        parts = [("Request", request), ("SamplingParams", request.sampling_params)]
        parts.append(("LoRARequest", request.lora_request))
        for feature in request.mm_features:
            parts.append(("MultiModalFeatureSpec", feature))
            parts.append(("PlaceholderRange", feature.mm_position))
        return any(part is not None and self._any_used(part, name) for name, part in parts)

    def _any_used(self, part: Any, class_name: str) -> bool:
        names = self._unknown.get(type(part))
        if names is None:
            fixed = fixed_fields(type(part))
            names = tuple(sorted(set(fixed or vars(part)) - KNOWN_FIELDS[class_name]))
            if fixed:
                self._unknown[type(part)] = names
        used = {(class_name, name) for name in names if _is_set(getattr(part, name, None))}
        for field in sorted(used - self._warned):
            logger.warning(
                "vLLM has a field %s.%s that lmcache-connector does not know: requests that use it "
                "bypass the KV cache tiers.",
                *field,
            )
        self._warned |= used
        return bool(used)


def fixed_fields(kind: type) -> tuple[str, ...]:
    """Declared fields of a msgspec or dataclass class; empty for other classes."""
    fields: Iterable[str] = getattr(kind, "__struct_fields__", ())
    return tuple(fields) or tuple(getattr(kind, "__dataclass_fields__", ()))


def _is_set(value: Any) -> bool:
    if value is None or value is False:
        return False
    return bool(value) if isinstance(value, int | float | str | bytes | list | dict | set) else True
