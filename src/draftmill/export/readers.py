"""How other engines read an exported config.json, by their documented rules. Pure functions on JSON.

Written from the engines' documentation and sources, not by running them: agreement here means that the file
says the same thing to each reader, not that the engine works. Every reading is brought to one common form:

    layer outputs   0-based target layers whose outputs are taken
    causal          per drafter layer, whether a slot sees later slots of its block
    window          per drafter layer, W such that query - key < W; None is unlimited
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftmill.config.spec import DrafterSpec


@dataclass(frozen=True, slots=True)
class Reading:
    capture_indices: tuple[int, ...]  # in the engine's own counting
    layer_outputs: tuple[int, ...]
    causal: tuple[bool, ...]
    window: tuple[int | None, ...]
    mask_token_id: int | None
    block_size: int | None  # None: the engine takes the length from its command line
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # None for plain RoPE


def read_as_dflash(config: Mapping[str, Any]) -> Reading:
    """The published PyTorch code through transformers' Qwen3Config: hidden_states[id + 1], index 0 the embedding.

    `is_causal` for all layers, else causal exactly in sliding layers. A window counts the query itself and
    exists only with `use_sliding_window`.
    """
    types = _layer_types(config)
    flag = config.get("is_causal")
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    theta, scaling = _rope(config, missing=10_000.0, prefer_old=True)
    ids = _dflash_value(config, "target_layer_ids")
    return Reading(
        capture_indices=tuple(layer + 1 for layer in ids),
        layer_outputs=tuple(ids),
        causal=tuple(kind == "sliding_attention" if flag is None else bool(flag) for kind in types),
        window=tuple(window if kind == "sliding_attention" else None for kind in types),
        mask_token_id=_dflash_value(config, "mask_token_id"),
        block_size=_dflash_value(config, "block_size", 16),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def read_as_vllm(config: Mapping[str, Any]) -> Reading:
    """vLLM: captures the residual stream before layer `id + 1`, which is the output of layer `id`.

    Causality: top-level `is_causal`, else `dflash_config.causal`, else by layer type. Windows are stored as
    (W - 1, 0) or, both ways, (W - 1, W - 1). `dflash_config.use_swa` would force windows on all layers.
    """
    types = _layer_types(config)
    dflash = config["dflash_config"]
    flag = config.get("is_causal", dflash.get("causal"))
    if dflash.get("use_swa"):
        types = ["sliding_attention"] * len(types)
    left = (dflash.get("swa_window_size") or config.get("sliding_window") or 0) - 1
    theta, scaling = _rope(config, missing=1_000_000.0, prefer_old=False)
    indices = tuple(layer + 1 for layer in dflash["target_layer_ids"])
    return Reading(
        capture_indices=indices,
        layer_outputs=tuple(index - 1 for index in indices),
        causal=tuple(kind == "sliding_attention" if flag is None else bool(flag) for kind in types),
        window=tuple(left + 1 if kind == "sliding_attention" else None for kind in types),
        mask_token_id=dflash.get("mask_token_id"),
        block_size=None,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def read_as_sglang(config: Mapping[str, Any]) -> Reading:
    """SGLang: full layers bidirectional, sliding layers causal with window_left = W - 1.

    Versions that know `is_causal: false` make sliding layers bidirectional; no version makes full layers causal.
    """
    types = _layer_types(config)
    sliding_causal = config.get("is_causal") is not False
    window_left = (config.get("sliding_window") or 0) - 1
    theta, scaling = _rope(config, missing=10_000.0, prefer_old=False)
    ids = _dflash_value(config, "target_layer_ids")
    return Reading(
        capture_indices=tuple(layer + 1 for layer in ids),
        layer_outputs=tuple(ids),
        causal=tuple(kind == "sliding_attention" and sliding_causal for kind in types),
        window=tuple(window_left + 1 if kind == "sliding_attention" else None for kind in types),
        mask_token_id=_dflash_value(config, "mask_token_id"),
        block_size=_dflash_value(config, "block_size"),
        rope_theta=theta,
        rope_scaling=scaling,
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Reading]] = {
    "dflash": read_as_dflash,
    "vLLM": read_as_vllm,
    "SGLang": read_as_sglang,
}
# a layout that these two misread cannot carry the drafter at all; another engine's limits are only reported
DECISIVE = ("dflash", "vLLM")


def disagreements(config: Mapping[str, Any], spec: DrafterSpec) -> dict[str, list[str]]:
    """Reader -> what it would do otherwise than trained. Empty where all agree."""
    found = {}
    for name, read in READERS.items():
        if wrong := _differences(read(config), spec):
            found[name] = wrong
    return found


def _differences(reading: Reading, spec: DrafterSpec) -> list[str]:
    scaling = spec.rope_scaling
    if scaling is not None and scaling.get("rope_type") == "default":
        scaling = None
    layers = range(spec.num_layers)
    facts = [
        ("target layer outputs", reading.layer_outputs, tuple(spec.target_layer_ids)),
        ("causal layers", reading.causal, tuple(spec.causal(layer) for layer in layers)),
        ("windows", reading.window, tuple(spec.window(layer) for layer in layers)),
        ("mask token", reading.mask_token_id, spec.mask_token_id),
        ("block size", reading.block_size or spec.block_size, spec.block_size),
        ("RoPE base", reading.rope_theta, spec.rope_theta),
        ("RoPE type", _type(reading.rope_scaling), _type(scaling)),
    ]
    wrong = [f"{name}: reads {read}, trained {trained}" for name, read, trained in facts if read != trained]
    for key, value in (scaling or {}).items():
        if (read := (reading.rope_scaling or {}).get(key)) != value:
            wrong.append(f"RoPE {key}: reads {read}, trained {value}")
    return wrong


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])


def _dflash_value(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """`dflash_config` first, then the top level."""
    return config.get("dflash_config", {}).get(name, config.get(name, default))


def _rope(config: Mapping[str, Any], *, missing: float, prefer_old: bool) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling. `prefer_old`: a non-null `rope_scaling` replaces `rope_parameters` (transformers 5)."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    chosen = dict(((old or new) if prefer_old else (new or old)) or {})
    theta = chosen.pop("rope_theta", config.get("rope_theta", missing))
    kind = chosen.get("rope_type", chosen.get("type", "default"))
    return float(theta), None if kind == "default" else chosen


def _type(scaling: Mapping[str, Any] | None) -> str:
    return "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
