"""Fields of vLLM's configuration that are no part of a model's identity, each with its reason.

Everything else in vLLM's configuration is in every chunk key, so that a field nobody has thought of
keeps instances apart rather than mixes their KV. To excuse a field, show that two engines which
differ in it compute the same KV for the same tokens, up to the order of floating-point sums, and
say why here. By class, then by field. :data:`SOMETIMES` are excused only where
:mod:`lmcache_connector.vllm_compat.identity` finds their condition met.
"""

from __future__ import annotations

from types import MappingProxyType

_SUMS = "chooses a kernel: the same arithmetic, its sums in another order"
_PLACE = "says where, or how fast, not what"
_MEMORY = "the size of memory, not what is in it"
_BLOCKS = "how blocks are cut and found again; chunks are cut by us"
_TEXT = "turns text into token ids, or token ids into text"
_OUTPUT = "concerns what is done with the model's output"
_IN_HF = "its effect stands in hf_config"
_IN_WEIGHTS = "the weights are named by what they are"
_ACCESS = "says who may ask for what, or with which credentials"
_LIMIT = "a limit of what is accepted"

EXCUSED: MappingProxyType[str, dict[str, str]] = MappingProxyType(
    {
        "VllmConfig": {
            "parallel_config": "ranks are mapped by heads and layers; the rest says where they run",
            "scheduler_config": "which tokens are computed in which step, not how",
            "device_config": f"{_SUMS}; how a CPU orders bytes is in the packing",
            "offload_config": "where weights lie",
            "engram_config": "where embedding weights lie",
            "aux_output_config": _OUTPUT,
            "speculative_config": "drafts are verified; a drafter with KV is named beside it",
            "watermark_config": _OUTPUT,
            "structured_outputs_config": _OUTPUT,
            "reasoning_config": _OUTPUT,
            "observability_config": "observes",
            "logging_config": "observes",
            "profiler_config": "observes",
            "compilation_config": _SUMS,
            "optimization_level": _SUMS,
            "performance_mode": _SUMS,
            "kv_transfer_config": "how KV travels; its own settings are checked by each connector",
            "kv_events_config": "observes",
            "weight_transfer_config": "how new weights arrive; the cache is reset when they do",
            "instance_id": _PLACE,
            "shutdown_timeout": _PLACE,
        },
        "ModelConfig": {
            "model": _IN_WEIGHTS,
            "model_weights": _IN_WEIGHTS,
            "revision": _IN_WEIGHTS,
            "_hf_config_revision": _IN_WEIGHTS,
            "seed": "the seed of sampling; dummy weights are named by what is in memory",
            "runner": "resolved to runner_type",
            "convert": "resolved to convert_type",
            "config_updated": "says that the configuration is complete",
            "_supports_multimodal_inputs_cache": "answers it has given so far",
            "tokenizer": _TEXT,
            "tokenizer_mode": _TEXT,
            "tokenizer_revision": _TEXT,
            "skip_tokenizer_init": _TEXT,
            "renderer_num_workers": _TEXT,
            "trust_remote_code": "leave to run the model's own code, which is named by its content",
            "hf_config_path": _IN_HF,
            "config_format": _IN_HF,
            "hf_overrides": _IN_HF,
            "hf_token": _ACCESS,
            "allowed_local_media_path": _ACCESS,
            "allowed_media_domains": _ACCESS,
            "allow_deprecated_quantization": _ACCESS,
            "enable_prompt_embeds": "embeddings are named by what they are, request by request",
            "spec_target_max_model_len": _LIMIT,
            "enforce_eager": _SUMS,
            "disable_cascade_attn": "without effect, says vLLM",
            "return_sampling_mask": _OUTPUT,
            "max_logprobs": _OUTPUT,
            "logprobs_mode": _OUTPUT,
            "use_fp64_gumbel": _OUTPUT,
            "enable_trace_replay": _OUTPUT,
            "generation_config": _OUTPUT,
            "override_generation_config": _OUTPUT,
            "logits_processors": _OUTPUT,
            "pooler_config": "pooling requests pass the cache by",
            "io_processor_plugin": "prepares requests, which are named by what they hold",
            "served_model_name": "a name",
            "enable_sleep_mode": _PLACE,
            "sleep_preserve_parameter_names": _PLACE,
            "sleep_mode_backend": _PLACE,
            "sleep_mode_offload_cudagraph": _PLACE,
            "enable_nccl_comm_suspend": _PLACE,
            "enable_cumem_allocator": _PLACE,
        },
        "CacheConfig": {
            "block_size": _BLOCKS,
            "user_specified_block_size": _BLOCKS,
            "_block_size_resolved": _BLOCKS,
            "effective_attention_block_size": _BLOCKS,
            "prefix_match_unit": _BLOCKS,
            "hash_block_size": _BLOCKS,
            "cache_hit_alignment_tokens": _BLOCKS,
            "enable_prefix_caching": _BLOCKS,
            "prefix_caching_hash_algo": _BLOCKS,
            "prefix_cache_retention_interval": _BLOCKS,
            "kv_cache_layout": "the order of whole values, which strides tell",
            "skip_page_size_padded": "padding between values",
            "gpu_memory_utilization": _MEMORY,
            "num_gpu_blocks_override": _MEMORY,
            "num_gpu_blocks": _MEMORY,
            "num_cpu_blocks": _MEMORY,
            "kv_cache_size_tokens": _MEMORY,
            "kv_cache_max_concurrency": _MEMORY,
            "kv_cache_memory_bytes": _MEMORY,
            "kv_offloading_size": _MEMORY,
            "kv_offloading_backend": _MEMORY,
            "mamba_page_size_padded": "padding between values",
            "mamba_block_size": _BLOCKS,
            "mamba_cache_mode": "when states are kept; each is kept whole",
            "enable_mamba_shared_prefix_checkpoint": "when states are kept; each is kept whole",
        },
        "AttentionConfig": {
            "backend": f"{_SUMS}; how it orders bytes is in the packing",
            "backend_per_kind": f"{_SUMS}; how it orders bytes is in the packing",
            "minimax_m3_msa_decode_backend": _SUMS,
            "mla_prefill_backend": _SUMS,
            "use_trtllm_attention": _SUMS,
            "flash_attn_version": _SUMS,
            "flash_attn_max_num_splits_for_cuda_graph": _SUMS,
            "tokenspeed_mla_min_split_kv": _SUMS,
            "tq_max_kv_splits_for_cuda_graph": _SUMS,
            "sparse_mla_prefill_workspace_factor": _SUMS,
            "flex_attn_block_m": _SUMS,
            "flex_attn_block_n": _SUMS,
            "flex_attn_q_block_size": _SUMS,
            "flex_attn_kv_block_size": _SUMS,
        },
        # Of drafters with KV. That of a draft that is accepted is computed once more.
        "SpeculativeConfig": {
            "enforce_eager": _SUMS,
            "model": _IN_WEIGHTS,
            "revision": _IN_WEIGHTS,
            "max_model_len": "what is computed without the drafter is not stored",
            "num_speculative_tokens": "how many are drafted",
            "num_speculative_tokens_per_batch_size": "how many are drafted",
            "draft_sample_method": "what is drafted",
            "rejection_sample_method": "which drafts are accepted",
            "synthetic_acceptance_rates": "which drafts are accepted",
            "synthetic_acceptance_length": "which drafts are accepted",
            "target_model_config": "stands in the key itself",
            "target_parallel_config": "ranks are mapped by heads",
            "draft_parallel_config": "ranks are mapped by heads",
            "draft_tensor_parallel_size": "ranks are mapped by heads",
        },
        "KernelConfig": {
            "ir_op_priority": _SUMS,
            "enable_flashinfer_autotune": _SUMS,
            "enable_rocm_segmented_attn_autotune": _SUMS,
            "enable_cutedsl_warmup": _SUMS,
            "enable_jit_warmup": _SUMS,
        },
        "MambaConfig": {"backend": _SUMS, "ssu_algorithm": _SUMS},
        "LoadConfig": {
            "download_dir": _PLACE,
            "safetensors_load_strategy": _PLACE,
            "safetensors_prefetch_num_threads": _PLACE,
            "safetensors_prefetch_block_size": _PLACE,
            "device": _PLACE,
            "use_tqdm_on_load": _PLACE,
            "pt_load_map_location": _PLACE,
        },
        "LoRAConfig": {
            "max_lora_rank": _LIMIT,
            "max_loras": _LIMIT,
            "max_cpu_loras": _LIMIT,
            "max_lora_cls_labels": _LIMIT,
            "fully_sharded_loras": _SUMS,
            "specialize_active_lora": _SUMS,
        },
        "MultiModalConfig": {
            "language_model_only": _LIMIT,
            "limit_per_prompt": _LIMIT,
            "enable_mm_embeds": _LIMIT,
            "mm_processor_cache_gb": _MEMORY,
            "mm_processor_cache_type": _MEMORY,
            "mm_shm_cache_max_object_size_mb": _MEMORY,
            "mm_ipc_gpu_memory_gb": _MEMORY,
            "mm_hasher_algorithm": "names inputs for vLLM; we name them by what they hold",
            "mm_tensor_ipc": _PLACE,
            "skip_mm_profiling": _PLACE,
            "mm_encoder_tp_mode": _SUMS,
            "mm_encoder_attn_backend": _SUMS,
            "mm_encoder_fp8_scale_save_path": "where scales are written to for a later start",
            "mm_encoder_fp8_scale_save_margin": "what is written to a file for a later start",
            "interleave_mm_strings": _TEXT,
        },
        "ECTransferConfig": {
            "engine_id": _PLACE,
            "ec_buffer_device": _PLACE,
            "ec_buffer_size": _MEMORY,
            "ec_role": _PLACE,
            "ec_ip": _PLACE,
            "ec_port": _PLACE,
        },
        # Of Hugging Face, whatever the class of the model.
        "PreTrainedConfig": {
            "_name_or_path": "a name",
            "name_or_path": "a name",
            "_commit_hash": "a name",
            "transformers_version": "who wrote the file",
            "use_cache": "whether Transformers' own model keeps KV",
        },
        "KVCacheSpec": {
            "block_size": _BLOCKS,
            "num_kv_heads": "those of one rank; heads are mapped one by one",
            "num_head_slots": "those of one rank; heads are mapped one by one",
            "max_tp_shards": "those of one rank; heads are mapped one by one",
            "dcp_sharded": "context parallelism is refused",
            "block_stride_alignment": "padding between values",
            "page_size_padded": "padding between values",
            "alignment": "padding between values",
        },
    }
)
"""Class -> field -> reason."""

