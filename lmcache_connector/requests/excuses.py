"""What of a vLLM request cannot change its KV, field by field, each with its reason.

A request's KV is its own unless every field that could tell it from another's is in the key. So
each field of the classes below is in one of two tables: ``KEYED`` for those that go into the key or
make a request bypass the tiers, ``EXCUSED`` for those that cannot change the KV of given tokens at
given positions. A field in neither, of a newer vLLM, makes requests that use it bypass.
"""

from __future__ import annotations

from collections.abc import Mapping

_TOKENS = "decides which tokens come next; every token is in the key"
_REPORT = "decides what is told of a request, not what is computed"
_SCHEDULE = "decides when a request runs"
_PROGRESS = "says how far a request has come"
_POOLING = "pooling requests bypass as such"

KEYED: Mapping[str, frozenset[str]] = {
    "Request": frozenset(
        {
            "_all_token_ids",
            "cache_salt",
            "lora_request",
            "mm_features",
            "pooling_params",
            "prompt_embeds",
            "prompt_is_token_ids",
            "resumable",
        }
    ),
    "LoRARequest": frozenset({"lora_int_id", "lora_path", "load_inplace", "is_3d_lora_weight"}),
    "MultiModalFeatureSpec": frozenset(
        {"data", "modality", "identifier", "mm_hash", "mm_position"}
    ),
    "PlaceholderRange": frozenset({"offset", "length", "is_embed"}),
    "MultiModalFieldElem": frozenset({"data", "field"}),
    "SamplingParams": frozenset(),
    "PoolingParams": frozenset(),
}

EXCUSED: Mapping[str, Mapping[str, str]] = {
    "Request": {
        "request_id": "a name, new for each request",
        "client_index": "where the answer goes",
        "session_id": "a name that routers use; turns of a session share their tokens or nothing",
        "trace_headers": "for distributed tracing",
        "priority": _SCHEDULE,
        "arrival_time": _SCHEDULE,
        "status": _SCHEDULE,
        "abort_immediately": _SCHEDULE,
        "next_decode_eligible_step": _SCHEDULE,
        "last_sched_seq": _SCHEDULE,
        "is_prefill_chunk": _SCHEDULE,
        "streaming_queue": "of sessions whose prompt changes, which bypass",
        "sampling_params": "a class of its own in these tables",
        "structured_output_request": _TOKENS,
        "spec_token_ids": "drafts; KV is stored up to the last accepted token only",
        "max_tokens": _TOKENS,
        "stop_reason": _REPORT,
        "events": _REPORT,
        "kv_cache_report_mode": _REPORT,
        "prefill_stats": _REPORT,
        "spec_decode_metrics": _REPORT,
        "num_nans_in_logits": _REPORT,
        "num_preemptions": _REPORT,
        "kv_transfer_params": "for connectors; what another one loaded is not taken for computed",
        "ec_transfer_params": "encoder outputs from elsewhere, whose KV is not stored",
        "kv_hints": "hints to offloading about reuse",
        "skip_reading_prefix_cache": "asks for no hits; nothing is loaded for it",
        "prompt_token_ids": "the first of all token ids",
        "_output_token_ids": "the last of all token ids",
        "output_token_ids": "a view of them",
        "all_token_ids": "a view of them",
        "num_prompt_tokens": "a count of them",
        "_prompt_embeds_per_block_hashes": "vLLM's own memory of hashes",
        "block_hashes": "vLLM's own names of blocks",
        "_block_hasher": "what makes those names",
        "num_computed_tokens": _PROGRESS,
        "num_output_placeholders": _PROGRESS,
        "num_stale_output_tokens": _PROGRESS,
        "drop_stale_output": _PROGRESS,
        "num_in_flight_tokens": _PROGRESS,
        "shared_prefix_boundary": "where vLLM keeps a recurrent state",
        "replay_start": "of compressed windows, which are refused",
    },
    "LoRARequest": {
        "lora_name": "a name; the files say what the adapter is",
        "base_model_name": "a name for the list of models",
    },
    "MultiModalFeatureSpec": {},
    "PlaceholderRange": {},
    "MultiModalFieldElem": {},
    "SamplingParams": {
        **dict.fromkeys(
            (
                "n",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "temperature",
                "watermarking",
                "_watermarking_skipped",
                "top_p",
                "top_k",
                "min_p",
                "seed",
                "stop",
                "stop_token_ids",
                "ignore_eos",
                "max_tokens",
                "min_tokens",
                "_eos_token_id",
                "_all_stop_token_ids",
                "structured_outputs",
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
                "_bad_words_token_ids",
                "thinking_token_budget",
                "repetition_detection",
                "trace_decode_token_ids",
            ),
            _TOKENS,
        ),
        **dict.fromkeys(
            (
                "logprobs",
                "prompt_logprobs",
                "prompt_logprob_token_ids",
                "prompt_logprob_start",
                "logprob_token_ids",
                "flat_logprobs",
                "detokenize",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "include_stop_str_in_output",
                "output_kind",
                "stream_interval",
                "output_text_buffer_length",
                "routed_experts_prompt_start",
            ),
            _REPORT,
        ),
        "skip_clone": "who owns the object",
        "skip_reading_prefix_cache": "asks for no hits; nothing is loaded for it",
        "extra_args": "for samplers and connectors; see kv_transfer_params, ec_transfer_params",
    },
    "PoolingParams": dict.fromkeys(
        (
            "use_activation",
            "dimensions",
            "step_tag_id",
            "returned_token_ids",
            "task",
            "requires_token_ids",
            "skip_reading_prefix_cache",
            "late_interaction_params",
            "extra_kwargs",
            "output_kind",
        ),
        _POOLING,
    ),
}


def known_fields(class_name: str) -> frozenset[str]:
    """Of a class in the tables."""
    return KEYED[class_name] | EXCUSED[class_name].keys()
