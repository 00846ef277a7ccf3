"""Imports point down only: cli, run, then what computes, then what it computes with, then wire and config."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "draftmill"
ROWS = [
    {"cli"},
    {"run"},
    {"train", "target", "evaluate", "export"},
    {"drafter", "text", "slots", "observe"},
    {"wire", "config"},
]
LEVEL = {part: level for level, row in enumerate(ROWS) for part in row}
ALLOWED_NEIGHBOURS = {("evaluate", "target")}
LIGHT = ["config.load", "config.resolve", "config.template", "wire", "cli.main", "observe.metrics", "observe.console"]


def part_of(module: str) -> str | None:
    """`draftmill.target.model` -> target; None outside the package."""
    names = module.split(".")
    return names[1] if names[0] == "draftmill" and len(names) > 1 else None


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in `file`, those inside functions included."""
    package = ("draftmill", *file.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from draftmill import target` imports a part by name.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_imports_point_down() -> None:
    wrong = []
    for file in sorted(SOURCE.rglob("*.py")):
        ours = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if ours == "__init__":
            continue
        assert ours in LEVEL, f"{file} is in no known part: give it a row here and in the README"
        for line, module in imports(file):
            theirs = part_of(module)
            if theirs in (None, ours, "__version__"):
                continue
            if LEVEL[ours] >= LEVEL[theirs] and (ours, theirs) not in ALLOWED_NEIGHBOURS:
                wrong.append(f"{file.relative_to(SOURCE)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_relative_imports_are_resolved() -> None:
    found = {module for _, module in imports(SOURCE / "text" / "prepare.py")}
    assert {part_of(module) for module in found} >= {"text"}


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    check = f"import sys, draftmill.{module}; print({{'torch', 'transformers', 'pyarrow'}} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "set()", done.stderr
