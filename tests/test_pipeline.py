"""The pipeline of processes: the same weights however it is arranged and whoever dies, and nothing left behind."""

import os
import random
import signal

import pytest

from draftmill.observe.metrics import read_rows
from draftmill.run.training import run_training
from draftmill.text.dataset import PreparedDataset
from draftmill.train.checkpoint import complete_checkpoints
from draftmill.train.loop import FINISHED
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
from run_helpers import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(autouse=True)
def clean(folder):
    with nothing_left_behind(folder):
        yield


@pytest.fixture(scope="module")
def straight(folder):
    """The in-process reference: 16 steps over more than two epochs."""
    config = tiny_config(folder, "straight", "pipeline.mode=inprocess", "train.steps=16")
    assert run_training(config).reason == FINISHED
    return newest(config)


@pytest.mark.parametrize("targets", [1, 3])
def test_processes_equal_the_one_process_bit_for_bit(folder, straight, targets):
    config = tiny_config(folder, f"targets-{targets}", *PROCESSES, "train.steps=16", f"pipeline.targets={targets}")
    assert run_training(config).reason == FINISHED
    assert_same(newest(config), straight)


def test_more_drafters_or_accumulation_equal_within_rounding(folder):
    """P4, cases 41, 42: the same 6 packs per step over 1, 2 and 3 drafters; all drafters end with the same bits."""
    checkpoints = []
    for drafters, accumulation in ((1, 6), (2, 3), (3, 2)):
        config = tiny_config(
            folder, f"drafters-{drafters}", *PROCESSES, "train.steps=3", f"pipeline.drafters={drafters}",
            f"train.accumulation={accumulation}", "pipeline.targets=1",
        )  # fmt: skip
        assert run_training(config).reason == FINISHED
        assert len({row["digest"] for row in events(config, "drafter_finished")}) == 1
        assert len(events(config, "drafter_finished")) == drafters
        checkpoints.append(newest(config))
    for other in checkpoints[1:]:
        assert_same(checkpoints[0], other, exact=False)


def test_epochs_that_end_inside_a_step_over_two_drafters(folder):
    """Case 42: one drafter runs out of data before the other; all take the same steps, every document once."""
    config = tiny_config(
        folder,
        "ragged",
        *PROCESSES,
        "train.steps=null",
        "train.epochs=1",
        "pipeline.drafters=2",
        "train.accumulation=2",
    )
    result = run_training(config)
    assert result.reason == FINISHED and result.step == result.steps
    assert result.ended == {"trained": len(PreparedDataset.open(config.data.path))}


# Faults


