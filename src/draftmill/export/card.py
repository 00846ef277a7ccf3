"""The model card of an exported drafter: what it is, what it fits, how it is served, what is known to be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftmill.config.spec import DrafterSpec


def model_card(name: str, spec: DrafterSpec, record: Mapping[str, Any], limits: Mapping[str, list[str]]) -> str:
    """`record`: draftmill.json. `limits`: per reader, what it does otherwise than trained."""
    target = record.get("target")
    target_name = target.get("name") if isinstance(target, Mapping) else target
    lines = [
        "---",
        "tags: [speculative-decoding, dflash, draftmill]",
        "---",
        "",
        f"# {name}",
        "",
        f"A DFlash drafter for **{target_name or 'a target not named at export'}**. It fits that target alone: "
        "it reads the target's hidden states and uses the target's embedding and head, which are not in this folder.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {value} |" for label, value in _facts(spec)),
        "",
        "## Serving",
        "",
        "```sh",
        "vllm serve TARGET --speculative-config "
        f'\'{{"method": "dflash", "model": "FOLDER", "num_speculative_tokens": {spec.block_size - 1}}}\'',
        "```",
        "",
        f"Draft {spec.block_size - 1} tokens per round (block size {spec.block_size}, the anchor included). "
        "Use the chat template and thinking mode of the training data; others lower acceptance.",
    ]
    if len(set(spec.layer_types)) > 1:
        lines += ["", "Mixed layer types need `VLLM_USE_V2_MODEL_RUNNER=1` in vLLM."]
    if limits:
        lines += ["", "## Known limits", ""]
        lines += [f"- {reader}: {fault}" for reader, faults in limits.items() for fault in faults]
    lines += ["", "## Origin", "", "```json", json.dumps(dict(record), indent=2, ensure_ascii=False), "```", ""]
    return "\n".join(lines)


def _facts(spec: DrafterSpec) -> list[tuple[str, str]]:
    kinds = []
    for layer, kind in enumerate(spec.layer_types):
        window = f", window {spec.window(layer)}" if spec.window(layer) is not None else ""
        kinds.append(
            f"{kind.removesuffix('_attention')} ({'causal' if spec.causal(layer) else 'bidirectional'}{window})"
        )
    return [
        ("layers", "; ".join(kinds)),
        (
            "target layers read",
            ", ".join(map(str, spec.target_layer_ids)) + f" of {spec.num_target_layers}, outputs, 0-based",
        ),
        ("mask token", str(spec.mask_token_id)),
        (
            "RoPE",
            f"base {spec.rope_theta:g}, " + (json.dumps(spec.rope_scaling) if spec.rope_scaling else "no scaling"),
        ),
    ]
