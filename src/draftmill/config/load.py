"""A YAML file and dotted overrides become a `Config`, or one `ConfigError` that lists every problem.

Strict on purpose: an unknown key, a duplicate key, a number given as text and a NaN are refused, so no setting
is ever ignored or guessed. Relative paths are relative to the current directory, as on the command line.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from draftmill.config.names import Setting, nearest, sections, settings, value_of
from draftmill.config.schema import Config

Tree = dict[str, Any]


class ConfigError(ValueError):
    """The user's settings cannot be used. `problems` has one line for each thing to mend."""

    def __init__(self, *problems: str, source: str | None = None) -> None:
        self.problems = problems
        head = [source] if source else []
        if len(problems) == 1:
            super().__init__(": ".join([*head, problems[0]]))
        else:
            super().__init__("\n  - ".join([": ".join([*head, f"{len(problems)} problems"]), *problems]))


def load_config(path: Path | str | None, overrides: Iterable[str] = ()) -> Config:
    """Settings of `path`, then `overrides` (`train.lr=3e-4`) from left to right, over the schema's defaults."""
    problems: list[str] = []
    tree = _read(Path(path), problems) if path is not None else {}
    for override in overrides:
        _apply(tree, override, problems)
    source = str(path) if path is not None else "settings"
    return _validate(tree, problems, source)


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal config."""
    plain = config.model_dump(mode="json")
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False))


def trajectory_differences(old: Config, new: Config) -> list[str]:
    """Settings that differ and would change the trained weights, each with both values."""
    return [
        f"{name}: {format_value(value_of(old, name))} -> {format_value(value_of(new, name))}"
        for name, setting in settings().items()
        if not setting.free_on_resume and value_of(old, name) != value_of(new, name)
    ]


def format_value(value: Any) -> str:
    """A value in the words of the YAML file."""
    plain = json.loads(json.dumps(value, default=str))
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return str(text).removesuffix("\n...\n").strip()


# ---- YAML ------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's scalars (3e-4 is a number, `on` and 12:30 are text) that records duplicate keys."""

    duplicates: list[str]


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML version would read as something other than text."""


_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|nan)$")
_SCALARS = {
    "tag:yaml.org,2002:null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "tag:yaml.org,2002:int": (re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    "tag:yaml.org,2002:float": (_FLOAT, list("-+0123456789.")),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))  # not PyYAML's, to which 010 is eight


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Tree:
    mapping: Tree = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            key = str(getattr(key_node, "value", key))
        if key in mapping:
            loader.duplicates.append(f"line {key_node.start_mark.line + 1}: {key} is set twice: keep one")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _represent_list(dumper: _Dumper, values: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Dumper.add_representer(list, _represent_list)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: an explicit tag such as !!int on text


def parse_value(text: str) -> Any:
    """A value as the YAML file would read it: 3e-4, true, [1, 2]."""
    try:
        return _parse(text)[0]
    except _NOT_YAML:
        raise ConfigError(f"{text!r} is not valid YAML") from None


def _parse(text: str) -> tuple[Any, list[str]]:
    loader = _Loader(text)
    loader.duplicates = []
    try:
        return loader.get_single_data(), loader.duplicates
    finally:
        loader.dispose()


def _read(path: Path, problems: list[str]) -> Tree:
    try:
        tree, duplicates = _parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}", source=str(path)) from None
    except _NOT_YAML as error:
        raise ConfigError(f"is not valid YAML: {error}", source=str(path)) from None
    problems += duplicates
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"holds a {type(tree).__name__}, expected sections such as 'train:'", source=str(path))
    return tree


def _apply(tree: Tree, override: str, problems: list[str]) -> None:
    """Enter `train.lr=3e-4` into `tree`."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals:
        problems.append(f"override {override!r}: write key=value, for instance train.lr=3e-4")
        return
    if name in sections():
        problems.append(f"override {override!r}: {name} is a section: set {', '.join(_members(name))}")
        return
    setting = settings().get(name)
    if setting is None:
        problems.append(_unknown(name))
        return
    value: Any = text
    if not setting.is_path:  # a path is never anything but text
        try:
            value, duplicates = _parse(text)
        except _NOT_YAML:
            problems.append(f"override {override!r}: the value is not valid YAML")
            return
        problems += [f"override {override!r}: {duplicate}" for duplicate in duplicates]
    *parents, leaf = name.split(".")
    branch = tree
    for parent in parents:
        if not isinstance(branch.get(parent), dict):
            branch[parent] = {}
        branch = branch[parent]
    branch[leaf] = value


