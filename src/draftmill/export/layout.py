"""config.json of the z-lab layout (`DFlashDraftModel`): a `DrafterSpec` to JSON and back. No files here.

Everything that decides what a drafter computes is written explicitly, in each spelling that some reader
looks for, and never left to a default, with one exception that all readers share: a drafter that mixes causal
sliding layers with bidirectional full layers is said by leaving both causality fields out.

Layer ids are the layout's own: id l is the output of 0-based target layer l. Reading is strict: a field that
could change the computation and is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftmill.config.spec import DrafterSpec

ARCHITECTURE = "DFlashDraftModel"
# what readers do where no causality field is written: by layer type
DEFAULT_CAUSAL = {"full_attention": False, "sliding_attention": True}
SCALED_FROM_ORIGINAL = ("yarn", "llama3")  # RoPE types that need the length before scaling

# present in published configs without any bearing on the computation
IGNORED = {
    "architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers",
    "_name_or_path", "name_or_path", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
}  # fmt: skip
# must have exactly this value, where present
FIXED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
NUMBERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rms_norm_eps", "max_position_embeddings", "num_target_layers",
)  # fmt: skip
SHAPE = {"num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window", "is_causal", "block_size"}
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
QUIRKS = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "output_multiplier",
    "final_logit_softcapping": "logit_softcap",
}
DFLASH = {"mask_token_id", "target_layer_ids", "block_size", "causal", *QUIRKS}


def to_config(spec: DrafterSpec, *, dtype: str, token_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`token_ids`: the target's bos, eos and pad ids (None or absent are written as null).

    Raises ValueError where no reader could be told what was trained.
    """
    causal = uniform_causality(spec)
    _check_ids(spec)
    sliding = "sliding_attention" in spec.layer_types
    if sliding and (spec.sliding_window is None or spec.sliding_window < spec.block_size):
        raise ValueError(
            f"sliding_window {spec.sliding_window} with block_size {spec.block_size}: "
            "engines disagree on windows shorter than a block; train with a window of at least one block"
        )
    dflash: dict[str, Any] = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "block_size": spec.block_size,
    }
    if causal is not None:
        dflash["causal"] = causal
    for key, name in QUIRKS.items():
        if getattr(spec, name) not in (1.0, None):
            dflash[key] = getattr(spec, name)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "torch_dtype": dtype,
        "block_size": spec.block_size,
        "dflash_config": dflash,
        **{name: getattr(spec, name) for name in NUMBERS},
        "num_hidden_layers": spec.num_layers,
        "layer_types": list(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window if sliding else None,
        "max_window_layers": spec.num_layers,
        **_rope_fields(spec),
        **FIXED,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **{f"{name}_token_id": (token_ids or {}).get(name) for name in ("bos", "eos", "pad")},
    }
    if causal is not None:
        config["is_causal"] = causal
    return config


def uniform_causality(spec: DrafterSpec) -> bool | None:
    """The one flag for all layers; None where the readers' default by layer type says it. Refuses other mixtures."""
    by_type = {kind: spec.causal(layer) for layer, kind in enumerate(spec.layer_types)}
    if len(set(by_type.values())) == 1:
        return next(iter(by_type.values()))
    if by_type == DEFAULT_CAUSAL:
        return None
    raise ValueError(
        "causal full layers with bidirectional sliding layers can be said by no export layout: "
        "set drafter.causal.full and drafter.causal.sliding alike, or full=false with sliding=true, and train again"
    )


def from_config(config: Mapping[str, Any]) -> DrafterSpec:
    """Strict inverse of `to_config`; also reads published z-lab configs. Raises ValueError with the field."""
    _check_layout(config)
    dflash = config["dflash_config"]
    layers = _integer(config, "num_hidden_layers")
    types = config.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers or set(types) - set(DEFAULT_CAUSAL):
        raise ValueError(f"layer_types {types} must name {layers} layers of {sorted(DEFAULT_CAUSAL)}")
    causal = _same("is_causal", config.get("is_causal"), "dflash_config.causal", dflash.get("causal"))
    theta, scaling = _read_rope(config)
    numbers: dict[str, Any] = {name: config.get(name) for name in NUMBERS}
    if absent := [name for name, value in numbers.items() if value is None]:
        raise ValueError(f"config.json lacks {', '.join(absent)}: nothing is guessed")
    quirks: dict[str, Any] = {name: float(dflash[key]) for key, name in QUIRKS.items() if dflash.get(key) is not None}
    spec = DrafterSpec(
        **numbers,
        rope_theta=theta,
        rope_scaling=scaling,
        layer_types=tuple(types),
        sliding_window=_read_window(config, types),
        # a layer type that does not occur keeps the default: it decides nothing
        causal_full=causal if causal is not None and "full_attention" in types else False,
        causal_sliding=causal if causal is not None and "sliding_attention" in types else True,
        block_size=_same(
            "block_size", config.get("block_size"), "dflash_config.block_size", dflash.get("block_size"), True
        ),
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        **quirks,
    )
    _check_ids(spec)
    return spec


