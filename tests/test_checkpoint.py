"""Checkpoints: only complete ones are seen, whatever interrupted the writing."""

import errno
import multiprocessing
import os
import signal
import time

import pytest
import torch

from draftmill.train import checkpoint as module
from draftmill.train.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, save_checkpoint


def make(step, value=1.0, size=16):
    return Checkpoint(
        step=step,
        drafter={"fc.weight": torch.full((size, 4), value)},
        optimizer={"step.fc.weight": torch.tensor(float(step)), "exp_avg.fc.weight": torch.full((size, 4), -value)},
        ledger={"epoch.0": torch.arange(9, dtype=torch.uint8)},
        state={"position": {"seq": step * 2}},
    )


def test_round_trip_is_exact(tmp_path):
    folder = save_checkpoint(tmp_path, make(3, 0.1), keep=2)
    loaded = load_checkpoint(folder)
    assert loaded.step == 3 and loaded.state == {"position": {"seq": 6}}
    for name in ("drafter", "optimizer", "ledger"):
        for key, tensor in getattr(make(3, 0.1), name).items():
            assert torch.equal(getattr(loaded, name)[key], tensor)
            assert getattr(loaded, name)[key].dtype == tensor.dtype


def test_newest_by_number_and_what_is_skipped_is_named(tmp_path):
    """Case 66: 10 beside 9, a folder without optimizer, an unrelated folder, a half-written one."""
    for step in (9, 10, 11, 12):
        save_checkpoint(tmp_path, make(step), keep=9)
    (tmp_path / "step-11" / "optimizer.safetensors").unlink()
    (tmp_path / "step-12" / "COMPLETE").unlink()
    (tmp_path / "backup").mkdir()
    (tmp_path / ".writing-step-13").mkdir()
    complete, skipped = complete_checkpoints(tmp_path)
    assert [path.name for path in complete] == ["step-9", "step-10"]
    reasons = {path.name: reason for path, reason in skipped.items()}
    assert reasons.pop("step-11").startswith("optimizer.safetensors is missing")
    assert reasons == {
        "step-12": "its COMPLETE marker is missing",
        "backup": "not a checkpoint's name",
        ".writing-step-13": "half written or half removed",
    }
    with pytest.raises(ValueError, match=r"step-11 is no usable checkpoint: optimizer\.safetensors"):
        load_checkpoint(tmp_path / "step-11")


def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make(1), keep=1)
    save_checkpoint(tmp_path, make(2), keep=1)
    assert [p.name for p in complete_checkpoints(tmp_path)[0]] == ["step-2"]

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("save_file", "_sync"):  # a full disk while writing, and while flushing
        with monkeypatch.context() as patch:
            patch.setattr(module, function, full)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path, make(3), keep=1)
        assert [p.name for p in complete_checkpoints(tmp_path)[0]] == ["step-2"]
        assert complete_checkpoints(tmp_path)[1] == {}
    assert load_checkpoint(tmp_path / "step-2").step == 2


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """Case 34."""
    with pytest.raises(ValueError, match=r"not finite, first fc\.weight"):
        save_checkpoint(tmp_path, make(1, float("nan")), keep=1)
    assert not list(tmp_path.iterdir())


def _save_for_ever(root):
    torch.set_num_threads(1)
    for step in range(1, 10_000):
        save_checkpoint(root, make(step, float(step), size=40_000), keep=2)


def test_killed_at_random_moments_of_a_save(tmp_path):
    """Case 66: after each of 20 SIGKILLs the newest complete checkpoint loads and is whole."""
    context = multiprocessing.get_context("fork")
    seen = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        process = context.Process(target=_save_for_ever, args=(tmp_path,))
        process.start()
        time.sleep(0.02 + 0.15 * float(torch.rand((), generator=generator)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        complete, _ = complete_checkpoints(tmp_path)
        if complete:
            loaded = load_checkpoint(complete[-1])
            assert loaded.drafter["fc.weight"].eq(float(loaded.step)).all()
            assert loaded.optimizer["exp_avg.fc.weight"].eq(-float(loaded.step)).all()
            seen += 1
    assert seen >= 15
