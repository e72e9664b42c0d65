"""vLLM's configuration fields and variables that are not part of a model's identity, with reasons.

All other fields are in every chunk key, so that unknown fields separate instances rather than mix
their KV. To list a field, show that engines which differ in it compute the same KV for the same
tokens, up to the order of floating-point sums, and give the reason. Tables map class, reason and
fields. :data:`CONDITIONALLY_IGNORED` fields are left out only if
:mod:`lmcache_connector.vllm_compat.identity` finds their condition met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from lmcache_connector.keys.reasons import by_class, by_field, words

_SUMS = "it chooses a kernel: the arithmetic is the same, the order of its sums another"
_PLACE = "it decides where or how fast the model runs, not what it computes"
_MEMORY = "it sets the size of memory, not its content"
_BLOCKS = "it decides how vLLM cuts and finds blocks; chunks are cut independently"
_TEXT = "it converts between text and token ids, and token ids are in the key"
_OUTPUT = "it applies to the model's output"
_IN_HF = "its effect is part of hf_config"
_IN_WEIGHTS = "the weights are identified by their bytes"
_ACCESS = "it decides who may request what, and with which credentials"
_LIMIT = "it limits which requests are accepted"
_OBSERVES = "it only observes the engine"

NOT_PART_OF_IDENTITY = by_class(
    {
        "VllmConfig": {
            "chunks name heads and layers; the rest decides where ranks run": ("parallel_config"),
            "it decides in which step a token is computed, not how": "scheduler_config",
            f"{_SUMS}; a CPU's order of bytes is in the packing": "device_config",
            "it decides where weights lie": "offload_config",
            "it decides where embedding weights lie": "engram_config",
            _OUTPUT: (
                "aux_output_config watermark_config structured_outputs_config reasoning_config"
            ),
            "drafts are verified; a drafter with KV has a part of its own": "speculative_config",
            _OBSERVES: "observability_config logging_config profiler_config kv_events_config",
            _SUMS: "compilation_config optimization_level performance_mode",
            "it decides how KV travels; each connector checks its settings": "kv_transfer_config",
            "it decides how new weights arrive, and they reset the cache": "weight_transfer_config",
            _PLACE: "instance_id shutdown_timeout",
        },
        "ModelConfig": {
            _IN_WEIGHTS: "model model_weights revision _hf_config_revision",
            "it seeds sampling; dummy weights are identified by their bytes": "seed",
            "vLLM resolves it to runner_type": "runner",
            "vLLM resolves it to convert_type": "convert",
            "it marks the configuration as complete": "config_updated",
            "it caches answers of a method": "_supports_multimodal_inputs_cache",
            _TEXT: (
                "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
                "renderer_num_workers"
            ),
            "it permits the model's own code, which is identified by its content": (
                "trust_remote_code"
            ),
            _IN_HF: "hf_config_path config_format hf_overrides",
            _ACCESS: (
                "hf_token allowed_local_media_path allowed_media_domains "
                "allow_deprecated_quantization"
            ),
            "embeddings are identified by their bytes in each request": "enable_prompt_embeds",
            _LIMIT: "spec_target_max_model_len",
            _SUMS: "enforce_eager",
            "vLLM documents that it has no effect": "disable_cascade_attn",
            _OUTPUT: (
                "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
                "enable_trace_replay generation_config override_generation_config "
                "logits_processors"
            ),
            "pooling requests bypass the cache": "pooler_config",
            "it prepares requests, which are identified by their content": "io_processor_plugin",
            "it is only a name": "served_model_name",
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
            "it orders whole values, as strides show": "kv_cache_layout",
            "it pads the space between values": "skip_page_size_padded mamba_page_size_padded",
            _MEMORY: (
                "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
                "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
                "kv_offloading_size kv_offloading_backend"
            ),
            "it sets the dtypes of states, which their form has": "mamba_ssm_cache_dtype",
            "it decides when states are kept, and each is kept whole": (
                "mamba_cache_mode enable_mamba_shared_prefix_checkpoint"
            ),
        },
        "AttentionConfig": {
            f"{_SUMS}; its order of bytes is in the packing": "backend backend_per_kind",
            _SUMS: (
                "minimax_m3_msa_decode_backend mla_prefill_backend use_trtllm_attention "
                "flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
                "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
                "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
                "flex_attn_q_block_size flex_attn_kv_block_size"
            ),
        },
        # Of drafters with KV. The KV of an accepted draft is computed again.
        "SpeculativeConfig": {
            _SUMS: "enforce_eager",
            _IN_WEIGHTS: "model revision",
            "KV of steps without the drafter is not stored": "max_model_len",
            "it sets the number of drafts": (
                "num_speculative_tokens num_speculative_tokens_per_batch_size"
            ),
            "it chooses the drafts": "draft_sample_method",
            "it decides which drafts are accepted": (
                "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length"
            ),
            "the target model is a part of its own": "target_model_config",
            "chunks name heads, so ranks may differ": (
                "target_parallel_config draft_parallel_config draft_tensor_parallel_size"
            ),
        },
        "KernelConfig": {
            _SUMS: (
                "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
                "enable_cutedsl_warmup enable_jit_warmup"
            )
        },
        "MambaConfig": {_SUMS: "backend ssu_algorithm"},
        "LoadConfig": {
            _PLACE: (
                "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
                "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location"
            )
        },
        "LoRAConfig": {
            _LIMIT: "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels",
            _SUMS: "fully_sharded_loras specialize_active_lora",
        },
        "MultiModalConfig": {
            _LIMIT: (
                "language_model_only limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings"
            ),
            _MEMORY: (
                "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
                "mm_ipc_gpu_memory_gb"
            ),
            "it names inputs for vLLM; keys name them by content": "mm_hasher_algorithm",
            _PLACE: "mm_tensor_ipc skip_mm_profiling",
            _SUMS: "mm_encoder_tp_mode mm_encoder_attn_backend",
            "scales are written there for a later start": "mm_encoder_fp8_scale_save_path",
            "it affects a file for a later start": "mm_encoder_fp8_scale_save_margin",
            _TEXT: "interleave_mm_strings",
        },
        "ECTransferConfig": {
            _PLACE: "engine_id ec_buffer_device ec_role ec_ip ec_port",
            _MEMORY: "ec_buffer_size",
        },
        # Hugging Face's configuration, whatever the model's class.
        "PreTrainedConfig": {
            "it is only a name": "_name_or_path name_or_path _commit_hash",
            "it names the writer of the file": "transformers_version",
            "it decides whether Transformers' own model keeps KV": "use_cache",
        },
        "KVCacheSpec": {
            _BLOCKS: "block_size",
            "it counts the heads of one rank; chunks name each head": (
                "num_kv_heads num_head_slots max_tp_shards"
            ),
            "set-ups with context parallelism are refused": "dcp_sharded",
            "it pads the space between values": "block_stride_alignment page_size_padded alignment",
        },
    }
)
"""Class -> field -> reason."""

CONDITIONALLY_IGNORED = by_class(
    {
        "ModelConfig": {
            "it is only a limit where the model's arithmetic does not depend on it": (
                "max_model_len original_max_model_len"
            )
        },
        "LoadConfig": {
            "formats that read the same files decide only how they are read": "load_format"
        },
    }
)

# Every use of ``max_model_len`` in these was reviewed: KV does not depend on it. Where they use it,
# it sizes buffers (DeepSeek's indexer) or bounds the expected image tokens. A test searches the
# installed vLLM's sources for other uses.
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

# Rotary embeddings whose angles depend only on position and configuration.
INDEPENDENT_ROPE_TYPES = frozenset(
    {"default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "proportional"}
)


def rope_types(config: Any) -> set[str]:
    """Types of the rotary embeddings that a configuration of JSON values names."""
    older = (each for each in values(config, "rope_scaling") if isinstance(each, dict))
    named = {str(each.get("rope_type", each.get("type"))) for each in older}
    return named | set(map(str, values(config, "rope_type")))


def values(config: Any, key: str) -> Iterator[Any]:
    """All values under ``key``, at any depth of JSON values."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == key:
                yield value
            else:
                yield from values(value, key)
    elif isinstance(config, list):
        for value in config:
            yield from values(value, key)


