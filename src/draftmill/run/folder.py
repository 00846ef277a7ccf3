"""A run is a folder: config, manifest, metrics, events, checkpoints. One process owns it at a time.

    runs/NAME/
        config.yaml     the resolved settings
        manifest.json   versions, device, target and dataset identity
        metrics.jsonl   a row every few steps
        events.jsonl    starts, checkpoints, failures, ends
        checkpoints/    see train/checkpoint.py

A folder that holds a run is never reused by guess: continuing it must be asked for.
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TextIO

from draftmill import __version__
from draftmill.config.load import ConfigError, dump_config, load_config, trajectory_differences
from draftmill.config.schema import Config

RECORDED_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "triton")


class RunFolder:
    """Use as a context manager; entering takes the folder's lock."""

    def __init__(self, config: Config, resume: bool) -> None:
        self.path = config.run.dir
        self._config = config
        self._resume = resume
        self._lock: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = open(self.path / "run.lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"run.dir = {self.path}: another process is running there; wait for it or choose another folder"
            ) from None
        self._lock = lock  # the kernel lets go of it however this process ends
        try:
            self._claim()
        except BaseException:
            lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.close()

    def _claim(self) -> None:
        """A folder holds a run once it holds a checkpoint; a start that failed before that may be made again."""
        stored = self.path / "config.yaml"
        begun = any(self.checkpoints.glob("step-*"))
        if self._resume and not stored.exists():
            raise ConfigError(f"run.dir = {self.path} holds no run to resume: start without --resume")
        if begun and not self._resume:
            raise ConfigError(
                f"run.dir = {self.path} already holds a run: continue it with --resume, or choose another folder"
            )
        if begun and (changed := trajectory_differences(load_config(stored), self._config)):
            raise ConfigError(
                *(f"{change}: this would change the trained weights" for change in changed),
                source=f"{self.path} cannot be resumed with other settings; restore them or start a new run",
            )
        aside = self.path / ".config.yaml"
        aside.write_text(dump_config(self._config))
        aside.rename(stored)

    def write_manifest(self, **facts: Any) -> None:
        """What ran here, for a reader years later."""
        manifest = {
            "draftmill": __version__,
            "git_revision": _git_revision(),
            "python": platform.python_version(),
            "machine": platform.platform(),
            "packages": {name: found for name in RECORDED_PACKAGES if (found := _version(name))},
            **facts,
        }
        (self.path / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True, default=str) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Of the checkout that this code runs from, with "+" for uncommitted changes; None where there is none."""
    here = Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--abbrev=40", "--dirty=+"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.stdout.strip()
