"""What tests of the pipeline share: runs of their own, faults at a moment, and a look at what is left behind."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from draftmill.config.load import dump_config
from draftmill.observe.metrics import read_rows
from draftmill.text.dataset import PreparedDataset
from draftmill.train.checkpoint import complete_checkpoints, load_checkpoint

PROCESSES = ("pipeline.mode=processes",)
FAULTY = Path(__file__).parent / "faulty_worker.py"


@contextmanager
def nothing_left_behind(folder):
    """Case 49: no process, no shared memory, no half-written file, whatever a test did."""
    before = set(os.listdir("/dev/shm"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert workers_running(folder) == []
    assert set(os.listdir("/dev/shm")) <= before
    assert [path for name in (".writing-*", ".replaced-*", "rendezvous-*") for path in folder.rglob(name)] == []


def workers_running(folder):
    """Of runs below `folder`: others on this machine are not ours."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        worker = b"draftmill.run.worker" in words or str(FAULTY).encode() in words
        if entry.name.isdigit() and worker and any(str(folder).encode() in word for word in words):
            found.append(int(entry.name))
    return found


def newest(config):
    return load_checkpoint(complete_checkpoints(config.run.dir / "checkpoints")[0][-1])


def events(config, name=None):
    rows = list(read_rows(config.run.dir / "events.jsonl"))
    return rows if name is None else [row for row in rows if row["event"] == name]


def assert_same(a, b, exact=True):
    assert a.step == b.step
    assert a.state["position"] == b.state["position"] and a.state["ledger"] == b.state["ledger"]
    for name, tensor in a.ledger.items():
        assert torch.equal(tensor, b.ledger[name])
    for part in ("drafter", "optimizer"):
        for name, tensor in getattr(a, part).items():
            other = getattr(b, part)[name]
            if exact:
                assert torch.equal(tensor, other), f"{part}: {name}"
            else:
                torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-5)


def start(config, folder, resume=False, **options):
    """`draftmill train` as a user starts it."""
    path = folder / f"{config.run.dir.name}.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "draftmill.cli", "train", str(path), *(["--resume"] if resume else [])]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, **{**quiet, **options})


def wait_for(condition, process=None, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process is None or process.poll() is None, "the run ended before the fault"
        time.sleep(0.02)
    raise AssertionError(f"nothing happened for {seconds} s")


def pid_of(config, worker):
    spawned = [row["pid"] for row in events(config, "spawned") if row["worker"] == worker]
    return spawned[-1] if spawned else None


def checkpoint_exists(config, step):
    return lambda: (config.run.dir / "checkpoints" / f"step-{step}").exists()


def faulty(folder, config, fault, document):
    """(command of a worker that fails on `document`, the marker file that arms it)."""
    token_ids, _ = PreparedDataset.open(config.data.path).row(document)
    marker = folder / f"{config.run.dir.name}.marker"
    marker.touch()
    return (sys.executable, str(FAULTY), fault, json.dumps(token_ids.tolist()), str(marker)), marker