def killed_run(folder, straight, name, *overrides, victim):
    """A run of 16 steps of which one worker is killed after the checkpoint of step 3."""
    config = tiny_config(folder, name, *PROCESSES, "train.steps=16", "run.checkpoint_every=3", *overrides)
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    os.kill(pid_of(config, victim), signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    assert_same(newest(config), straight)
    return config


def test_a_targets_death_touches_no_drafter_and_replays_no_step(folder, straight):
    config = killed_run(folder, straight, "target-killed", "pipeline.targets=2", victim="target 0")
    assert len([row for row in events(config, "spawned") if row["worker"] == "drafter 0"]) == 1
    assert events(config, "drafters_restart") == []
    steps = [row["step"] for row in read_rows(config.run.dir / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert len(events(config, "died")) == 1


def test_a_drafters_death_leaves_targets_loaded(folder, straight):
    config = killed_run(folder, straight, "drafter-killed", victim="drafter 0")
    assert len([row for row in events(config, "spawned") if row["worker"] == "target 0"]) == 1
    assert len(events(config, "drafters_restart")) == 1
    steps = [row["step"] for row in read_rows(config.run.dir / "metrics.jsonl")]
    assert steps == sorted(set(steps))


def test_a_supervisors_death_ends_all_workers_and_the_run_resumes_exactly(folder, straight):
    """Case 49 (a)."""
    config = tiny_config(folder, "supervisor-killed", *PROCESSES, "train.steps=16")
    process = start(config, folder)
    wait_for(checkpoint_exists(config, 3), process)
    process.kill()
    process.wait()
    wait_for(lambda: not workers_running(folder), seconds=15)
    assert run_training(config, resume=True).reason == FINISHED
    assert_same(newest(config), straight)


def test_sigterm_to_the_group_finishes_the_step_and_resumes_exactly(folder, straight):
    """Case 55: the signal reaches every worker too; none of them minds."""
    config = tiny_config(folder, "terminated", *PROCESSES, "train.steps=16", "pipeline.targets=2")
    process = start(config, folder, start_new_session=True)
    wait_for(checkpoint_exists(config, 3), process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) in (0, 3)
    assert run_training(config, resume=True).reason == FINISHED
    assert_same(newest(config), straight)


def test_a_poison_document_fails_and_the_rest_trains(folder):
    config = tiny_config(folder, "poison", *PROCESSES, "train.steps=null", "train.epochs=1", "pipeline.targets=2")
    command, _ = faulty(folder, config, "die", 5)
    result = run_training(config, command=command)
    rows = len(PreparedDataset.open(config.data.path))
    assert result.ended == {"trained": rows - 1, "failed: killed_target": 1}
    assert [row["documents"] for row in events(config, "documents_failed")] == [[5]]


def test_documents_without_finite_features_fail_as_in_one_process(folder):
    config = tiny_config(folder, "nan", *PROCESSES, "train.steps=null", "train.epochs=2", "pipeline.targets=2")
    command, _ = faulty(folder, config, "nan", 3)
    result = run_training(config, command=command)
    rows = len(PreparedDataset.open(config.data.path))
    assert result.ended == {"trained": 2 * (rows - 1), "failed: nonfinite_features": 2}


def test_a_hung_target_is_dumped_and_replaced(folder, straight):
    config = tiny_config(folder, "hung", *PROCESSES, "train.steps=16", "pipeline.lease_timeout_seconds=3")
    command, _ = faulty(folder, config, "hang-once", 5)
    assert run_training(config, command=command).reason == FINISHED
    assert_same(newest(config), straight)
    assert len(events(config, "hung")) == 1
    assert "faulty_worker.py" in (config.run.dir / "logs" / "target-0.log").read_text()  # the stack that hung


def test_two_runs_side_by_side(folder, straight):
    configs = [tiny_config(folder, f"side-{i}", *PROCESSES, "train.steps=16") for i in range(2)]
    processes = [start(config, folder) for config in configs]
    assert [process.wait(timeout=180) for process in processes] == [0, 0]
    for config in configs:
        assert_same(newest(config), straight)


def test_targets_work_at_the_same_time(folder):
    """With 3 slow targets at least 2 leases are in work for most of the time, once all are there."""
    config = tiny_config(
        folder, "side-by-side", *PROCESSES, "train.steps=120", "pipeline.targets=3", "pipeline.slots=6",
        "run.checkpoint_every=1000",
    )  # fmt: skip
    command, _ = faulty(folder, config, "slow", 5)
    run_training(config, command=command)
    leases = list(read_rows(config.run.dir / "leases.jsonl"))
    assert {row["seq"] for row in leases} == set(range(120))
    everyone = max(min(row["leased"] for row in leases if row["target"] == target) for target in range(3))
    begun = [row["leased"] for row in leases if row["leased"] >= everyone]
    in_work = [sum(row["leased"] <= moment < row["answered"] for row in leases) for moment in begun]
    assert len(begun) > 30 and sum(count >= 2 for count in in_work) > 0.8 * len(begun)


def kill_at_random(folder, name, kills, seed):
    """One run whose workers and supervisor are killed again and again, at random steps; then it ends by itself."""
    rng = random.Random(seed)
    steps = 15 * (kills + 2)  # a kill that meets nobody uses steps up, too
    quiet = tiny_config(folder, f"{name}-quiet", "pipeline.mode=inprocess", f"train.steps={steps}",
                        "run.checkpoint_every=7", "run.keep_checkpoints=2")  # fmt: skip
    run_training(quiet)
    config = tiny_config(
        folder, name, *PROCESSES, f"train.steps={steps}", "pipeline.targets=2", "run.checkpoint_every=7",
        "run.keep_checkpoints=2", "run.log_every=1", "pipeline.target_restarts=1000", "pipeline.drafter_restarts=1000",
    )  # fmt: skip

    def launch():
        return start(config, folder, resume=bool(complete_checkpoints(config.run.dir / "checkpoints")[0]))

    def steps_done():
        metrics = config.run.dir / "metrics.jsonl"
        return max((row["step"] for row in read_rows(metrics)), default=0) if metrics.exists() else 0

    process, landed = launch(), 0
    while landed < kills:
        reached = steps_done() + rng.randint(1, 9)
        wait_for(lambda reached=reached: steps_done() >= reached, process)
        victim = rng.choice(["target 0", "target 1", "drafter 0", "supervisor"])
        try:
            os.kill(process.pid if victim == "supervisor" else pid_of(config, victim), signal.SIGKILL)
        except (ProcessLookupError, TypeError):  # not started yet, or being started again
            continue
        landed += 1
        if victim == "supervisor":
            process.wait()
            wait_for(lambda: not workers_running(folder), seconds=15)
            process = launch()
    assert process.wait(timeout=600) == 0
    assert_same(newest(config), newest(quiet))
    assert [row["step"] for row in read_rows(config.run.dir / "metrics.jsonl")] == list(range(1, steps + 1))


def test_random_kills_change_nothing(folder):
    kill_at_random(folder, "random-kills", kills=6, seed=1)


@pytest.mark.soak
def test_a_hundred_random_kills_change_nothing(folder):
    """Cases 49, 66, 68."""
    kill_at_random(folder, "hundred-kills", kills=100, seed=2)
