"""Reads a Hugging Face folder into a frozen model: every tensor from the file, none initialised."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

log = logging.getLogger(__name__)

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"target.device is {name}, but torch sees no GPU here: set target.device=auto or cpu")
    return torch.device(name)


def load_frozen(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer): in eval mode, without gradients. Raises ValueError if the files lack a tensor."""
    if not (path / "config.json").is_file():
        raise ValueError(
            f"target.path {path} holds no config.json: give a Hugging Face folder with config.json, safetensors and "
            "tokenizer (a GGUF file is converted into one first)"
        )
    try:
        model, info = model_class(path).from_pretrained(
            str(path), dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"target.path {path}: its weights cannot be read: {_first_line(error)}") from None
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"target.path {path}: its files lack {len(missing)} tensors of {type(model).__name__} "
            f"({', '.join(missing[:4])}{', ..' if len(missing) > 4 else ''}); they would be random. "
            "Use a complete checkpoint whose tensor names fit its config.json"
        )
    if unused := sorted(info["unexpected_keys"]):
        log.warning("target %s: %d tensors of the files are not used: %s", path, len(unused), ", ".join(unused[:4]))
    _refuse_length_dependent_rope(path, model.config.get_text_config(decoder=True))
    model.to(device).eval().requires_grad_(False)
    return model, load_tokenizer(path)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _refuse_length_dependent_rope(path: Path, config: Any) -> None:
    """Such frequencies change with the longest position of a call: a document's features would depend on what shares
    its pack, and a row's logits on what shares its batch.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one per layer type
    for setting in settings:
        if (kind := setting.get("rope_type", setting.get("type"))) in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"target.path {path}: its rope_type {kind} depends on the longest text in a call, so packed features "
                "would be wrong; use a target with another RoPE, or set the model's config to its fixed form"
            )


def load_tokenizer(path: Path) -> Any:
    """Raises ValueError where the folder holds none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"target.path {path}: its tokenizer cannot be read: {_first_line(error)}") from None


def model_class(path: Path) -> Any:
    """The causal class, or the one of a vision wrapper whose text model is used alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    for candidate in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in candidate._model_mapping:
            return candidate
    raise ValueError(f"target.path {path}: {config.model_type} is not a causal language model: use one")


def stop_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: of generation_config.json, else config.json, and the tokenizer's end token."""
    from transformers import AutoConfig, GenerationConfig

    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(str(path), local_files_only=True))
    return _end_tokens(generation, tokenizer)


def stop_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The same for a model in memory."""
    return _end_tokens(model.generation_config, tokenizer)


def _end_tokens(generation: Any, tokenizer: Any) -> frozenset[int]:
    ends = [generation.eos_token_id, tokenizer.eos_token_id]
    found = {token for end in ends if end is not None for token in (end if isinstance(end, list) else [end])}
    if not found:
        raise ValueError("the target names no end token: set eos_token_id in its generation_config.json")
    return frozenset(found)


def config_hash(path: Path) -> str:
    """sha256 of the target's config.json: datasets and runs name the target they are for by it."""
    return hashlib.sha256((path / "config.json").read_bytes()).hexdigest()


def identity(path: Path, dtype: str) -> dict[str, Any]:
    """What the target is, for manifests and exports: a drafter fits the very weights it was trained on.

    From its files alone; `dtype` is the compute dtype's name.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    source = path / "draftmill_source.json"
    return {
        "name": path.resolve().name,
        "model_type": config.get("model_type"),
        "dtype": dtype,
        "quantization": config.get("quantization_config"),
        "weights": {file.name: content_digest(file) for file in sorted(path.glob("*.safetensors"))},
        "converted_from": json.loads(source.read_text(encoding="utf-8")) if source.is_file() else None,
    }


def content_digest(path: Path) -> str:
    """sha256 of the size and of 256 pieces of 256 KiB spread evenly over the file, ends included.

    All of a file up to 64 MiB. Of a larger one what is sampled: enough to tell other weights, cheap at any size.
    """
    size, piece, pieces = path.stat().st_size, 2**18, 256
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= piece * pieces:
            digest.update(file.read())
        else:
            for index in range(pieces):
                file.seek(index * (size - piece) // (pieces - 1))
                digest.update(file.read(piece))
    return digest.hexdigest()
