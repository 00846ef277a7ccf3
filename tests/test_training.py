"""Whole runs in one process: exact resume, conservation, refusals, and what a bad step leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import tiny_models
from draftmill.config.load import ConfigError, dump_config
from draftmill.drafter.network import Drafter
from draftmill.observe.metrics import read_rows
from draftmill.run import training
from draftmill.run.failure import RunFailed
from draftmill.run.training import run_training
from draftmill.target.model import NonFiniteFeatures, Target
from draftmill.text.dataset import PreparedDataset
from draftmill.text.prepare import PrepareOptions, prepare
from draftmill.train import step as step_module
from draftmill.train.checkpoint import complete_checkpoints, load_checkpoint
from draftmill.train.loop import FINISHED
from run_helpers import tiny_config, write_conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def newest(config):
    return load_checkpoint(complete_checkpoints(config.run.dir / "checkpoints")[0][-1])


def assert_same_checkpoint(a, b):
    assert a.step == b.step
    for part in ("drafter", "optimizer", "ledger"):
        ours, theirs = getattr(a, part), getattr(b, part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for key in ("position", "ledger", "spec", "steps", "provenance"):
        assert a.state[key] == b.state[key]


def trajectory(config):
    """Metric rows without what depends on the clock."""
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if k not in clock} for row in read_rows(config.run.dir / "metrics.jsonl")]


def stop_after(monkeypatch, steps):
    asked = iter(range(10_000))
    rule = lambda *_: lambda: "test" if next(asked) == steps else None  # noqa: E731
    monkeypatch.setattr(training, "stop_rule", rule)


@pytest.mark.parametrize(
    "overrides", [(), ("train.accumulation=2", "train.noise.kind=gaussian", "train.noise.scale=0.1")]
)
def test_interrupted_and_resumed_equals_straight_bit_for_bit(folder, monkeypatch, overrides):
    """P5, case 68: weights, moments, learning rate, order, counts; over an epoch's border; stopped twice."""
    tag = f"{len(overrides)}"
    straight = tiny_config(folder, f"straight-{tag}", "train.steps=12", *overrides)
    assert run_training(straight).reason == FINISHED
    broken = tiny_config(folder, f"broken-{tag}", "train.steps=12", *overrides)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        result = run_training(broken)
        assert (result.reason, result.step) == ("test", 4)
        stop_after(patch, 5)
        assert run_training(broken, resume=True).step == 9
    assert run_training(broken, resume=True).reason == FINISHED
    assert_same_checkpoint(newest(straight), newest(broken))
    rows = trajectory(straight), trajectory(broken)
    last = rows[0][-1]
    assert last["epoch"] >= 1 and last["step"] == 12
    assert rows[1][-1]["lr"] == last["lr"] and rows[1][-1]["loss"] == last["loss"]


def test_killed_and_resumed_equals_straight_bit_for_bit(folder):
    """Case 66: SIGKILL at an unplanned moment; what was trained after the last checkpoint is trained again."""
    straight = tiny_config(folder, "kill-straight", "train.steps=40")
    run_training(straight)
    killed = tiny_config(folder, "killed", "train.steps=40")
    process = start(killed, folder)
    wait_for(lambda: (killed.run.dir / "checkpoints" / "step-9").exists(), process)
    process.kill()
    process.wait()
    run_training(killed, resume=True)
    assert_same_checkpoint(newest(straight), newest(killed))
    steps = sorted({*range(2, 41, 2), *range(3, 41, 3)})  # every second step, and before every checkpoint
    assert [row["step"] for row in trajectory(killed)] == steps
    assert trajectory(killed) == trajectory(straight)


