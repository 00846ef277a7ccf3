"""The repository as a project: what is pinned, what is shipped, what its files promise."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import draftmill

REPO = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (REPO / "constraints.txt").read_text().splitlines()]
    return {normal(line.split("==")[0]): line.split("==")[1] for line in lines if line}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_every_direct_dependency_is_pinned_within_its_bounds() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["gguf"], *extras["dev"]]
    assert names(requirements) <= set(pins())
    for requirement in requirements:
        name, floor, *_ = re.split(r">=|,", requirement)
        assert numbers(pins()[normal(name)]) >= numbers(floor), requirement


def test_version_is_stated_once() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", draftmill.__version__)


def test_tools_agree_on_the_oldest_python() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py311"
    assert PROJECT["tool"]["mypy"]["python_version"] == "3.11"


def test_license_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (REPO / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("target", ["demo", "test", "check", "setup"])
def test_make_targets_set_themselves_up(target: str) -> None:
    """Asked as if nothing were installed, each begins by making .venv."""
    asked = ["make", "--dry-run", "--always-make", "VENV=no-such-venv", target]
    done = subprocess.run(asked, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = done.stdout
    torch, project = commands.index("torch==" + pins()["torch"]), commands.index(".[dev,gguf]")
    assert commands.index("-m venv no-such-venv") < torch < project


def test_ci_runs_what_a_developer_runs() -> None:
    script = REPO / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    assert "make check test" in script.read_text()
