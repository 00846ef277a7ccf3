"""How settings and a target's config.json become a drafter's architecture, and what is refused before any model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from draftmill.config.load import ConfigError, load_config
from draftmill.config.resolve import check_target, decay_gamma, default_feature_layers, resolve_spec
from draftmill.config.schema import LossConfig
from draftmill.config.spec import DrafterSpec

# A Qwen3-8B-like target, as transformers 5 writes it.
TARGET = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
NO_SCALING: dict[str, Any] = {"rope_type": "default"}


def resolve(folder: Path, target: dict[str, Any], *overrides: str, mask: int = 151669) -> DrafterSpec:
    (folder / "config.json").write_text(json.dumps(target))
    needed = [f"target.path={folder}", "data.path=d", "train.steps=1", "run.dir=r"]
    return resolve_spec(load_config(None, [*needed, *overrides]), mask)


def without(*keys: str, **changed: Any) -> dict[str, Any]:
    return {key: value for key, value in TARGET.items() if key not in keys} | changed


def test_every_field_of_a_qwen3_drafter(tmp_path: Path) -> None:
    assert resolve(tmp_path, TARGET) == DrafterSpec(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_position_embeddings=40960,
        layer_types=("full_attention",) * 5,
        sliding_window=None,
        causal_full=False,
        causal_sliding=True,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        embedding_scale=1.0,
        output_multiplier=1.0,
        logit_softcap=None,
    )


def test_settings_win_over_the_target(tmp_path: Path) -> None:
    spec = resolve(
        tmp_path,
        TARGET,
        "drafter.layers=3",
        "drafter.layer_types=[sliding, full, sliding]",
        "drafter.sliding_window=2048",
        "drafter.causal.sliding=false",
        "drafter.block_size=8",
        "drafter.intermediate_size=3072",
        "drafter.num_attention_heads=16",
        "drafter.num_key_value_heads=4",
        "drafter.head_dim=64",
        "drafter.rope_theta=1e4",
        "drafter.mask_token_id=7",
        "target.feature_layers=[0, 20, 35]",
    )
    assert spec.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert (spec.sliding_window, spec.causal_full, spec.causal_sliding) == (2048, False, False)
    assert (spec.block_size, spec.intermediate_size, spec.mask_token_id) == (8, 3072, 7)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (16, 4, 64)
    assert (spec.rope_theta, spec.target_layer_ids) == (10000.0, (0, 20, 35))


def test_spec_survives_json(tmp_path: Path) -> None:
    spec = resolve(tmp_path, TARGET, "drafter.rope_scaling={rope_type: yarn, factor: 4.0}")
    assert DrafterSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_wrapped_text_model(tmp_path: Path) -> None:
    wrapper = {"model_type": "vl", "hidden_size": 1, "vision_config": {"hidden_size": 2}, "text_config": TARGET}
    assert resolve(tmp_path, wrapper) == resolve(tmp_path, TARGET)


def test_head_dim_and_key_value_heads_that_are_not_written(tmp_path: Path) -> None:
    small = without("head_dim", "num_key_value_heads", hidden_size=576, num_attention_heads=9)
    spec = resolve(tmp_path, small)
    assert (spec.head_dim, spec.num_key_value_heads) == (64, 9)
    with pytest.raises(ConfigError, match=r"hidden_size 577 does not divide by 9 heads: set drafter\.head_dim"):
        resolve(tmp_path, small | {"hidden_size": 577})
    with pytest.raises(ConfigError, match=r"head_dim 63 is odd"):
        resolve(tmp_path, small | {"hidden_size": 567})


# ---- Feature layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 go to the even neighbour
        (28, 3, (1, 13, 25)),
        (36, 1, (18,)),
        (1, 1, (0,)),
        (6, 3, (1, 2, 3)),
        (5, 2, (1, 2)),
    ],
)
def test_feature_layers_spread_evenly(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_feature_layers(layers, count) == ids


@pytest.mark.parametrize(("layers", "count", "room"), [(6, 5, 3), (4, 2, 1), (2, 2, 1)])
def test_more_feature_layers_than_there_is_room(layers: int, count: int, room: int) -> None:
    with pytest.raises(ConfigError, match=f"target.feature_layers = {count}: .* {layers} layers has room for {room} "):
        default_feature_layers(layers, count)


def test_the_last_layer_may_be_tapped(tmp_path: Path) -> None:
    """Case 12."""
    six = TARGET | {"num_hidden_layers": 6}
    assert resolve(tmp_path, six, "target.feature_layers=[1, 3]").target_layer_ids == (1, 3)
    assert resolve(tmp_path, six, "target.feature_layers=[1, 5]").target_layer_ids == (1, 5)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("[1, 6]", "no layer 6; its 6 layers have ids 0 to 5"),  # case 12
        ("[-1, 3]", "no layer -1"),
        ("[3, 1]", "in rising order"),
        ("[1, 1]", "each once"),
        ("[]", "at least one"),
    ],
)
def test_wrong_feature_layers(layers: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path, TARGET | {"num_hidden_layers": 6}, f"target.feature_layers={layers}")


# ---- RoPE (case 22) --------------------------------------------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, ("linear", {"factor": 2.0})),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}}, 1e6, ("yarn", YARN)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}, 1e6, ("yarn", YARN)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, ("llama3", LLAMA3)),
        (  # partly rotated heads and image positions are the target's own matter
            {
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
                    **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
                }
            },
            1e7,
            None,
        ),
    ],
)
def test_rope_in_both_spellings(
    written: dict[str, Any], theta: float, scaling: tuple[str, dict[str, Any]] | None, tmp_path: Path
) -> None:
    spec = resolve(tmp_path, without("rope_parameters") | written)
    assert spec.rope_theta == theta
    assert spec.rope_scaling == (None if scaling is None else {"rope_type": scaling[0], **scaling[1]})


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "foo", "rope_theta": 1e4}, "rope_type is 'foo', known are default, linear, yarn, llama3"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]}, "rope_type is 'longrope'"),
        ({"factor": 8.0, "rope_theta": 1e4}, "rope_type is None"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "rope_type yarn needs factor"),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "strength": 1},
            "rope_type linear knows no strength",
        ),
        (
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            r"for each layer type \(full_attention, sliding_attention\)",
        ),
    ],
)
def test_rope_that_is_not_understood_must_be_set(rope: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = TARGET | {"rope_parameters": rope}
    with pytest.raises(ConfigError, match=f"{said}.*drafter.rope_scaling"):
        resolve(tmp_path, target)
    spec = resolve(tmp_path, target, "drafter.rope_theta=2e5", "drafter.rope_scaling={rope_type: default}")
    assert (spec.rope_theta, spec.rope_scaling) == (2e5, None)


def test_own_rope_scaling_is_checked_too(tmp_path: Path) -> None:
    scaling = "drafter.rope_scaling={rope_type: linear, factor: 2.0}"
    assert resolve(tmp_path, TARGET, scaling).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    for wrong in ("{rope_type: foo}", "{factor: 2.0}", "{rope_type: linear, factor: 2.0, rope_theta: 1e4}"):
        with pytest.raises(ConfigError, match=r"drafter\.rope_scaling: "):
            resolve(tmp_path, TARGET, f"drafter.rope_scaling={wrong}")


# ---- Mask token, gamma, unusable targets -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", [151936, -1])
def test_mask_token_outside_the_vocabulary(mask: int, tmp_path: Path) -> None:
    """Case 9 d."""
    with pytest.raises(ConfigError, match=rf"mask token is {mask}, .* rows 0 to 151935: set drafter\.mask_token_id"):
        resolve(tmp_path, TARGET, mask=mask)
    with pytest.raises(ConfigError, match=r"drafter\.mask_token_id is 151936"):
        resolve(tmp_path, TARGET, "drafter.mask_token_id=151936")


def test_gamma_of_a_block_size() -> None:
    assert [decay_gamma(LossConfig(), size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert decay_gamma(LossConfig(gamma=2.5), 12) == 2.5
    assert decay_gamma(LossConfig(kind="dpace"), 12) == math.inf
    with pytest.raises(ConfigError, match=r"drafter.block_size 12 .*: set train\.loss\.gamma"):
        decay_gamma(LossConfig(), 12)


def test_check_target_looks_at_everything_but_the_mask_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    needed = [f"target.path={tmp_path}", "data.path=d", "train.steps=1", "run.dir=r"]
    check_target(load_config(None, needed))
    with pytest.raises(ConfigError, match=r"train\.loss\.gamma"):
        check_target(load_config(None, [*needed, "drafter.block_size=12"]))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            without("intermediate_size", moe_intermediate_size=768),
            r"no intermediate_size: set drafter\.intermediate_size",
        ),
        (without(intermediate_size=[1, 2]), r"intermediate_size = \[1, 2\]: set drafter\.intermediate_size"),
        (without("num_attention_heads"), r"no num_attention_heads: set drafter\.num_attention_heads"),
        (without("vocab_size"), r"no vocab_size: write the folder anew"),
        (without("rope_parameters"), r"no rope_theta: set drafter\.rope_theta"),
        (without(num_key_value_heads=7), r"num_attention_heads 32 is no multiple of drafter\.num_key_value_heads 7"),
        (without(rope_parameters="yarn"), r"RoPE settings are 'yarn'"),
        ([1], "holds no object"),
    ],
)
def test_targets_that_do_not_say_enough(target: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path, target)


def test_no_target_there(tmp_path: Path) -> None:
    needed = ["data.path=d", "train.steps=1", "run.dir=r"]
    with pytest.raises(ConfigError, match=r"target\.path = .*/none: .* cannot be read .*give a Hugging Face"):
        resolve_spec(load_config(None, [f"target.path={tmp_path}/none", *needed]), 0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        resolve_spec(load_config(None, [f"target.path={tmp_path}", *needed]), 0)


@pytest.mark.parametrize("factor", ["abc", "0", "-2.0", "[1]"])
def test_rope_values_that_cannot_be_are_refused(tmp_path: Path, factor: str) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.rope_scaling: factor is .*expected a positive number"):
        resolve(tmp_path, TARGET, f"drafter.rope_scaling={{rope_type: linear, factor: {factor}}}")
