"""Settings and the target's own `config.json` become a `DrafterSpec`: every `None` is decided here, once.

Reads plain JSON, so a setting that does not fit the target is refused before any model is loaded. What only the
loaded model tells (embedding scale, output multiplier, soft-cap) keeps its neutral default here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.config.load import ConfigError
from draftmill.config.schema import Config, DrafterConfig, LossConfig
from draftmill.config.spec import AttentionType, DrafterSpec

DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # block size -> the paper's decay length in slots

_SCALING_NEEDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_SCALING_MAY_HAVE: dict[str, set[str]] = {
    "yarn": {
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
# In a target's settings, but not for its drafter: the base stands apart, and a drafter rotates whole heads of text.
_NOT_SCALING = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}

_HF_LAYER_TYPE: dict[str, AttentionType] = {"full": "full_attention", "sliding": "sliding_attention"}


def resolve_spec(config: Config, mask_token_id: int) -> DrafterSpec:
    """The drafter to train. `mask_token_id` is the dataset's, which `drafter.mask_token_id` overrules.

    Raises ConfigError naming the setting, the target's value and the remedy.
    """
    wanted = config.drafter
    target = TargetShape.read(config.target.path)
    heads = wanted.num_attention_heads or target.number("num_attention_heads", "drafter.num_attention_heads")
    key_value_heads = wanted.num_key_value_heads or target.key_value_heads()
    if heads % key_value_heads:
        raise ConfigError(
            f"drafter.num_attention_heads {heads} is no multiple of drafter.num_key_value_heads {key_value_heads} "
            "(what is not set is the target's): set both"
        )
    rope_theta, rope_scaling = _rope(wanted, target)
    return DrafterSpec(
        hidden_size=target.number("hidden_size"),
        intermediate_size=wanted.intermediate_size
        or target.number("intermediate_size", "drafter.intermediate_size (the width of the drafter's MLP)"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=wanted.head_dim or target.head_dim(),
        vocab_size=target.number("vocab_size"),
        rms_norm_eps=float(target.values.get("rms_norm_eps") or 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=target.number("max_position_embeddings"),
        layer_types=tuple(_HF_LAYER_TYPE[kind] for kind in wanted.layer_types or ("full",) * wanted.layers),
        sliding_window=wanted.sliding_window,
        causal_full=wanted.causal.full,
        causal_sliding=wanted.causal.sliding,
        block_size=wanted.block_size,
        mask_token_id=_mask_token(wanted, mask_token_id, target.number("vocab_size")),
        target_layer_ids=feature_layers(config.target.feature_layers, target.number("num_hidden_layers")),
        num_target_layers=target.number("num_hidden_layers"),
    )


def check_target(config: Config) -> None:
    """Raises ConfigError unless the settings fit the target; the mask token, which the data decide, aside."""
    resolve_spec(config, mask_token_id=0)
    decay_gamma(config.train.loss, config.drafter.block_size)


def feature_layers(wanted: tuple[int, ...] | int, num_layers: int) -> tuple[int, ...]:
    """Layer ids to tap, in the order in which their features are concatenated."""
    if isinstance(wanted, int):
        return default_feature_layers(num_layers, wanted)
    listed = list(wanted)
    if not wanted or sorted(set(wanted)) != listed:
        raise ConfigError(f"target.feature_layers = {listed}: name at least one layer, in rising order, each once")
    if outside := [layer for layer in wanted if not 0 <= layer < num_layers]:
        raise ConfigError(
            f"target.feature_layers = {listed}: the target has no layer {', '.join(map(str, outside))}; its "
            f"{num_layers} layers have ids 0 to {num_layers - 1} (id l is the output of 0-based layer l)"
        )
    return wanted


def default_feature_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the third-last, rounded half to even."""
    if count == 1:
        return (num_layers // 2,)
    if count > max(num_layers - 3, 1):
        raise ConfigError(
            f"target.feature_layers = {count}: a target with {num_layers} layers has room for "
            f"{max(num_layers - 3, 1)} spread evenly; ask for fewer or list the ids, such as [0, {num_layers - 1}]"
        )
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def decay_gamma(loss: LossConfig, block_size: int) -> float:
    """Decay length in slots: `train.loss.gamma`, or the known one for this block size; infinite without decay."""
    if loss.kind != "decay":
        return math.inf
    if loss.gamma is not None:
        return loss.gamma
    if block_size not in DECAY_GAMMA:
        known = ", ".join(f"{gamma:g} for {size}" for size, gamma in DECAY_GAMMA.items())
        raise ConfigError(
            f"train.loss.gamma has no default for drafter.block_size {block_size} (known: {known}): "
            "set train.loss.gamma"
        )
    return DECAY_GAMMA[block_size]


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The language model's part of a target's config.json."""

    path: Path  # of the config.json
    values: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TargetShape:
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"target.path = {folder}: {path} cannot be read ({error.strerror}); give a Hugging Face model folder"
            ) from None
        except ValueError as error:
            raise ConfigError(f"target.path = {folder}: {path} is not valid JSON: {error}") from None
        inner = values.get("text_config") if isinstance(values, dict) else None
        values = inner if isinstance(inner, dict) else values  # a vision or audio wrapper
        if not isinstance(values, dict):
            raise ConfigError(f"target.path = {folder}: {path} holds no object")
        return cls(path, values)

    def number(self, key: str, setting: str | None = None) -> int:
        """A positive whole number. `setting` can be given in its stead, where there is one."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = f"no {key}" if value is None else f"{key} = {value!r}"
        remedy = f"set {setting}" if setting else "write the folder anew with save_pretrained of a current transformers"
        raise ConfigError(f"{self.path} has {found}: {remedy}")

    def key_value_heads(self) -> int:
        if self.values.get("num_key_value_heads") is None:  # Hugging Face's meaning of a missing value
            return self.number("num_attention_heads", "drafter.num_key_value_heads")
        return self.number("num_key_value_heads", "drafter.num_key_value_heads")

    def head_dim(self) -> int:
        remedy = "drafter.head_dim"
        if self.values.get("head_dim") is not None:
            width = self.number("head_dim", remedy)
        else:
            hidden, heads = self.number("hidden_size"), self.number("num_attention_heads", remedy)
            if hidden % heads:
                raise ConfigError(f"{self.path}: hidden_size {hidden} does not divide by {heads} heads: set {remedy}")
            width = hidden // heads
        if width % 2:
            raise ConfigError(f"{self.path}: head_dim {width} is odd, which RoPE cannot rotate: set {remedy}")
        return width

    def rope(self) -> dict[str, Any]:
        """`{"rope_theta": ..., "rope_type": ..., ...}` from either spelling; {} for what the file does not say."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{self.path}: RoPE settings are {rope!r}, expected an object")
        theta = self.values.get("rope_theta")
        old_type = {"rope_type": rope["type"]} if "type" in rope else {}
        rest = {key: value for key, value in rope.items() if key != "type"}
        return ({} if theta is None else {"rope_theta": theta}) | old_type | rest


def _rope(wanted: DrafterConfig, target: TargetShape) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling of the drafter; never inherited from what could not be understood."""
    theirs = target.rope()
    per_layer_type = [key for key, value in theirs.items() if isinstance(value, dict)]
    if per_layer_type and (wanted.rope_theta is None or wanted.rope_scaling is None):
        raise ConfigError(
            f"{target.path} has RoPE settings for each layer type ({', '.join(per_layer_type)}), the drafter has one: "
            "set drafter.rope_theta and drafter.rope_scaling ({rope_type: default} for none)"
        )
    theta = wanted.rope_theta or theirs.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"{target.path} has no rope_theta: set drafter.rope_theta")
    if wanted.rope_scaling is not None:
        return float(theta), _scaling(wanted.rope_scaling, "drafter.rope_scaling", "")
    plain = {key: value for key, value in theirs.items() if key not in _NOT_SCALING}
    remedy = "; set drafter.rope_scaling, {rope_type: default} for none"
    return float(theta), _scaling(plain, f"{target.path}", remedy)