# Load formats that read the files of the model's folder unchanged, and ``dummy``, which reads none.
PLAIN_LOAD_FORMATS = words(
    """
    auto hf safetensors fastsafetensors instanttensor mistral pt runai_streamer dummy
    """
)

# Attention backends that write a block token after token, so block size does not matter.
IN_TOKEN_ORDER = words(
    """
    CPUAttentionBackend FlashAttentionBackend FlashAttentionDiffKVBackend FlashInferBackend
    FlexAttentionBackend TritonAttentionBackend FlashAttnMLABackend FlashInferMLABackend
    FlashMLABackend CutlassMLABackend TritonMLABackend
    """
)
"""Classes of vLLM. The CPU backend's own order is found by a trial."""


# Unlisted variables may change quantization, communication or the routing of experts, without a
# trace in vLLM's configuration. So every variable that vLLM reads and that is set is in every chunk
# key, unless listed. vLLM sets VLLM_DISABLE_SHARED_EXPERTS_STREAM on CPUs, and
# VLLM_SSM_CONV_STATE_LAYOUT on those that have AVX-512 BF16.
IGNORED_ENVIRONMENT: MappingProxyType[str, str] = MappingProxyType(
    by_field(
        {
            _PLACE: (
                "CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK "
                "MAX_JOBS MOONCAKE_ NVCC_THREADS VLLM_ASSETS_CACHE VLLM_BUILD_ VLLM_CACHE_ROOT "
                "VLLM_CONFIG_ROOT VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU "
                "VLLM_CPU_OMP_THREADS_BIND VLLM_CUDA VLLM_DEEPEP_ VLLM_DOCKER_BUILD_CONTEXT "
                "VLLM_DP_ VLLM_EC_ VLLM_ELASTIC_EP_ VLLM_ENABLE_V1_MULTIPROCESSING "
                "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
                "VLLM_GPU_NIC_PCIE_MAPPING VLLM_HOST_IP VLLM_IMAGE_TAG "
                "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_ VLLM_LOOPBACK_IP VLLM_MOONCAKE_ "
                "VLLM_MQ_ VLLM_MSGPACK_ VLLM_NCCL_ VLLM_NIC_SELECTION_VARS VLLM_NIXL_ "
                "VLLM_OBJECT_STORAGE_ VLLM_P2P_ VLLM_PORT VLLM_PP_LAYER_PARTITION "
                "VLLM_PROCESS_NAME_PREFIX VLLM_RAY_ VLLM_RINGBUFFER_ VLLM_RPC_ VLLM_RUST_ "
                "VLLM_SERVER_DEV_MODE VLLM_SKIP_ VLLM_USE_MODELSCOPE VLLM_USE_PRECOMPILED "
                "VLLM_USE_RAY_ VLLM_USE_RUST_ VLLM_USE_SPINLOOP_EXT VLLM_WEIGHT_OFFLOADING_ "
                "VLLM_WORKER_ VLLM_WSL2_"
            ),
            _OBSERVES: (
                "FORCE_COLOR NO_COLOR VERBOSE VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_ "
                "VLLM_DEBUG_ VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_LOG "
                "VLLM_NO_USAGE_STATS VLLM_NVTX_ VLLM_TRACE_FUNCTION VLLM_USAGE_"
            ),
            "keys of models with states have the order that it means": "VLLM_SSM_CONV_STATE_LAYOUT",
            _ACCESS: ("S3_ VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_ VLLM_API_KEY"),
            "inputs are identified by their content": (
                "VLLM_AUDIO_FETCH_TIMEOUT VLLM_HTTP_ VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_ "
                "VLLM_MEDIA_ VLLM_VIDEO_"
            ),
            _SUMS: (
                "VLLM_COMPILE_ VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_SHARED_EXPERTS_STREAM "
                "VLLM_ENABLE_INDUCTOR_ VLLM_FORCE_AOT_LOAD VLLM_MULTI_STREAM_ "
                "VLLM_SHARED_EXPERTS_STREAM_ VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH "
                "VLLM_USE_BYTECODE_HOOK VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_MEGA_AOT_ARTIFACT "
                "VLLM_USE_STANDALONE_COMPILE VLLM_USE_V2_MODEL_RUNNER"
            ),
        }
    )
)
"""Prefix of the name -> reason."""


