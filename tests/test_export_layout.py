"""Does config.json say what was trained, to every reader, and is anything else refused? No files here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decode_helpers import EXPORTABLE, SPEC, YARN
from draftmill.export.layout import from_config, to_config
from draftmill.export.readers import READERS, disagreements, read_as_dflash, read_as_sglang, read_as_vllm

QWEN36_27B = {  # as published
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": None,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-06,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.5.3",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
    "rope_theta": 10000000,
    "rope_scaling": None,
}


# ---- writing ----


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("full", False),
        ("full causal", True),
        ("sliding causal", True),
        ("sliding both ways", False),
        ("mixed", None),
        ("mixed, all causal", True),
        ("mixed, none causal", False),
    ],
)
def test_causality_is_written_in_both_places_or_left_to_the_layer_types(name, causal):
    """Case 74."""
    config = to_config(EXPORTABLE[name], dtype="bfloat16")
    if causal is None:
        assert "is_causal" not in config
        assert "causal" not in config["dflash_config"]
    else:
        assert config["is_causal"] is config["dflash_config"]["causal"] is causal


def test_quirks_are_written_only_where_the_target_has_them():
    assert to_config(EXPORTABLE["quirks"], dtype="bfloat16")["dflash_config"] == {
        "mask_token_id": 59,
        "target_layer_ids": [1, 3],
        "block_size": 4,
        "input_embedding_scale": 5.65625,
        "output_multiplier": 0.196,
        "final_logit_softcapping": 30.0,
    }
    assert set(to_config(SPEC, dtype="bfloat16")["dflash_config"]) == {
        "mask_token_id",
        "target_layer_ids",
        "block_size",
    }


def test_scaling_from_an_implied_length_is_made_explicit():
    """Case 22: a reader need not know that the length before scaling defaults to the length after."""
    scaling = {"rope_type": "yarn", "factor": 2.0}
    config = to_config(replace(SPEC, rope_scaling=scaling), dtype="bfloat16")
    assert config["rope_scaling"]["original_max_position_embeddings"] == SPEC.max_position_embeddings
    assert to_config(replace(SPEC, rope_scaling={"rope_type": "default"}), dtype="bfloat16")["rope_scaling"] is None


# ---- every reader ----


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", EXPORTABLE)
def test_readers_agree_with_what_was_trained(name, reader):
    """Cases 13, 70, 74. SGLang cannot run causal full layers: that is reported, not hidden."""
    spec = EXPORTABLE[name]
    found = disagreements(to_config(spec, dtype="bfloat16"), spec)
    if reader == "SGLang" and spec.causal_full and "full_attention" in spec.layer_types:
        assert found[reader] == [
            f"causal layers: reads {(False,) * 2 if name == 'full causal' else (True, False)}, trained (True, True)"
        ]
    else:
        assert reader not in found


def test_readers_take_the_same_layer_outputs():
    """Case 13: layer k adds 10^k, so a sum names its layers. Ids 1 and 3 are the outputs of layers 1 and 3."""
    hidden_states = [0.0]
    for layer in range(6):
        hidden_states.append(hidden_states[-1] + 10**layer)
    config = to_config(SPEC, dtype="bfloat16")
    for read in (read_as_dflash, read_as_vllm, read_as_sglang):
        reading = read(config)
        # index 0 is the embedding in the counting of all three
        assert [hidden_states[index] for index in reading.capture_indices] == [11, 1111]
        assert reading.layer_outputs == (1, 3)
    shifted = json.loads(json.dumps(config))
    shifted["dflash_config"]["target_layer_ids"] = [2, 4]
    assert set(disagreements(shifted, SPEC)) == set(READERS)


BREAKS = {
    "RoPE base": lambda c: (c.update(rope_theta=1e4), c["rope_parameters"].update(rope_theta=1e4)),
    "window": lambda c: c.update(sliding_window=7),
    "layer types": lambda c: c.update(layer_types=["full_attention"] * 2),
    "causality": lambda c: c.update(is_causal=False),
    "mask token": lambda c: c["dflash_config"].update(mask_token_id=0),
}


@pytest.mark.parametrize("name", BREAKS)
def test_readers_notice_a_broken_field(name):
    config = to_config(SPEC, dtype="bfloat16")
    BREAKS[name](config)
    assert set(disagreements(config, SPEC)) == set(READERS)


def test_a_missing_rope_spelling_is_noticed_where_it_is_read():
    """vLLM looks at `rope_parameters` and falls back to a base of its own."""
    config = to_config(SPEC, dtype="bfloat16")
    del config["rope_parameters"], config["rope_theta"]
    assert read_as_vllm(config).rope_theta == 1e6
    assert read_as_dflash(config).rope_theta == 1e4
    config = to_config(EXPORTABLE["yarn"], dtype="bfloat16")
    for spelling in ("rope_parameters", "rope_scaling"):
        one = {key: value for key, value in config.items() if key != spelling}
        assert disagreements(one, EXPORTABLE["yarn"]) == {}


# ---- reading ----


def test_a_published_config_is_read():
    spec = from_config(QWEN36_27B)
    assert (spec.causal_sliding, spec.causal_full, spec.sliding_window) == (True, False, 2048)
    assert (spec.rope_theta, spec.rope_scaling, spec.block_size) == (1e7, None, 16)
    assert disagreements(QWEN36_27B, spec) == {}


UNREADABLE = {
    "speculators": ({"speculators_model_type": "dflash"}, "speculators checkpoint"),
    "other architecture": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    "other model type": ({"model_type": "llama"}, "model_type is 'llama'"),
    "no dflash_config": ({"dflash_config": None}, "dflash_config must hold"),
    "unknown field": ({"attention_sink_bias": True}, "attention_sink_bias"),
    "unknown dflash field": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1], "use_swa": True}},
        r"dflash_config\.use_swa",
    ),
    "bias": ({"attention_bias": True}, "attention_bias is True"),
    "two block sizes": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1], "block_size": 8}},
        r"block_size is 16, dflash_config\.block_size is 8",
    ),
    "two RoPE bases": ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}, "rope_theta is 10000000"),
    "two RoPE types": ({"rope_parameters": {"rope_theta": 1e7, **YARN}}, "rope_scaling None and rope_parameters"),
    "window switched off": ({"use_sliding_window": False}, "readers would disagree"),
    "no window": ({"sliding_window": None}, "readers would disagree"),
    "layer types": ({"layer_types": ["full_attention"] * 4}, "must name 5 layers"),
    "missing number": ({"head_dim": None}, "lacks head_dim"),
    "layer id out of range": ({"num_target_layers": 61}, r"must lie in 0\.\.60"),
    "mask token out of range": ({"vocab_size": 1000}, "mask_token_id 248070 lies outside"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_understood_is_refused_by_name(name):
    change, message = UNREADABLE[name]
    with pytest.raises(ValueError, match=message):
        from_config({**QWEN36_27B, **change})