SOMETIMES: MappingProxyType[str, dict[str, str]] = MappingProxyType(
    {
        "ModelConfig": {
            "max_model_len": "a limit, where the model's arithmetic does not depend on it",
            "original_max_model_len": "a limit, where the model's arithmetic does not depend on it",
        },
        "LoadConfig": {
            "load_format": "how files are read, where all that is loaded comes from them",
        },
    }
)

# Read for every use of ``max_model_len``: their arithmetic does not depend on it. Where a name is
# used at all, it sizes buffers (DeepSeek's indexer) or bounds how many image tokens are expected.
# A test searches the sources of the installed vLLM for others.
INDEPENDENT_OF_LENGTH = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "AriaForConditionalGeneration",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "Blip2ForConditionalGeneration",
        "BloomForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "InternLM2ForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MiMoForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiMoEForCausalLM",
        "PixtralForConditionalGeneration",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "SolarForCausalLM",
        "StableLmForCausalLM",
        "TeleChat2ForCausalLM",
    }
)
"""Architectures, as vLLM names them."""

# Rotary embeddings whose angles follow from position and configuration alone.
INDEPENDENT_ROPE_TYPES = frozenset(
    {"default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "proportional"}
)

# They load the files of the model's folder as they are.
PLAIN_LOAD_FORMATS = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "dummy",
    }
)

# They write a block token after token, as its strides say, so blocks of any size hold the same.
IN_TOKEN_ORDER = frozenset(
    {
        "CPUAttentionBackend",
        "FlashAttentionBackend",
        "FlashAttentionDiffKVBackend",
        "FlashInferBackend",
        "FlexAttentionBackend",
        "TritonAttentionBackend",
        "FlashAttnMLABackend",
        "FlashInferMLABackend",
        "FlashMLABackend",
        "CutlassMLABackend",
        "TritonMLABackend",
    }
)
"""Classes of vLLM's attention backends. The CPU's own order is found by trying it."""
