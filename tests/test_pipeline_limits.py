"""What a run must bear, and what it may not do: hangs, garbage, full disks, leftovers, ports, pickles, growth."""

import os
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

import pytest

import tiny_models
from draftmill.observe.metrics import read_rows
from draftmill.run.failure import RunFailed
from draftmill.run.training import run_training
from draftmill.text.prepare import PrepareOptions, prepare
from draftmill.train.checkpoint import complete_checkpoints
from draftmill.train.loop import FINISHED
from faulty_worker import forbid_pickle
from pipeline_helpers import (
    PROCESSES,
    assert_same,
    checkpoint_exists,
    events,
    faulty,
    newest,
    nothing_left_behind,
    pid_of,
    start,
    wait_for,
    workers_running,
)
from run_helpers import tiny_config, write_conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(autouse=True)
def clean(folder):
    with nothing_left_behind(folder):
        yield


@pytest.fixture(scope="module")
def straight(folder):
    config = tiny_config(folder, "straight", "pipeline.mode=inprocess", "train.steps=16")
    assert run_training(config).reason == FINISHED
    return newest(config)


def spawned(config, worker):
    return len([row for row in events(config, "spawned") if row["worker"] == worker])


# Workers that hang or talk nonsense


def test_a_hung_drafter_is_dumped_and_all_drafters_start_anew(folder, straight):
    config = tiny_config(folder, "hung", *PROCESSES, "train.steps=16", "pipeline.step_timeout_seconds=4")
    command, _ = faulty(folder, config, "hang-drafter-once", 5)
    assert run_training(config, command=command).reason == FINISHED
    assert_same(newest(config), straight)
    assert [row["worker"] for row in events(config, "hung")] == ["drafter 0"]
    assert "hanging_step" in (config.run.dir / "logs" / "drafter-0.log").read_text()
    assert spawned(config, "target 0") == 1 and spawned(config, "drafter 0") == 2


def test_a_drafter_that_waits_for_anothers_pack_is_not_hung(folder):
    """One drafter has packs and waits in the exchange, far over its time limit, for a pack of the other."""
    config = tiny_config(
        folder, "waiting", *PROCESSES, "train.steps=12", "pipeline.drafters=2", "pipeline.targets=2",
        "pipeline.step_timeout_seconds=4",
    )  # fmt: skip
    command, _ = faulty(folder, config, "hang-9s", 5)
    assert run_training(config, command=command).reason == FINISHED
    assert max(row["answered"] - row["leased"] for row in read_rows(config.run.dir / "leases.jsonl")) > 8
    assert events(config, "hung") == events(config, "drafters_restart") == []


def test_garbage_from_a_target_ends_that_target_alone(folder, straight):
    config = tiny_config(folder, "garbage", *PROCESSES, "train.steps=16", "pipeline.targets=2")
    command, _ = faulty(folder, config, "garbage-once", 5)
    assert run_training(config, command=command).reason == FINISHED
    assert_same(newest(config), straight)
    (death,) = events(config, "died")
    assert death["worker"].startswith("target") and "sent what cannot be read" in death["how"]


def test_targets_that_always_fail_end_the_run_within_a_bound(folder):
    """Case 51 (c): after the restarts that each may have, with the target's own words."""
    config = tiny_config(
        folder, "raising", *PROCESSES, "train.steps=16", "pipeline.targets=2", "pipeline.target_restarts=1"
    )
    command, _ = faulty(folder, config, "raise", 5)
    with pytest.raises(RunFailed, match=r"no target is left.*illegal memory access"):
        run_training(config, command=command)
    assert spawned(config, "target 0") == spawned(config, "target 1") == 2
    assert newest(config).step == 0