# ---- Validation ------------------------------------------------------------------------------------------------


def _validate(tree: Tree, problems: list[str], source: str) -> Config:
    known = _known(tree, "", problems)
    config = None
    try:
        # Validated as JSON: pydantic's strict mode then takes lists as tuples and text as paths, but not "3" as 3.
        config = Config.model_validate_json(json.dumps(known, default=str), strict=True)
    except ValidationError as error:
        problems += _explain(error)
    if problems or config is None:
        raise ConfigError(*problems, source=source)
    return config


def _known(tree: Tree, prefix: str, problems: list[str]) -> Tree:
    """`tree` without unknown keys (reported), and with every section there, so that what is missing is named."""
    known: Tree = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in sections():
            if value is not None and not isinstance(value, dict):
                problems.append(f"{name} = {format_value(value)}: is a section: set {', '.join(_members(name))}")
        elif setting := settings().get(name):
            known[key] = os.path.expanduser(value) if setting.is_path and isinstance(value, str) else value
        elif isinstance(value, dict) and value:
            _known(value, f"{name}.", problems)  # names what is inside: that has the nearer setting
        else:
            problems.append(_unknown(name))
    for name in sections():
        parent, _, key = name.rpartition(".")
        if (f"{parent}." if parent else "") == prefix:
            value = tree.get(key)
            known[key] = _known(value if isinstance(value, dict) else {}, f"{name}.", problems)
    return known


def _members(section: str) -> list[str]:
    return [name for name in settings() if name.startswith(f"{section}.")]


def _unknown(name: str) -> str:
    if meant := nearest(name):
        return f"unknown key {name}: the nearest setting is {meant} ({settings()[meant].doc.rstrip('.')})"
    section = name.rpartition(".")[0]
    return f"unknown key {name}: valid here are {', '.join(_members(section) or sections())}"


def _explain(error: ValidationError) -> list[str]:
    """One line for each setting at fault: its name, its value, what is allowed."""
    faults: dict[str, list[str]] = {}  # the branches of a union each report the same setting
    values: dict[str, Any] = {}
    for detail in error.errors(include_url=False):
        name = _setting_at(detail["loc"])
        text = _allowed(detail["type"], detail["msg"])
        faults.setdefault(name, [])
        values.setdefault(name, detail["input"])
        if text not in faults[name]:
            faults[name].append(text)
    return [_problem(name, texts, values[name]) for name, texts in faults.items()]


def _setting_at(location: tuple[int | str, ...]) -> str:
    """The longest part of pydantic's location that is a setting or a section."""
    names = [".".join(map(str, location[:end])) for end in range(len(location), 0, -1)]
    return next((name for name in names if name in settings() or name in sections()), ".".join(map(str, location)))


def _allowed(kind: str, message: str) -> str:
    words = {
        "bool_type": "should be true or false",
        "finite_number": "should be a finite number",
        "int_from_float": "should be a whole number",
        "int_type": "should be a whole number",
        "float_type": "should be a number",
        "path_type": "should be a path: put it in quotes",
        "string_pattern_mismatch": "is none of these",
        "tuple_type": "should be a list",
    }
    return words.get(kind) or message.removeprefix("Value error, ").replace("Input should", "should", 1)


def _problem(name: str, texts: list[str], value: Any) -> str:
    setting: Setting | None = settings().get(name)
    if setting is None:  # a rule over several settings, whose message names them
        return "; ".join(texts)
    if texts == ["Field required"]:
        return f"{name} is not set. {setting.doc}"
    return f"{name} = {format_value(value)}: {', or '.join(texts)}. {setting.doc}"
