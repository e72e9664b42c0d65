"""What every engine of the tests imports, for the process they are forked from.

Nothing that starts threads or touches a device may come in here, and not numba, which vLLM's CPU
worker must find unloaded. That worker replaces parts of torch.cuda: on a GPU it stays away.
"""

from importlib import import_module

import transformers.models.llama.configuration_llama  # noqa: F401
import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor  # noqa: F401
from vllm.platforms import current_platform

import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
