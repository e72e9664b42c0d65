"""Environment variables of vLLM's that are no part of a model's identity, each with its reason.

Some of the others quantize weights, activations or what ranks send each other, or route experts
another way, and nothing in vLLM's configuration tells. So every variable that vLLM reads and that
is set is in every chunk key, unless it is excused here.
"""

from __future__ import annotations

from types import MappingProxyType

from lmcache_connector.requests.excuses import by_field

# VLLM_DISABLE_SHARED_EXPERTS_STREAM: vLLM sets it on CPU.
EXCUSED_ENVIRONMENT: MappingProxyType[str, str] = MappingProxyType(
    by_field(
        {
            "says where, or how fast, not what": (
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
            "observes": (
                "FORCE_COLOR NO_COLOR VERBOSE VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_ "
                "VLLM_DEBUG_ VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_LOG "
                "VLLM_NO_USAGE_STATS VLLM_NVTX_ VLLM_TRACE_FUNCTION VLLM_USAGE_"
            ),
            "says who may ask for what, or with which credentials": (
                "S3_ VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_ VLLM_API_KEY"
            ),
            "inputs are named by what they hold": (
                "VLLM_AUDIO_FETCH_TIMEOUT VLLM_HTTP_ VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_ "
                "VLLM_MEDIA_ VLLM_VIDEO_"
            ),
            "chooses a kernel: the same arithmetic, its sums in another order": (
                "VLLM_COMPILE_ VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_SHARED_EXPERTS_STREAM "
                "VLLM_ENABLE_INDUCTOR_ VLLM_FORCE_AOT_LOAD VLLM_MULTI_STREAM_ "
                "VLLM_SHARED_EXPERTS_STREAM_ VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH "
                "VLLM_USE_BYTECODE_HOOK VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_MEGA_AOT_ARTIFACT "
                "VLLM_USE_STANDALONE_COMPILE VLLM_USE_V2_MODEL_RUNNER"
            ),
        }
    )
)
"""Beginning of the name -> reason."""
