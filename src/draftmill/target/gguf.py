"""A GGUF file as a plain Hugging Face folder, converted once into a cache.

The target *is* what the folder stores: dequantised weights, rounded to bfloat16 (half the bytes and load time of
float32, and what the demo computes in). Two runs that read one folder have one target, whatever their dtype.
A folder with its final name is complete: it is written aside and renamed. Its name carries the file's hash and
this converter's version, so that a changed file or converter never meets an old folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

CONVERTER_VERSION = 2
TRUSTED_SPLITTING = ("default", "gpt-2", "qwen2")  # `tokenizer.ggml.pre` that transformers restores itself
SOURCE_FILE = "draftmill_source.json"  # in the folder: which file it came from


def find_packaged_gguf(package: str) -> Path:
    """The one GGUF file inside an installed Python package, found without importing the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not installed: pip install {package.replace('_', '-')}")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {package} holds {len(files)} GGUF files, expected one: pass the file's path instead")
    return files[0]


def convert_gguf(gguf_path: str | Path, cache_dir: str | Path) -> Path:
    """Folder with config.json, bf16 safetensors, tokenizer and generation_config; made only if it is not there yet."""
    source, cache = Path(gguf_path), Path(cache_dir)
    if not source.is_file():
        raise ValueError(f"GGUF file {source} does not exist")
    digest = _sha256(source)
    folder = cache / f"{source.stem}-{digest[:12]}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        log.info("using the converted target %s", folder)
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache))
    try:
        _convert(source, aside)
        _write_json(aside / SOURCE_FILE, {"file": source.name, "sha256": digest, "converter": CONVERTER_VERSION})
        aside.chmod(0o755)  # mkdtemp makes it private
        _publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("converted target is in %s", folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401  (transformers needs both to read a GGUF file)
        import gguf
    except ImportError as error:
        raise ValueError(f"reading {source.name} needs {error.name}: pip install accelerate gguf") from None
    from transformers import AutoModelForCausalLM

    log.info("reading the metadata of %s", source)
    metadata = gguf.GGUFReader(str(source)).fields
    log.info("dequantising %s (%.0f MB)", source.name, source.stat().st_size / 1e6)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    log.info("writing bfloat16 weights")
    model = _plain(loaded)
    special = _special_ids(metadata)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, special.get(name))
        setattr(model.generation_config, name, special.get(name))
    model.save_pretrained(folder)
    log.info("writing the tokenizer")
    _save_tokenizer(source, folder, metadata, special)


def _plain(loaded: Any) -> Any:
    """The same weights without the mark of quantisation, which would forbid saving and mislead later loads."""
    from transformers import AutoConfig

    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        values.pop(key, None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = "bfloat16"
    config.architectures = [type(loaded).__name__]
    with torch.device("meta"):  # no weights are drawn only to be replaced
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    return plain.to(torch.bfloat16)


def _special_ids(metadata: Any) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "unknown": "unk_token_id"}
    fields = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    return {name: int(field.contents()) for name, field in fields.items() if field is not None}


def _save_tokenizer(source: Path, folder: Path, metadata: Any, special: dict[str, int]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    # transformers may mistake the start for the end token here: the file's own ids are right
    for name, token_id in special.items():
        setattr(tokenizer, name.removesuffix("_id"), tokenizer.convert_ids_to_tokens(token_id))
    template = metadata.get("tokenizer.chat_template")
    if tokenizer.chat_template is None and template is not None:
        tokenizer.chat_template = template.contents()
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was generated
    _set_splitting(tokenizer, metadata, source)
    tokenizer.save_pretrained(folder)


def _set_splitting(tokenizer: Any, metadata: Any, source: Path) -> None:
    """Restores how text is split before merging, where transformers would take GPT-2's way for every file.

    With that way SmolLM's "  7" would become other tokens than those the model was trained on.
    """
    from tokenizers import pre_tokenizers

    kind = metadata.get("tokenizer.ggml.pre")
    name = "default" if kind is None else kind.contents()
    if name == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name not in TRUSTED_SPLITTING:
        log.warning(
            "%s splits text the %r way, which transformers may read as another: compare token ids with the original "
            "tokenizer, or use the model's own Hugging Face folder",
            source.name,
            name,
        )


def _publish(aside: Path, folder: Path) -> None:
    for file in sorted(aside.iterdir()):
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    try:
        aside.rename(folder)
    except OSError:  # another process was first: its folder has the same content
        if not folder.is_dir():
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