def _check_ids(spec: DrafterSpec) -> None:
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        raise ValueError(f"mask_token_id {spec.mask_token_id} lies outside the vocabulary of {spec.vocab_size} tokens")
    ids = spec.target_layer_ids
    if not ids or not all(0 <= layer < spec.num_target_layers for layer in ids):
        raise ValueError(f"target_layer_ids {list(ids)} must lie in 0..{spec.num_target_layers - 1}")


def _check_layout(config: Mapping[str, Any]) -> None:
    if "speculators_model_type" in config:
        raise ValueError("this is a speculators checkpoint: only the z-lab layout is read here")
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures is {config.get('architectures')}, this layout has ['{ARCHITECTURE}']")
    if config.get("model_type") != "qwen3":
        raise ValueError(f"model_type is {config.get('model_type')!r}, this layout has 'qwen3'")
    dflash = config.get("dflash_config")
    if not isinstance(dflash, dict) or not {"mask_token_id", "target_layer_ids"} <= set(dflash):
        raise ValueError("dflash_config must hold mask_token_id and target_layer_ids")
    known = IGNORED | set(FIXED) | set(NUMBERS) | SHAPE | ROPE | {"dflash_config"}
    unknown = sorted(set(config) - known) + [f"dflash_config.{key}" for key in sorted(set(dflash) - DFLASH)]
    if unknown:
        raise ValueError(f"config.json has {', '.join(unknown)}, which may change what the drafter computes: not read")
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]!r}, only {value!r} is supported")


def _rope_fields(spec: DrafterSpec) -> dict[str, Any]:
    """Both spellings: transformers 5 reads `rope_parameters`, older readers the other two."""
    scaling = dict(spec.rope_scaling or {"rope_type": "default"})
    if scaling["rope_type"] == "default":
        scaling = {}
    elif scaling["rope_type"] in SCALED_FROM_ORIGINAL:
        scaling.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": spec.rope_theta},
    }


def _read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    def plain(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Scaling without theta, None for the default type."""
        if values is None:
            return None
        scaling = {key: value for key, value in values.items() if key not in ("rope_theta", "type")}
        scaling["rope_type"] = values.get("rope_type", values.get("type", "default"))
        return None if scaling["rope_type"] == "default" else scaling

    new = config.get("rope_parameters")
    theta = _same(
        "rope_theta", config.get("rope_theta"), "rope_parameters.rope_theta", (new or {}).get("rope_theta"), True
    )
    scaling = plain(config.get("rope_scaling"))
    if new is not None and "rope_scaling" in config and scaling != plain(new):
        raise ValueError(
            f"rope_scaling {config['rope_scaling']} and rope_parameters {new} differ: which one was trained?"
        )
    return float(theta), scaling if new is None else plain(new)


def _read_window(config: Mapping[str, Any], types: list[str]) -> int | None:
    if "sliding_attention" not in types:
        return None
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        raise ValueError(
            f"layer_types has sliding layers, but sliding_window is {window} and "
            f"use_sliding_window {config.get('use_sliding_window')}: readers would disagree"
        )
    return int(window)


def _same(first: str, one: Any, second: str, other: Any, needed: bool = False) -> Any:
    """The value of a field with two places; refused where they differ."""
    if one is not None and other is not None and one != other:
        raise ValueError(f"{first} is {one}, {second} is {other}: which one was trained?")
    if needed and one is None and other is None:
        raise ValueError(f"config.json lacks {first}: nothing is guessed")
    return other if one is None else one


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value