def process_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize("victim", ["drafter 0", "drafter 1"])
def test_one_of_two_drafters_dies_and_both_start_anew(folder, victim):
    """The survivor loses the exchange and may leave first: still one death, not a failure of its own."""
    quiet = tiny_config(folder, f"two-quiet-{victim[-1]}", *PROCESSES, "train.steps=12", "pipeline.drafters=2")
    assert run_training(quiet).reason == FINISHED
    config = tiny_config(folder, f"two-{victim[-1]}", *PROCESSES, "train.steps=12", "pipeline.drafters=2")
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    process.send_signal(signal.SIGSTOP)  # so that it hears of both ends at once, the survivor's with its reason
    survivor = pid_of(config, "drafter 1" if victim == "drafter 0" else "drafter 0")
    os.kill(pid_of(config, victim), signal.SIGKILL)
    wait_for(lambda: process_state(survivor) == "Z", seconds=20)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=120) == 0
    assert_same(newest(config), newest(quiet))
    assert len(events(config, "drafters_restart")) == 1 and spawned(config, "target 0") == 1


def test_a_drafter_dies_after_the_dataset_has_grown(tmp_path):
    """It goes back to a checkpoint that is older than the growth; the new rows still enter at the second epoch."""
    settings = ("train.steps=null", "train.epochs=14", "run.log_every=1", "run.checkpoint_every=1000")
    config = tiny_config(tmp_path, "grown", *PROCESSES, *settings, "train.time_limit_minutes=1e-9", seed=3)
    assert run_training(config).step == 0
    more = write_conversations(tmp_path / "more.jsonl", 9, seed=5)
    options = PrepareOptions(stop_ids={tiny_models.EOS}, vocab_size=tiny_models.VOCAB, append=True)
    prepare([more], tiny_models.tiny_tokenizer(), config.data.path, options)
    shutil.copytree(config.run.dir, tmp_path / "quiet")
    quiet = tiny_config(tmp_path, "quiet", "pipeline.mode=inprocess", *settings, seed=3)
    result = run_training(quiet, resume=True)
    assert result.ended == {"trained": 24 + 13 * (24 + 9)}
    config = tiny_config(tmp_path, "grown", *PROCESSES, *settings, seed=3)
    process = start(config, tmp_path, resume=True)
    wait_for(lambda: newest_step(config) >= 12, process)
    os.kill(pid_of(config, "drafter 0"), signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert len(events(config, "drafters_restart")) == 1
    assert_same(newest(config), newest(quiet))


# Disks


@pytest.mark.parametrize("worker", ["drafter 0", "supervisor"])
def test_a_disk_that_is_full_in_the_middle_of_a_file(folder, straight, worker):
    """Case 66, with the operating system's own refusal: a file may not grow over a few bytes."""
    config = tiny_config(folder, f"full-{worker[:4]}", *PROCESSES, "train.steps=16")
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    pid = process.pid if worker == "supervisor" else pid_of(config, worker)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    assert process.wait(timeout=60) == 1
    complete, skipped = complete_checkpoints(config.run.dir / "checkpoints")
    assert complete and not skipped
    assert run_training(config, resume=True).reason == FINISHED
    assert_same(newest(config), straight)


def test_a_checkpoint_that_cannot_be_written_is_named(folder):
    config = tiny_config(folder, "blocked", *PROCESSES, "train.steps=16")
    (config.run.dir / "checkpoints").mkdir(parents=True)
    blocker = config.run.dir / "checkpoints" / ".writing-step-6"
    blocker.write_text("a file where a folder must go")
    with pytest.raises((RunFailed, OSError), match="writing-step-6"):
        run_training(config)
    assert newest(config).step == 3
    blocker.unlink(missing_ok=True)


def test_what_a_dead_run_left_is_removed(folder, straight):
    config = tiny_config(folder, "leftovers", *PROCESSES, "train.steps=16", "train.time_limit_minutes=null")
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    process.kill()
    process.wait()
    wait_for(lambda: not workers_running(folder), seconds=15)
    half = config.run.dir / "checkpoints" / ".writing-step-99"
    half.mkdir()
    (half / "drafter.safetensors").write_bytes(b"half")
    (config.run.dir / "rendezvous-7").write_bytes(b"")
    with (config.run.dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99')
    assert run_training(config, resume=True).reason == FINISHED
    assert_same(newest(config), straight)


# Signals


def test_a_second_signal_leaves_at_once(folder, straight):
    """The first one waits for a drafter that hangs; the second does not, and the run resumes exactly."""
    config = tiny_config(folder, "twice", *PROCESSES, "train.steps=16")
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    os.kill(pid_of(config, "drafter 0"), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: events(config, "stopping"), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    wait_for(lambda: not workers_running(folder), seconds=15)
    assert run_training(config, resume=True).reason == FINISHED
    assert_same(newest(config), straight)


# What nobody may do


def listening(pid):
    """Addresses that a process listens on, as /proc has them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            bound = fields[3] == "0A" or table.startswith("udp")  # 0A: TCP_LISTEN
            if bound and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return found


def is_loopback(address):
    words = [struct.pack("<I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
    if len(words) == 1:
        return words[0][0] == 127
    return b"".join(words) == bytes(15) + b"\1" or (b"".join(words[:2]) == bytes(8) and words[3][0] == 127)


def test_nothing_listens_beyond_loopback(folder):
    """Two drafters exchange gradients over sockets; no other machine can reach one."""
    config = tiny_config(
        folder, "ports", *PROCESSES, "train.steps=4000", "pipeline.drafters=2", "run.checkpoint_every=5"
    )
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 5), process)
    pids = [process.pid, *(pid_of(config, worker) for worker in ("target 0", "drafter 0", "drafter 1"))]
    addresses = {pid: listening(pid) for pid in pids}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 3
    assert addresses[pids[2]] and addresses[pids[3]]  # gloo does listen
    assert not addresses[pids[0]] and not addresses[pids[1]]
    assert all(is_loopback(address) for found in addresses.values() for address in found), addresses


def test_nothing_is_unpickled(folder, straight, monkeypatch):
    """Neither from a disk nor from a peer, by any process, from start to resume."""
    armed = [True]
    sys.addaudithook(lambda event, arguments: armed[0] and forbid_pickle(event, arguments))  # stays; disarmed below
    try:
        half = tiny_config(folder, "pickle", *PROCESSES, "train.steps=16", "train.time_limit_minutes=1e-6")
        command, _ = faulty(folder, half, "no-pickle", 5)
        assert run_training(half, command=command).reason.startswith("train.time_limit")
        whole = tiny_config(folder, "pickle", *PROCESSES, "train.steps=16")
        assert run_training(whole, resume=True, command=command).reason == FINISHED
    finally:
        armed[0] = False
    assert_same(newest(whole), straight)


# Growth


def resident(pid):
    """Bytes that are this process's own: no shared memory, no mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no RssAnon")


@pytest.mark.soak
def test_memory_stays_flat_over_20000_packs(folder):
    """Of each process: as much after 20,000 packs and 1,500 epochs as after 5,000."""
    config = tiny_config(
        folder, "long", *PROCESSES, "train.steps=20000", "pipeline.targets=2", "run.checkpoint_every=2500",
        "run.log_every=100", "run.keep_checkpoints=2",
    )  # fmt: skip
    process = start(config, folder)
    memory, files = {}, {}
    for step in (5000, 10000, 20000):
        wait_for(lambda step=step: newest_step(config) >= step - 100, process, seconds=1200)
        pids = {"supervisor": process.pid} | {w: pid_of(config, w) for w in ("target 0", "target 1", "drafter 0")}
        memory[step] = {worker: resident(pid) for worker, pid in pids.items()}
        files[step] = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids.values()}
        print(step, {worker: f"{size / 2**20:.1f} MiB" for worker, size in memory[step].items()})
    assert process.wait(timeout=300) == 0
    for worker, size in memory[20000].items():
        assert size - memory[5000][worker] < 4 << 20, worker
    assert files[20000] == files[5000]
    assert (config.run.dir / "events.jsonl").stat().st_size < 1 << 16


def newest_step(config):
    metrics = config.run.dir / "metrics.jsonl"
    return max((row["step"] for row in read_rows(metrics)), default=0) if metrics.exists() else 0