def test_sigterm_finishes_the_step_saves_and_leaves_with_code_3(folder):
    """Case 55."""
    config = tiny_config(folder, "terminated", "train.steps=4000")
    process = start(config, folder)
    wait_for(lambda: (config.run.dir / "checkpoints" / "step-3").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 3
    events = [row for row in read_rows(config.run.dir / "events.jsonl") if row["event"] == "stopped"]
    assert [event["reason"] for event in events] == ["SIGTERM"]
    assert newest(config).step == events[0]["step"]


def start(config, folder):
    path = folder / f"{config.run.dir.name}.yaml"
    path.write_text(dump_config(config))
    return subprocess.Popen(
        [sys.executable, "-m", "draftmill.cli", "train", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(condition, process):
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended before it was interrupted"
        time.sleep(0.05)
    raise AssertionError("nothing happened for a minute")


def test_each_document_once_per_epoch_and_orders_differ(folder):
    """Case 68: over 3 epochs the ledger counts every document three times, and nothing stays open."""
    config = tiny_config(folder, "epochs", "train.steps=null", "train.epochs=3", "train.accumulation=2")
    result = run_training(config)
    rows = len(PreparedDataset.open(config.data.path))
    assert result.ended == {"trained": 3 * rows}
    assert newest(config).state["ledger"]["closed"] == {str(epoch): {"trained": rows} for epoch in range(3)}
    assert newest(config).ledger == {}
    assert result.step == result.steps


def test_every_trained_tensor_moves_and_nothing_else_does(folder):
    """Case 46: at a small learning rate, with bf16 compute."""
    config = tiny_config(folder, "moves", "train.dtype=bfloat16", "target.dtype=bfloat16", "train.lr=1e-4")
    before = Target.load(config.target.path, "bfloat16", "cpu", (1, 3)).vocabulary().embedding.clone()
    run_training(config)
    after = newest(config)
    fresh = Drafter(training.DrafterSpec.from_dict(after.state["spec"]))
    fresh.initialise(config.train.seed)
    for name, start in fresh.state_dict().items():
        assert after.drafter[name].dtype == torch.float32
        assert not torch.equal(after.drafter[name], start), f"{name} did not move"
    assert all(t.dtype == torch.float32 for t in after.optimizer.values())
    assert torch.equal(before, Target.load(config.target.path, "bfloat16", "cpu", (1, 3)).vocabulary().embedding)


def test_documents_whose_features_are_not_finite_fail_alone_with_a_reason(folder, monkeypatch):
    """Case 51 (d): the guilty document is counted, the rest of its pack trains."""
    original, calls = Target.features, []

    def features(self, token_ids, lengths):
        calls.append(len(lengths))
        if len(calls) == 2:
            raise NonFiniteFeatures([0])
        return original(self, token_ids, lengths)

    monkeypatch.setattr(Target, "features", features)
    config = tiny_config(folder, "nonfinite-features", "train.steps=null", "train.epochs=1")
    result = run_training(config)
    rows = len(PreparedDataset.open(config.data.path))
    assert calls[2] == calls[1] - 1 > 0
    assert result.ended == {"trained": rows - 1, "failed: nonfinite_features": 1}
    events = [row for row in read_rows(config.run.dir / "events.jsonl") if row["event"] == "documents_failed"]
    assert [(len(row["documents"]), row["reason"]) for row in events] == [(1, "nonfinite_features")]


def test_a_pack_without_any_document_left_is_a_micro_step_of_zero_weight(folder, monkeypatch):
    """Case 42: the update is skipped, the step counts, and training goes on."""
    original, calls = Target.features, []

    def features(self, token_ids, lengths):
        calls.append(len(lengths))
        if len(calls) == 2:
            raise NonFiniteFeatures(list(range(len(lengths))))
        return original(self, token_ids, lengths)

    monkeypatch.setattr(Target, "features", features)
    config = tiny_config(folder, "empty-pack", "train.steps=null", "train.epochs=1")
    result = run_training(config)
    rows = len(PreparedDataset.open(config.data.path))
    assert result.ended == {"trained": rows - calls[1], "failed: nonfinite_features": calls[1]}
    skipped = [row for row in read_rows(config.run.dir / "events.jsonl") if row["event"] == "update_skipped"]
    assert [(row["step"], row["reason"]) for row in skipped] == [(2, "no_weight")]


def test_a_run_that_learns_nothing_fails(folder, monkeypatch):
    """Cases 34, 51 (c): no step moves a weight, so there is no "finished"."""

    def features(self, token_ids, lengths):
        raise NonFiniteFeatures(list(range(len(lengths))))

    monkeypatch.setattr(Target, "features", features)
    config = tiny_config(folder, "nothing", "train.steps=4")
    with pytest.raises(RunFailed, match="no weight has moved in the last 4 steps, the last one for no_weight"):
        run_training(config)


def test_a_start_that_failed_can_be_made_again(folder):
    config = tiny_config(folder, "again", "data.path=/nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        run_training(config)
    broken = tiny_config(folder, "again", "target.device=cuda")
    with pytest.raises(ValueError, match="no GPU here"):
        run_training(broken)
    assert run_training(tiny_config(folder, "again")).reason == FINISHED


def test_other_weights_are_another_target(folder, tmp_path):
    """Case 76: the same shapes and settings, other weights: refused on resume."""
    config = tiny_config(folder, "weights")
    run_training(config)
    weights = config.target.path / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-4] + b"\x00\x00\x00\x40")
        with pytest.raises(ConfigError, match="is not the target of this run"):
            run_training(config, resume=True)
    finally:
        weights.write_bytes(kept)


def test_the_mask_token_rule_holds_at_training_too(folder, caplog):
    """Case 9 (b, c): never an end or pad token; one that occurs in the data is warned of, with its count."""
    with pytest.raises(ConfigError, match=r"drafter\.mask_token_id 1 is the target's stop token"):
        run_training(tiny_config(folder, "mask-eos", f"drafter.mask_token_id={tiny_models.EOS}"))
    config = tiny_config(folder, "mask-text", "drafter.mask_token_id=72", "train.steps=1")
    dataset = PreparedDataset.open(config.data.path)
    count = sum(int((dataset.row(i)[0] == 72).sum()) for i in range(len(dataset)))
    assert count > 0
    run_training(config)
    assert f"drafter.mask_token_id 72 occurs {count} times" in caplog.text


def test_documents_longer_than_the_target_holds_are_refused(folder):
    config = tiny_config(folder, "too-long")
    path = config.target.path / "config.json"
    kept = path.read_text()
    longest = int(PreparedDataset.open(config.data.path).lengths.max())
    try:
        path.write_text(json.dumps({**json.loads(kept), "max_position_embeddings": longest - 1}))
        with pytest.raises(
            ConfigError, match=f"documents of up to {longest} tokens, but the target holds {longest - 1}"
        ):
            run_training(config)
    finally:
        path.write_text(kept)


def test_a_step_that_is_not_finite_never_reaches_the_weights(folder, monkeypatch):
    """Case 34: its documents are entered as nonfinite_step; every checkpoint is finite."""
    original, calls = step_module.add_noise, []

    def add_noise(features, *rest):
        calls.append(1)
        return original(features, *rest) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(step_module, "add_noise", add_noise)
    config = tiny_config(folder, "nonfinite-step", "run.checkpoint_every=1")
    result = run_training(config)
    assert result.ended["failed: nonfinite_step"] > 0
    complete, _ = complete_checkpoints(config.run.dir / "checkpoints")
    states = {int(path.name.removeprefix("step-")): load_checkpoint(path) for path in complete}
    assert sorted(states) == list(range(7))
    assert torch.equal(states[2].drafter["fc.weight"], states[3].drafter["fc.weight"])
    assert not torch.equal(states[3].drafter["fc.weight"], states[4].drafter["fc.weight"])
    rows = trajectory(config)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint_valid(folder, monkeypatch):
    """Cases 66, 80."""
    from draftmill.train import checkpoint

    original = checkpoint.save_file

    def save_file(tensors, path):
        if "step-6" in str(path):
            raise OSError(28, "No space left on device", str(path))
        original(tensors, path)

    config = tiny_config(folder, "full-disk")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save_file)
        with pytest.raises(OSError, match="No space left"):
            run_training(config)
    assert newest(config).step == 3
    assert run_training(config, resume=True).reason == FINISHED


def test_a_run_goes_on_with_a_dataset_that_has_grown(tmp_path, monkeypatch):
    """Its first epoch keeps the documents it began with; the new ones take part in the second."""
    config = tiny_config(tmp_path, "grown", "train.steps=null", "train.epochs=2")
    rows = len(PreparedDataset.open(config.data.path))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert run_training(config).step == 2
    more = write_conversations(tmp_path / "more.jsonl", 9, seed=5)
    options = PrepareOptions(stop_ids={tiny_models.EOS}, vocab_size=tiny_models.VOCAB, append=True)
    prepare([more], tiny_models.tiny_tokenizer(), config.data.path, options)
    result = run_training(config, resume=True)
    assert (result.reason, result.step) == (FINISHED, result.steps)
    assert result.ended == {"trained": rows + (rows + 9)}


def test_a_run_folder_is_never_reused_by_guess(folder):
    config = tiny_config(folder, "claimed")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        run_training(config, resume=True)
    run_training(config)
    with pytest.raises(ConfigError, match="continue it with --resume"):
        run_training(config)
    changed = tiny_config(folder, "claimed", "train.lr=2e-3", "data.pack_tokens=256", "run.log_every=5")
    with pytest.raises(ConfigError, match=r"train\.lr: 0\.001 -> 0\.002") as error:
        run_training(changed, resume=True)
    assert "data.pack_tokens: 128 -> 256" in str(error.value) and "log_every" not in str(error.value)


def test_two_processes_cannot_share_a_run_folder(folder):
    config = tiny_config(folder, "shared", "train.steps=4000")
    process = start(config, folder)
    try:
        wait_for(lambda: (config.run.dir / "checkpoints" / "step-0").exists(), process)
        with pytest.raises(ConfigError, match="another process is running there"):
            run_training(config, resume=True)
    finally:
        process.kill()
        process.wait()


def test_a_dataset_of_another_tokenizer_is_refused(folder):
    config = tiny_config(folder, "other-tokenizer")
    manifest = config.data.path / "manifest.json"
    kept = manifest.read_text()
    try:
        values = json.loads(kept)
        values["target"]["tokenizer_hash"] = "0" * 64
        manifest.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="tokenizer_hash 0000"):
            run_training(config)
    finally:
        manifest.write_text(kept)


def test_the_manifest_says_what_ran(folder):
    config = tiny_config(folder, "manifest")
    run_training(config)
    manifest = json.loads((config.run.dir / "manifest.json").read_text())
    assert manifest["numerics"]["threads"] == 1 and manifest["numerics"]["devices"] == ["cpu"]
    assert manifest["packages"]["torch"] == manifest["numerics"]["torch"]
    assert manifest["dataset"]["fingerprint"] == PreparedDataset.open(config.data.path).fingerprint
    assert manifest["drafter"]["target_layer_ids"] == [1, 3]
    assert os.listdir(config.run.dir / "checkpoints") and not list(config.run.dir.glob("checkpoints/.*"))
