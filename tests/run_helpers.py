"""A tiny target on disk, a prepared dataset of its tokenizer, and a config that trains on it in seconds."""

import json
from pathlib import Path

import numpy as np

import tiny_models
from draftmill.config.load import load_config
from draftmill.text.prepare import PrepareOptions, prepare

WORDS = ["ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow", "yew"]


def write_conversations(path: Path, count: int, seed: int = 0, turns: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(turns):
                words = rng.choice(WORDS, int(rng.integers(1, 5)))
                messages += [{"role": "user", "content": " ".join(words[:1])}]
                messages += [{"role": "assistant", "content": " ".join(words)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def prepared(folder: Path, conversations: int = 24, seed: int = 0, turns: int = 1) -> tuple[Path, Path]:
    """(target folder, dataset folder), made below `folder` at the first call."""
    target, data = folder / "target", folder / f"data-{conversations}-{seed}-{turns}"
    if not target.exists():
        tiny_models.save_tiny(target, tiny_models.tiny_llama())
    if not data.exists():
        tokenizer = tiny_models.tiny_tokenizer()
        source = write_conversations(folder / f"{data.name}.jsonl", conversations, seed, turns)
        options = PrepareOptions(
            stop_ids=frozenset({tiny_models.EOS}), vocab_size=tiny_models.VOCAB, mask_token_id=tiny_models.UNUSED
        )
        prepare([source], tokenizer, data, options)
    return target, data


def tiny_config(folder: Path, run: str, *overrides: str, **dataset):
    target, data = prepared(folder, **dataset)
    settings = {
        "target.path": target,
        "target.dtype": "float32",
        "target.device": "cpu",
        "target.feature_layers": "[1, 3]",
        "drafter.layers": 2,
        "drafter.block_size": 4,
        "data.path": data,
        "data.pack_tokens": 128,
        "data.anchor_rate": 0.25,
        "data.pack_window": 8,
        "train.loss.gamma": 4.0,
        "train.steps": 6,
        "train.lr": 1e-3,
        "train.dtype": "float32",
        "run.dir": folder / run,
        "run.device": "cpu",
        "pipeline.mode": "inprocess",
        "run.threads": 1,
        "run.log_every": 2,
        "run.checkpoint_every": 3,
        "run.keep_checkpoints": 9,
    }
    return load_config(None, [*(f"{name}={value}" for name, value in settings.items()), *overrides])
