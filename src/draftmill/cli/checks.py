"""What `draftmill doctor` looks at. Each check answers with OK, a warning or a failure, and the remedy."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

GIB = 2**30
NEEDED = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pydantic", "tokenizers")
OPTIONAL = {
    "gguf": "to read GGUF targets: pip install 'draftmill[gguf]'",
    "accelerate": "to read GGUF targets: pip install 'draftmill[gguf]'",
    "dflash": "for draftmill export --verify: pip install --no-deps dflash==0.1.0",
}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "warning", "failure"]
    detail: str
    remedy: str = ""


def machine_checks() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield from _packages()
    for check in (_cuda, _threads, _memory, _shared_memory, _disk):
        yield from _guarded(check)


def target_checks(folder: Path) -> Iterator[Check]:
    """From cheap to dear; the first failure ends them, since what follows would only repeat it."""
    for check in (_target_config, _target_tokenizer, _target_model):
        for result in _guarded(partial(check, folder), check.__name__.lstrip("_").replace("_", " ")):
            yield result
            if result.status == "failure":
                return


def _guarded(check: Callable[[], Iterator[Check]], name: str = "") -> Iterator[Check]:
    try:
        yield from check()
    except Exception as error:  # a doctor reports what it meets, of whatever kind
        yield Check(name or check.__name__.lstrip("_").replace("_", " "), "failure", f"{type(error).__name__}: {error}")


def _packages() -> Iterator[Check]:
    for name in NEEDED:
        try:
            __import__(name)
            yield Check(name, "ok", version(name))
        except (ImportError, PackageNotFoundError, OSError, RuntimeError) as error:
            yield Check(name, "failure", f"cannot be imported: {error}", "reinstall with: pip install draftmill")
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name):
            yield Check(name, "ok", version(name))
        else:
            yield Check(name, "warning", "not installed", f"only needed {purpose}")


def _cuda() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
            remedy = "install a CUDA build of torch" if torch.version.cuda is None else "check the NVIDIA driver"
            yield Check("cuda", "warning", f"torch {torch.__version__} sees no GPU, but the machine has one", remedy)
        else:
            yield Check("cuda", "ok", "no GPU: everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        busy = free < total / 2
        yield Check(
            f"cuda:{index}",
            "warning" if busy else "ok",
            detail,
            "another process holds half of it: see nvidia-smi" if busy else "",
        )
        if not torch.cuda.is_bf16_supported():
            yield Check(f"cuda:{index}", "warning", "no bfloat16", "set target.dtype and train.dtype to float32")


def _threads() -> Iterator[Check]:
    import torch

    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    detail = f"{threads} torch threads on {cores} cores"
    if threads > cores:
        yield Check("threads", "warning", detail, f"set run.threads={cores}")
    else:
        yield Check("threads", "ok", detail)


def _memory() -> Iterator[Check]:
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(values["MemAvailable"].split()[0]) * 1024
    low = free < 4 * GIB
    yield Check(
        "memory",
        "warning" if low else "ok",
        f"{free / GIB:.1f} GiB available",
        "4 GiB and more are needed beside the target's weights: close other programs" if low else "",
    )


def _shared_memory() -> Iterator[Check]:
    yield _space("shared memory", Path("/dev/shm"), 1, "enlarge it (in a container: --shm-size=8g or --ipc=host)")


def _disk() -> Iterator[Check]:
    yield _space("disk", Path.cwd(), 10, "checkpoints take 12 bytes a parameter: free some, or set run.dir elsewhere")


def _space(name: str, folder: Path, least_gib: int, remedy: str) -> Check:
    free = shutil.disk_usage(folder).free
    low = free < least_gib * GIB
    return Check(name, "warning" if low else "ok", f"{free / GIB:.1f} GiB free in {folder}", remedy if low else "")


def _target_config(folder: Path) -> Iterator[Check]:
    from draftmill.config.load import load_config
    from draftmill.config.resolve import resolve_spec

    needed = (f"target.path={folder}", "data.path=unused", "run.dir=unused", "train.steps=1")
    try:
        spec = resolve_spec(load_config(None, needed), mask_token_id=0)
    except ValueError:  # perhaps only the default five layers do not fit
        spec = resolve_spec(load_config(None, [*needed, "target.feature_layers=1"]), mask_token_id=0)
    yield Check(
        "target config",
        "ok",
        f"{spec.num_target_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}, heads "
        f"{spec.num_attention_heads}/{spec.num_key_value_heads} of {spec.head_dim}, rope theta {spec.rope_theta:g}, "
        f"scaling {(spec.rope_scaling or {}).get('rope_type', 'none')}",
    )


def _target_tokenizer(folder: Path) -> Iterator[Check]:
    from transformers import AutoTokenizer

    from draftmill.text.mask_token import choose_mask_token

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.chat_template:
        yield Check("chat template", "ok", f"{len(tokenizer.chat_template)} characters")
    else:
        remedy = "put the model's chat_template.jinja into its folder"
        yield Check("chat template", "failure", "the tokenizer has none: conversations cannot be rendered", remedy)
    try:
        mask = choose_mask_token(tokenizer)
        yield Check("mask token", "ok", f"{mask.id} {mask.text!r}, {mask.chosen_by}")
    except ValueError as error:
        yield Check("mask token", "warning", str(error), "give draftmill prepare --mask-token-id")


def _target_model(folder: Path) -> Iterator[Check]:
    """Loading proves embedding, head and quirks, and compares packed documents with the same run alone."""
    import torch

    from draftmill.config.resolve import TargetShape
    from draftmill.target.model import Target

    logging.getLogger("draftmill").setLevel(logging.ERROR)  # what it would warn of is told below
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    layers = TargetShape.read(folder).number("num_hidden_layers")
    target = Target.load(folder, dtype, "auto", (layers // 2,))
    yield Check("target head", "ok", f"embedding and logits are explained ({dtype} on {target.device})")
    if target.packs:
        yield Check("packed equals alone", "ok", "documents can share a forward pass")
    else:
        yield Check("packed equals alone", "warning", "no: documents run one by one, slower and right")
