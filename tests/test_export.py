"""Is the drafter on disk exactly the trained one, and does its config say the same to every reader?"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config

from decode_helpers import EXPORTABLE, SPEC
from drafter_helpers import make_drafter
from draftmill.drafter.network import Drafter
from draftmill.export.tensors import tensor_shapes
from draftmill.export.zlab import load_drafter, read_export, read_provenance, write_export


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


# ---- the round trip ----


@pytest.mark.parametrize("name", EXPORTABLE)
def test_spec_survives_the_round_trip(tmp_path, name):
    spec = EXPORTABLE[name]
    folder = write_export(tmp_path / "drafter", spec, make_drafter(spec).state_dict())
    assert canonical(read_export(folder)[0]) == canonical(spec)


def canonical(spec):
    """Causality of a layer type that does not occur says nothing."""
    return replace(
        spec,
        causal_full=spec.causal_full if "full_attention" in spec.layer_types else False,
        causal_sliding=spec.causal_sliding if "sliding_attention" in spec.layer_types else True,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_survive_bit_by_bit(tmp_path, dtype):
    weights = make_drafter(SPEC).state_dict()
    folder = write_export(tmp_path / "drafter", SPEC, weights, dtype=dtype)
    stored = read_export(folder)[1]
    assert set(stored) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(stored[name], tensor.to(getattr(torch, dtype))), name
    again = write_export(tmp_path / "again", SPEC, load_drafter(folder).state_dict(), dtype=dtype)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_loaded_drafter_has_float32_parameters_and_the_trained_tables(tmp_path):
    """Case 20: a bfloat16 file makes no bfloat16 RoPE tables."""
    drafter = make_drafter(SPEC)
    loaded = load_drafter(write_export(tmp_path / "drafter", SPEC, drafter.state_dict()))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    positions = torch.arange(0, 500, 7)
    assert all(torch.equal(a, b) for a, b in zip(loaded.rope(positions), drafter.rope(positions), strict=True))


def test_shapes_are_those_of_the_network_and_the_published_names():
    """Case 72: 3 + 11 per layer, no prefix, no embedding, no head."""
    for spec in (SPEC, replace(SPEC, head_dim=12, target_layer_ids=(0, 2, 4))):
        have = {name: tuple(tensor.shape) for name, tensor in Drafter(spec).state_dict().items()}
        assert have == tensor_shapes(spec)
    names = set(tensor_shapes(SPEC))
    assert len(names) == 3 + 11 * SPEC.num_layers
    assert "fc.weight" in names
    assert "layers.1.self_attn.q_norm.weight" in names
    assert not [name for name in names if "embed" in name or "lm_head" in name or name.startswith("model.")]


# ---- what config.json says ----


def test_every_field_is_explicit(tmp_path):
    """Cases 9, 74: block size in both places, both RoPE spellings, the window fields that Qwen3Config gates."""
    ids = {"bos": 1, "eos": [2, 5], "pad": 2}
    folder = write_export(tmp_path / "drafter", SPEC, make_drafter(SPEC).state_dict(), token_ids=ids)
    config = read_config(folder)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 59, "target_layer_ids": [1, 3], "block_size": 4},
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
        "num_target_layers": 6,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["mixed", "full", "yarn", "llama3", "linear"])
def test_transformers_reads_what_was_trained_without_a_warning(tmp_path, name, caplog):
    """Case 22: theta and scaling arrive through either spelling, and nothing is inherited by accident."""
    spec = EXPORTABLE[name]
    folder = write_export(tmp_path / "drafter", spec, make_drafter(spec).state_dict())
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        config = Qwen3Config.from_pretrained(str(folder))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
    assert config.rope_parameters["rope_theta"] == spec.rope_theta
    assert config.rope_parameters["rope_type"] == (spec.rope_scaling or {}).get("rope_type", "default")
    for key, value in (spec.rope_scaling or {}).items():
        assert config.rope_parameters[key] == value
    assert config.sliding_window == spec.sliding_window
    assert list(config.layer_types) == list(spec.layer_types)
    assert config.dtype == torch.bfloat16


# ---- refusals ----


def refuse_write(tmp_path, message, spec=SPEC, weights=None, **options):
    weights = make_drafter(SPEC).state_dict() if weights is None else weights
    with pytest.raises(ValueError, match=re.escape(message)):
        write_export(tmp_path / "drafter", spec, weights, **options)
    assert list(tmp_path.iterdir()) == []


def test_what_no_layout_can_say_is_refused(tmp_path):
    refuse_write(tmp_path, "no export layout", replace(SPEC, causal_full=True, causal_sliding=False))
    refuse_write(tmp_path, "shorter than a block", replace(SPEC, sliding_window=3))
    refuse_write(tmp_path, "outside the vocabulary", replace(SPEC, mask_token_id=61))  # case 9
    refuse_write(tmp_path, "must lie in 0..5", replace(SPEC, target_layer_ids=(1, 6)))  # case 12


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model."])
def test_wrapped_names_are_refused(tmp_path, prefix):
    """Case 72."""
    weights = {prefix + name: tensor for name, tensor in make_drafter(SPEC).state_dict().items()}
    refuse_write(tmp_path, f"tensor names start with {prefix}", weights=weights)


def test_wrong_tensors_are_refused(tmp_path):
    """Cases 69, 72: nothing missing is initialised, nothing extra is carried along."""
    weights = make_drafter(SPEC).state_dict()
    missing = {name: tensor for name, tensor in weights.items() if name != "layers.1.mlp.up_proj.weight"}
    refuse_write(tmp_path, "1 tensors are missing: layers.1.mlp.up_proj.weight", weights=missing)
    extra = {**weights, "lm_head.weight": torch.zeros(61, 32)}
    refuse_write(tmp_path, "do not belong to the drafter: lm_head.weight", weights=extra)
    other = replace(SPEC, target_layer_ids=(1, 2, 3))
    refuse_write(tmp_path, "fc.weight has shape (32, 64), its config says (32, 96)", other, weights)
    weights["norm.weight"] = weights["norm.weight"].clone()
    weights["norm.weight"][3] = float("nan")
    refuse_write(tmp_path, "norm.weight has values that are not finite", weights=weights)
    weights["norm.weight"][3] = 1e5  # finite, but past the range of float16
    refuse_write(tmp_path, "state dict in float16: norm.weight", weights=weights, dtype="float16")
    refuse_write(tmp_path, "export dtype 'int8'", dtype="int8")


def test_only_an_export_is_replaced(tmp_path):
    folder, weights = tmp_path / "drafter", make_drafter(SPEC).state_dict()
    folder.mkdir()  # empty is fine
    write_export(folder, SPEC, weights, provenance={"step": 1})
    write_export(folder, SPEC, weights, provenance={"step": 2})
    assert read_provenance(folder)["step"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "draftmill.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        write_export(folder, SPEC, weights)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not written by draftmill export"):
        write_export(foreign, SPEC, weights)
    assert (foreign / "config.json").read_text() == "{}"


def test_a_failed_write_leaves_the_former_export(tmp_path, monkeypatch):
    folder = write_export(tmp_path / "drafter", SPEC, make_drafter(SPEC).state_dict(), provenance={"step": 1})

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("draftmill.export.zlab.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_export(folder, SPEC, make_drafter(SPEC).state_dict(), provenance={"step": 2})
    assert read_provenance(folder)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


# ---- reading ----


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_export(tmp_path)
    folder = write_export(tmp_path / "drafter", SPEC, make_drafter(SPEC).state_dict())
    config = read_config(folder)
    config["dflash_config"]["target_layer_ids"] = [1, 2, 3]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"drafter: model\.safetensors: fc\.weight has shape"):
        load_drafter(folder)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="drafter: "):
            load_drafter(folder)
    write_export(folder, SPEC, make_drafter(SPEC).state_dict())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(ValueError, match="drafter: "):
        load_drafter(folder)


# ---- for people ----


def test_provenance_and_card(tmp_path):
    """Case 76: the very target is on record."""
    target = {"name": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "quantization": None}
    folder = write_export(
        tmp_path / "drafter",
        EXPORTABLE["full causal"],
        make_drafter(SPEC).state_dict(),
        provenance={"target": target, "step": 70},
    )
    record = read_provenance(folder)
    assert record["target"] == target
    assert record["step"] == 70
    assert {"format", "draftmill", "dtype"} <= set(record)
    card = (folder / "README.md").read_text()
    for part in (
        "SmolLM2-135M-Instruct",
        '"num_speculative_tokens": 3',
        "full (causal)",
        "1, 3 of 6",
        "SGLang: causal layers",
    ):
        assert part in card
    assert read_provenance(tmp_path) == {}