# -- one form for all versions of vLLM: that of 0.32 -----------------------------------------------
#
# A field that a version adds, with no effect at its value, would separate its instances from other
# versions. These tables list such fields. A field in neither table separates versions until it has
# been reviewed.


ANY = object()
"""Any value: the field does not affect KV."""

# By class or pattern: fields that 0.32 lacks, and the values at which a newer version computes the
# same as one without them.
OTHERS_HAVE: Mapping[str, Mapping[str, object]] = {
    "AttentionConfig": {
        "indexer_tp_shard_min_rows": 65536,
        "minimax_m3_indexer_cp": False,
        "trtllm_ragged_backend": "trtllm-gen",
    },
    "CacheConfig": {
        "simple_cpu_offload_num_blocks": ANY,  # of another connector
        "user_specified_mamba_block_size": False,
    },
    "KernelConfig": {"monokernel": False},
    "MLAAttentionSpec": {"storage_block_size": None, "topk_buffer_width": None},
    "VllmConfig": {"watchdog_config": ANY},  # when to dump stacks
    "_ModelInfo": {"supports_kv_cache_grouping": False, "supports_lora": ANY},
    "*Spec": {"is_draft": False},
}
# Fields of 0.32 that another version lacks, with the value it behaves as.
OTHERS_LACK: Mapping[str, Mapping[str, object]] = {
    "_ModelInfo": {"supports_hc_sp": False, "supports_mamba_prefix_caching": False}
}


def same_form(form: Any) -> Any:
    """A canonical form as 0.32 would have it."""
    if isinstance(form, list):
        return [same_form(each) for each in form]
    if not isinstance(form, dict):
        return form
    inner = {name: same_form(each) for name, each in form.items()}
    kind = form.get("is")
    if not isinstance(kind, str) or not kind.startswith("vllm."):
        return inner
    name = kind.rpartition(".")[2]
    kept = {field: each for field, each in inner.items() if not is_new(name, field, each)}
    return {**OTHERS_LACK.get(name, {}), **kept}


def is_new(class_name: str, field: str, value: object) -> bool:
    """Whether 0.32 lacks the field, and behaves the same as with this value."""
    for pattern, fields in OTHERS_HAVE.items():
        if field in fields and fnmatchcase(class_name, pattern):
            neutral = fields[field]
            return neutral is ANY or (type(neutral) is type(value) and neutral == value)
    return False
