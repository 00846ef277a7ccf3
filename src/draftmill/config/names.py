"""The schema seen as dotted names (`train.loss.gamma`): what each one is, and which is nearest to a misspelt one.

Derived from schema.py alone, so a new setting needs no entry here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftmill.config.schema import Config

# What the same thing is called in other trainers: only ever used to name the right setting.
OTHER_NAMES = {
    "batch_size": "train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
    "learning_rate": "train.lr",
    "loss_decay_gamma": "train.loss.gamma",
    "max_grad_norm": "train.clip",
    "max_length": "data.pack_tokens",
    "max_seq_length": "data.pack_tokens",
    "max_steps": "train.steps",
    "model_name_or_path": "target.path",
    "num_anchors": "data.anchor_rate",
    "num_draft_layers": "drafter.layers",
    "num_epochs": "train.epochs",
    "num_hidden_layers": "drafter.layers",
    "num_train_epochs": "train.epochs",
    "output_dir": "run.dir",
    "target_layer_ids": "target.feature_layers",
    "target_model_path": "target.path",
    "train_data_path": "data.path",
    "warmup_steps": "train.warmup_ratio",
}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # dotted
    doc: str
    required: bool
    default: Any
    is_path: bool
    choices: tuple[Any, ...]  # of a Literal, else empty
    free_on_resume: bool


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted name, in the schema's order."""
    return {setting.name: setting for setting in _walk(Config, "")}


@cache
def sections() -> dict[str, str]:
    """Every section's dotted name (`train`, `train.loss`), with its documentation."""
    return dict(_walk_sections(Config, ""))


def value_of(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def nearest(name: str) -> str | None:
    """The valid setting most like `name`, None where nothing is alike.

    Compares every tail of both dotted names, so a right key under the wrong section, a key without its
    section, and a key spelt flat (`loss_decay_gama`) all find their setting.
    """
    best, best_score = None, 0.6
    parts = name.split(".")
    right = max(length for length in range(len(parts)) if not length or ".".join(parts[:length]) in sections())
    ours = _tails(".".join(parts[right:]))  # a right section would make all of its settings look alike
    candidates = {candidate: candidate for candidate in settings()} | OTHER_NAMES
    for candidate, meant in candidates.items():
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        tails = max(difflib.SequenceMatcher(None, a, b).ratio() for a in ours for b in _tails(candidate))
        score = tails + whole / 100  # the whole names decide between equal tails
        if score > best_score:
            best, best_score = meant, score
    return best


def _tails(name: str) -> list[str]:
    """`train.loss.gamma` -> train_loss_gamma, loss_gamma, gamma."""
    parts = name.lower().replace("-", "_").split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _words(doc: str | None) -> str:
    """The schema's documentation on one line, in the words of a YAML file."""
    return re.sub(r"\bNone\b", "null", " ".join((doc or "").split()))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for key, field in model.model_fields.items():
        name = f"{prefix}{key}"
        if section := _section_of(field):
            yield from _walk(section, f"{name}.")
            continue
        extra = field.json_schema_extra
        yield Setting(
            name=name,
            doc=_words(field.description),
            required=field.is_required(),
            default=None if field.is_required() else field.default,
            is_path=field.annotation is Path,
            choices=get_args(field.annotation) if get_origin(field.annotation) is Literal else (),
            free_on_resume=isinstance(extra, dict) and bool(extra.get("free_on_resume")),
        )


def _walk_sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for key, field in model.model_fields.items():
        if section := _section_of(field):
            yield f"{prefix}{key}", _words(section.__doc__)
            yield from _walk_sections(section, f"{prefix}{key}.")
