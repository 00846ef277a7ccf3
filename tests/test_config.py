"""What can be set, how a file and overrides become settings, and what every refusal says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.config.load import (
    ConfigError,
    dump_config,
    format_value,
    load_config,
    parse_value,
    trajectory_differences,
)
from draftmill.config.names import OTHER_NAMES, nearest, settings
from draftmill.config.schema import Config
from draftmill.config.template import template

REPO = Path(__file__).parent.parent
NEEDED = ["target.path=models/target", "data.path=data/prepared", "train.steps=100", "run.dir=runs/test"]
SMALL_FILE = """
target:
  path: models/target
data:
  path: data/prepared
train:
  steps: 100
  lr: 3e-4
run:
  dir: runs/test
"""


def small(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, *overrides])


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        small(*overrides)
    return caught.value.problems


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---- What is read ----------------------------------------------------------------------------------------------


def test_file_and_overrides_from_left_to_right(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL_FILE), ["train.lr=1e-3", "train.lr=2e-3", "drafter.layers=3"])
    assert (config.train.lr, config.drafter.layers, config.train.steps) == (2e-3, 3, 100)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("train.lr=3e-4", "lr", 3e-4),
        ("train.lr=3E+2", "lr", 300.0),
        ("train.lr=.5", "lr", 0.5),
        ("train.lr=1", "lr", 1.0),
        ("train.betas=[0.8, 99e-2]", "betas", (0.8, 0.99)),
        ("train.schedule=wsd", "schedule", "wsd"),
        ("train.time_limit_minutes=null", "time_limit_minutes", None),
        ("train.time_limit_minutes=", "time_limit_minutes", None),
        ("train.seed=010", "seed", 10),
    ],
)
def test_override_values(override: str, name: str, value: object) -> None:
    assert getattr(small(override).train, name) == value


def test_numbers_of_yaml_1_2() -> None:
    assert [parse_value(text) for text in ("3e-4", "1E5", "-1.5e+3", "1.")] == [3e-4, 1e5, -1500.0, 1.0]
    assert [parse_value(text) for text in ("on", "yes", "12:30", "2024-01-01", "1_000", "e5", "0x10")] == [
        *("on", "yes", "12:30", "2024-01-01", "1_000", "e5", "0x10")
    ]


def test_paths_are_text_and_relative_to_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert small("run.dir=2024").run.dir == Path("2024")
    assert small("run.dir=a: b #c").run.dir == Path("a: b #c")
    assert small("run.dir=~/runs").run.dir == Path("/home/me/runs")


def test_feature_layers_are_a_count_or_a_list() -> None:
    assert small("target.feature_layers=3").target.feature_layers == 3
    assert small("target.feature_layers=[1, 3]").target.feature_layers == (1, 3)


def test_rope_scaling_is_a_mapping() -> None:
    scaling = small("drafter.rope_scaling={rope_type: yarn, factor: 4.0}").drafter.rope_scaling
    assert scaling == {"rope_type": "yarn", "factor": 4.0}


def test_a_section_with_only_comments_has_its_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL_FILE + "drafter:\n  # layers: 3\n"), [])
    assert config.drafter.layers == 5


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        small().train.lr = 1.0  # type: ignore[misc]


# ---- What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.loss_decay_gama", "train.loss.gamma"),  # case 11: misspelt
        ("loss_decay_gama", "train.loss.gamma"),
        ("data.num_anchors", "data.anchor_rate"),  # case 11: retired, other trainers' name
        ("train.learning_rate", "train.lr"),
        ("train.learnig_rate", "train.lr"),
        ("optimizer.lr", "train.lr"),
        ("drafter.blocksize", "drafter.block_size"),
        ("train.gamma", "train.loss.gamma"),
        ("train.loss.kinds", "train.loss.kind"),
        ("target.feature_layer", "target.feature_layers"),
        ("run.checkpoint-every", "run.checkpoint_every"),
        ("data.Path", "data.path"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(wrong: str, right: str, tmp_path: Path) -> None:
    (found,) = problems(f"{wrong}=7")
    assert found.startswith(f"unknown key {wrong}: the nearest setting is {right} (")
    *parents, leaf = wrong.split(".")
    nested = f"{leaf}: 7\n"
    for parent in reversed(parents):
        nested = f"{parent}:\n" + "".join(f"  {line}\n" for line in nested.splitlines())
    with pytest.raises(ConfigError, match=re.escape(found)):
        load_config(write(tmp_path, nested), [])


def test_unknown_key_like_no_other_lists_what_is_there() -> None:
    assert problems("zzzz=1")[0].startswith("unknown key zzzz: valid here are target, drafter, ")
    assert "train.loss.alpha" in problems("train.loss.qqqqqqq=1")[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lr=-1", "train.lr = -1: should be greater than 0. Peak learning rate."),
        ("train.lr=.nan", "train.lr = .nan: should be a finite number."),
        ("train.lr=.inf", "train.lr = .inf: should be a finite number."),
        ("train.lr=1e999", "train.lr = .inf: should be a finite number."),
        ("train.lr='3'", "train.lr = '3': should be a number."),
        ("train.steps=1.5", "train.steps = 1.5: should be a whole number."),
        ("drafter.layers=true", "drafter.layers = true: should be a whole number."),
        ("drafter.causal.full=yes", "drafter.causal.full = 'yes': should be true or false."),
        ("drafter.causal.full=1", "drafter.causal.full = 1: should be true or false."),
        ("target.dtype=float16", "target.dtype = float16: should be 'bfloat16' or 'float32'."),
        ("target.device=gpu", "target.device = gpu: is none of these. auto (a GPU where there is one), cpu, cuda"),
        ("target.feature_layers=all", "target.feature_layers = all: should be a list, or should be a whole number."),
        ("drafter.layer_types=[full, local]", "drafter.layer_types = local: should be 'full' or 'sliding'."),
        ("train.loss=dpace", "override 'train.loss=dpace': train.loss is a section: set train.loss.kind, "),
        ("train.lr", "override 'train.lr': write key=value"),
        ("train.betas=[0.9", "override 'train.betas=[0.9': the value is not valid YAML"),
        ("drafter.rope_scaling={factor: 1, factor: 2}", "line 1: factor is set twice"),
        ("train.epochs=3", "set one of train.steps (100) and train.epochs (3), and the other to null"),
        ("drafter.sliding_window=64", "drafter.sliding_window is 64, but no layer in drafter.layer_types is sliding"),
    ],
)
def test_bad_value_says_name_value_and_what_is_allowed(override: str, said: str) -> None:
    (found,) = problems(override)
    assert said in found


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  lr: 0\n  lr: -1\n  stepz: 3\nrun: here\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["drafter.layers=0", "nonsense"])
    text = str(caught.value)
    assert text.startswith(f"{path}: 9 problems\n  - ")
    for part in (
        "line 3: lr is set twice",
        "override 'nonsense'",
        "unknown key train.stepz",
        "run = here: is a section: set run.dir",
        "train.lr = -1",
        "drafter.layers = 0",
        "target.path is not set. Hugging Face folder",
        "data.path is not set",
        "run.dir is not set",
    ):
        assert text.count(part) == 1, part


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"train: [1", "is not valid YAML"),
        (b"- train", "holds a list, expected sections"),
        (b"train: {steps: !!int many}", "is not valid YAML"),
        (b"train: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        (b"run: {dir: \xff}", "is not UTF-8 text"),
        (b"a: &a [*a]", "is not valid YAML"),
    ],
)
def test_unreadable_file(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {said}")):
        load_config(path, [])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path, [])


def test_one_problem_is_one_line() -> None:
    assert "\n" not in str(ConfigError("just this", source="file.yaml"))


# ---- What is written -------------------------------------------------------------------------------------------


@given(
    path=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda text: text[0] != "~"),
    lr=st.floats(min_value=1e-30, max_value=1e30),
    layers=st.lists(st.integers(0, 99), min_size=1).map(tuple) | st.integers(1, 9),
)
def test_dump_loads_back_equal(path: str, lr: float, layers: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = small()
    target = base.target.model_copy(update={"path": Path(path), "feature_layers": layers})
    config = base.model_copy(update={"target": target, "train": base.train.model_copy(update={"lr": lr})})
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file, []) == config


def test_text_that_looks_like_a_number_is_quoted() -> None:
    for text in ("3e-4", "yes", "null", "010", "1.", "", "a: b"):
        assert parse_value(format_value(text)) == text


def test_template_loads_back_with_every_setting_explained(tmp_path: Path) -> None:
    text = template("models/it's: a #target")
    config = load_config(write(tmp_path, text), [])
    assert config.target.path == Path("models/it's: a #target")
    assert config == load_config(
        None, [f"target.path={config.target.path}", "data.path=data/prepared", "run.dir=runs/first", "train.epochs=6"]
    )
    lines = text.splitlines()
    for name, setting in settings().items():
        assert setting.doc, f"{name} has no docstring in the schema"
        row = next(i for i, line in enumerate(lines) if re.match(rf"\s*{name.rpartition('.')[2]}: ", line))
        assert lines[row - 1].lstrip().startswith("# "), name


def test_every_shipped_config_loads() -> None:
    places = ["target.path=target", "data.path=data", "run.dir=run"]  # an example may leave them to the command line
    for path in sorted((REPO / "examples").rglob("*.yaml")):
        assert load_config(path, places).run.dir == Path("run"), path


# ---- What may change on resume ---------------------------------------------------------------------------------


def test_settings_free_on_resume() -> None:
    assert {name for name, setting in settings().items() if setting.free_on_resume} == {
        *("target.device", "train.time_limit_minutes"),
        *("run.dir", "run.device", "run.log_every", "run.checkpoint_every", "run.keep_checkpoints"),
        *("pipeline.mode", "pipeline.targets", "pipeline.slots", "pipeline.stop_seconds"),
        *("pipeline.target_restarts", "pipeline.drafter_restarts", "pipeline.start_timeout_seconds"),
        *("pipeline.lease_timeout_seconds", "pipeline.step_timeout_seconds"),
    }


def test_trajectory_differences_name_both_values() -> None:
    new = small("train.lr=3e-4", "run.log_every=1", "train.time_limit_minutes=5", "target.feature_layers=[1,2]")
    assert trajectory_differences(small(), new) == [
        "target.feature_layers: 5 -> [1, 2]",
        "train.lr: 0.0006 -> 0.0003",
    ]
    assert trajectory_differences(new, new) == []


def test_other_names_lead_to_settings() -> None:
    assert set(OTHER_NAMES.values()) <= set(settings())
    assert all(nearest(name) == meant for name, meant in OTHER_NAMES.items())
