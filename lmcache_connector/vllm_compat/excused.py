"""Fields of vLLM's configuration that are no part of a model's identity, each with its reason.

Everything else in vLLM's configuration is in every chunk key, so that a field nobody has thought of
keeps instances apart rather than mixes their KV. To leave a field out, show that two engines which
differ in it compute the same KV for the same tokens, up to the order of floating-point sums, and
say why here. By class, reason and fields. :data:`CONDITIONALLY_IGNORED` are left out only where
:mod:`lmcache_connector.vllm_compat.identity` finds their condition met.
"""

from __future__ import annotations

from lmcache_connector.requests.excuses import by_class, words

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

NOT_PART_OF_IDENTITY = by_class(
    {
        "VllmConfig": {
            "ranks are mapped by heads and layers; the rest says where they run": (
                "parallel_config"
            ),
            "which tokens are computed in which step, not how": "scheduler_config",
            f"{_SUMS}; how a CPU orders bytes is in the packing": "device_config",
            "where weights lie": "offload_config",
            "where embedding weights lie": "engram_config",
            _OUTPUT: (
                "aux_output_config watermark_config structured_outputs_config reasoning_config"
            ),
            "drafts are verified; a drafter with KV is named beside it": "speculative_config",
            "observes": "observability_config logging_config profiler_config kv_events_config",
            _SUMS: "compilation_config optimization_level performance_mode",
            "how KV travels; its own settings are checked by each connector": "kv_transfer_config",
            "how new weights arrive; the cache is reset when they do": "weight_transfer_config",
            _PLACE: "instance_id shutdown_timeout",
        },
        "ModelConfig": {
            _IN_WEIGHTS: "model model_weights revision _hf_config_revision",
            "the seed of sampling; dummy weights are named by what is in memory": "seed",
            "resolved to runner_type": "runner",
            "resolved to convert_type": "convert",
            "says that the configuration is complete": "config_updated",
            "answers it has given so far": "_supports_multimodal_inputs_cache",
            _TEXT: (
                "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
                "renderer_num_workers"
            ),
            "leave to run the model's own code, which is named by its content": (
                "trust_remote_code"
            ),
            _IN_HF: "hf_config_path config_format hf_overrides",
            _ACCESS: (
                "hf_token allowed_local_media_path allowed_media_domains "
                "allow_deprecated_quantization"
            ),
            "embeddings are named by what they are, request by request": "enable_prompt_embeds",
            _LIMIT: "spec_target_max_model_len",
            _SUMS: "enforce_eager",
            "without effect, says vLLM": "disable_cascade_attn",
            _OUTPUT: (
                "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
                "enable_trace_replay generation_config override_generation_config "
                "logits_processors"
            ),
            "pooling requests pass the cache by": "pooler_config",
            "prepares requests, which are named by what they hold": "io_processor_plugin",
            "a name": "served_model_name",
            _PLACE: (
                "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
                "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator"
            ),
        },
        "CacheConfig": {
            _BLOCKS: (
                "block_size user_specified_block_size _block_size_resolved "
                "effective_attention_block_size prefix_match_unit hash_block_size "
                "cache_hit_alignment_tokens enable_prefix_caching prefix_caching_hash_algo "
                "prefix_cache_retention_interval mamba_block_size"
            ),
            "the order of whole values, which strides tell": "kv_cache_layout",
            "padding between values": "skip_page_size_padded mamba_page_size_padded",
            _MEMORY: (
                "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
                "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
                "kv_offloading_size kv_offloading_backend"
            ),
            "when states are kept; each is kept whole": (
                "mamba_cache_mode enable_mamba_shared_prefix_checkpoint"
            ),
        },
        "AttentionConfig": {
            f"{_SUMS}; how it orders bytes is in the packing": "backend backend_per_kind",
            _SUMS: (
                "minimax_m3_msa_decode_backend mla_prefill_backend use_trtllm_attention "
                "flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
                "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
                "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
                "flex_attn_q_block_size flex_attn_kv_block_size"
            ),
        },
        # Of drafters with KV. That of a draft that is accepted is computed once more.
        "SpeculativeConfig": {
            _SUMS: "enforce_eager",
            _IN_WEIGHTS: "model revision",
            "what is computed without the drafter is not stored": "max_model_len",
            "how many are drafted": "num_speculative_tokens num_speculative_tokens_per_batch_size",
            "what is drafted": "draft_sample_method",
            "which drafts are accepted": (
                "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length"
            ),
            "stands in the key itself": "target_model_config",
            "ranks are mapped by heads": (
                "target_parallel_config draft_parallel_config draft_tensor_parallel_size"
            ),
        },
        "KernelConfig": {
            _SUMS: (
                "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
                "enable_cutedsl_warmup enable_jit_warmup"
            ),
        },
        "MambaConfig": {
            _SUMS: "backend ssu_algorithm",
        },
        "LoadConfig": {
            _PLACE: (
                "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
                "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location"
            ),
        },
        "LoRAConfig": {
            _LIMIT: "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
            _SUMS: "fully_sharded_loras specialize_active_lora",
        },
        "MultiModalConfig": {
            _LIMIT: "language_model_only limit_per_prompt enable_mm_embeds",
            _MEMORY: (
                "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
                "mm_ipc_gpu_memory_gb"
            ),
            "names inputs for vLLM; we name them by what they hold": "mm_hasher_algorithm",
            _PLACE: "mm_tensor_ipc skip_mm_profiling",
            _SUMS: "mm_encoder_tp_mode mm_encoder_attn_backend",
            "where scales are written to for a later start": "mm_encoder_fp8_scale_save_path",
            "what is written to a file for a later start": "mm_encoder_fp8_scale_save_margin",
            _TEXT: "interleave_mm_strings",
        },
        "ECTransferConfig": {
            _PLACE: "engine_id ec_buffer_device ec_role ec_ip ec_port",
            _MEMORY: "ec_buffer_size",
        },
        # Of Hugging Face, whatever the class of the model.
        "PreTrainedConfig": {
            "a name": "_name_or_path name_or_path _commit_hash",
            "who wrote the file": "transformers_version",
            "whether Transformers' own model keeps KV": "use_cache",
        },
        "KVCacheSpec": {
            _BLOCKS: "block_size",
            "those of one rank; heads are mapped one by one": (
                "num_kv_heads num_head_slots max_tp_shards"
            ),
            "context parallelism is refused": "dcp_sharded",
            "padding between values": "block_stride_alignment page_size_padded alignment",
        },
    }
)
"""Class -> field -> reason."""

