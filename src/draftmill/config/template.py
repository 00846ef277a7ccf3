"""A YAML file to start from: every setting with its default, explained by the schema's own words."""

from __future__ import annotations

import textwrap
from typing import Any

from draftmill.config.load import format_value
from draftmill.config.names import Setting, sections, settings

# Settings without a default that everybody must choose; the target's path comes from the caller.
STARTING_VALUES = {"data.path": "data/prepared", "train.epochs": 6, "run.dir": "runs/first"}

_HEAD = """\
# Settings of a training run. Check and start it with:   draftmill train THIS_FILE
# Change one for a single run with key=value:            draftmill train THIS_FILE train.lr=3e-4
# Relative paths are relative to the directory the command is started in. null means: derived from the target."""


def template(target_path: str) -> str:
    """Commented YAML for the target in `target_path`, which `load_config` reads as it is."""
    values: dict[str, Any] = {name: setting.default for name, setting in settings().items()}
    values |= STARTING_VALUES | {"target.path": target_path}
    lines = [_HEAD]
    opened: list[str] = []
    for name, setting in settings().items():
        *section, key = name.split(".")
        for depth in range(1, len(section) + 1):
            if opened[:depth] != section[:depth]:
                lines += [*([""] if depth == 1 else []), *_open(section[:depth])]
        opened = section
        lines += _entry(setting, key, values[name], indent="  " * len(section))
    return "\n".join(lines) + "\n"


def _open(section: list[str]) -> list[str]:
    indent = "  " * (len(section) - 1)
    return [*_comment(sections()[".".join(section)], indent), f"{indent}{section[-1]}:"]


def _entry(setting: Setting, key: str, value: Any, indent: str) -> list[str]:
    doc = setting.doc
    if any(str(choice) not in doc for choice in setting.choices):
        doc += f" One of {', '.join(map(str, setting.choices))}."
    return [*_comment(doc, indent), f"{indent}{key}: {format_value(value)}"]


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