def _scaling(rope: dict[str, Any], source: str, remedy: str) -> dict[str, Any] | None:
    """The scaling with its `rope_type`; None for plain RoPE."""
    kind = rope.get("rope_type", None if rope else "default")
    if not isinstance(kind, str) or kind not in _SCALING_NEEDS:
        raise ConfigError(f"{source}: rope_type is {kind!r}, known are {', '.join(_SCALING_NEEDS)}{remedy}")
    given = set(rope) - {"rope_type"}
    if missing := _SCALING_NEEDS[kind] - given:
        raise ConfigError(f"{source}: rope_type {kind} needs {', '.join(sorted(missing))}{remedy}")
    if unknown := given - _SCALING_NEEDS[kind] - _SCALING_MAY_HAVE.get(kind, set()):
        raise ConfigError(f"{source}: rope_type {kind} knows no {', '.join(sorted(unknown))}{remedy}")
    for name in sorted(given):
        value = rope[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (value is None or isinstance(value, bool) or (number and math.isfinite(value) and value > 0)):
            raise ConfigError(f"{source}: {name} is {value!r}, expected a positive number{remedy}")
    return None if kind == "default" else dict(rope)


def _mask_token(wanted: DrafterConfig, from_dataset: int, vocab_size: int) -> int:
    token = from_dataset if wanted.mask_token_id is None else wanted.mask_token_id
    if not 0 <= token < vocab_size:
        source = "the dataset's mask token" if wanted.mask_token_id is None else "drafter.mask_token_id"
        raise ConfigError(
            f"{source} is {token}, the target's embedding has rows 0 to {vocab_size - 1}: set "
            "drafter.mask_token_id to a reserved token that never occurs in the data"
        )
    return token