CONDITIONALLY_IGNORED = by_class(
    {
        "ModelConfig": {
            "a limit, where the model's arithmetic does not depend on it": (
                "max_model_len original_max_model_len"
            ),
        },
        "LoadConfig": {
            "how files are read, where all that is loaded comes from them": "load_format",
        },
    }
)

# Read for every use of ``max_model_len``: their arithmetic does not depend on it. Where a name is
# used at all, it sizes buffers (DeepSeek's indexer) or bounds how many image tokens are expected.
# A test searches the sources of the installed vLLM for others.
INDEPENDENT_OF_LENGTH = words(
    """
    AfmoeForCausalLM ApertusForCausalLM AriaForConditionalGeneration BailingMoeForCausalLM
    BailingMoeV2ForCausalLM Blip2ForConditionalGeneration BloomForCausalLM Cohere2ForCausalLM
    CohereForCausalLM DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    Exaone4ForCausalLM ExaoneForCausalLM FalconForCausalLM GPT2LMHeadModel GPTJForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM LlamaForCausalLM
    LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaOnevisionForConditionalGeneration MiMoForCausalLM Mistral3ForConditionalGeneration
    MistralForCausalLM MixtralForCausalLM NemotronForCausalLM OPTForCausalLM OlmoeForCausalLM
    Phi3ForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration SolarForCausalLM StableLmForCausalLM TeleChat2ForCausalLM
    """
)
"""Architectures, as vLLM names them."""

# Rotary embeddings whose angles follow from position and configuration alone.
INDEPENDENT_ROPE_TYPES = frozenset(
    {"default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "proportional"}
)

# They load the files of the model's folder as they are.
PLAIN_LOAD_FORMATS = words(
    """
    auto hf safetensors fastsafetensors instanttensor mistral pt runai_streamer dummy
    """
)

# They write a block token after token, as its strides say, so blocks of any size hold the same.
IN_TOKEN_ORDER = words(
    """
    CPUAttentionBackend FlashAttentionBackend FlashAttentionDiffKVBackend FlashInferBackend
    FlexAttentionBackend TritonAttentionBackend FlashAttnMLABackend FlashInferMLABackend
    FlashMLABackend CutlassMLABackend TritonMLABackend
    """
)
"""Classes of vLLM's attention backends. The CPU's own order is found by trying it."""
