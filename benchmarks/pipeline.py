"""How much of what is possible does the pipeline reach? Real supervisor and processes, stub workers of known pace.

    python benchmarks/pipeline.py [--repeats 5] [--packs 400]

1. Bursty packs: the time from the first lease to the last pack freed, against the bound that follows from service
   times, places and order alone (no planner in it).
2. A target ten times slower than its four peers, against the four alone.

Prints the median and the spread of the ratios. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from heapq import heapify, heapreplace
from pathlib import Path
from statistics import median

from stub_worker import Pace

from draftmill.observe.metrics import read_rows
from draftmill.run.training import run_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from run_helpers import tiny_config

STUB = str(Path(__file__).with_name("stub_worker.py"))
#              targets, drafters, slots per drafter, seconds a drafter keeps a pack
ARRANGEMENTS = [(3, 1, 4, 0.01), (3, 1, 4, 0.03), (5, 1, 6, 0.008), (5, 3, 4, 0.02)]


def bound(packs: int, targets: int, drafters: int, slots: int, pace: Pace) -> float:
    """Seconds to the last pack freed if each pack is computed once, by whoever is idle.

    A pack starts after its predecessor, when a target is idle and the pack `slots` before it in its drafter's line is
    freed. It is read when it is filled and all drafters have ended the step before.
    """
    idle = [0.0] * targets
    heapify(idle)
    started, freed = 0.0, []
    for seq in range(packs):
        place = freed[seq - drafters * slots] if seq >= drafters * slots else 0.0
        started = max(started, idle[0], place)
        filled = started + pace.service(0, seq)
        heapreplace(idle, filled)
        step = seq // drafters * drafters
        met = max(freed[step - drafters : step], default=0.0)
        freed.append(max(filled, met) + pace.read)
    return max(freed)


def measure(packs: int, targets: int, drafters: int, slots: int, pace: Pace) -> float:
    """Seconds from the first lease to the end of the last step, by one clock."""
    with tempfile.TemporaryDirectory() as folder, silence():
        config = tiny_config(
            Path(folder), "run", "pipeline.mode=processes", f"train.steps={packs // drafters}",
            f"pipeline.targets={targets}", f"pipeline.drafters={drafters}", f"pipeline.slots={slots}",
        )  # fmt: skip
        run_training(config, command=(sys.executable, STUB, json.dumps(asdict(pace))))
        first = min(row["leased"] for row in read_rows(config.run.dir / "leases.jsonl"))
        return float((config.run.dir / "last-freed").read_text()) - first


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def spread(values: list[float]) -> str:
    return f"{median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--packs", type=int, default=400)
    arguments = parser.parse_args()
    packs = arguments.packs

    print("bursty packs (1 of 20 takes 0.3 s, the others 0.02 to 0.06 s): bound / measured")
    for targets, drafters, slots, read in ARRANGEMENTS:
        pace = Pace(usual=0.04, burst=0.3, burst_share=0.05, read=read)
        best = bound(packs // drafters * drafters, targets, drafters, slots, pace)
        ratios = [best / measure(packs, targets, drafters, slots, pace) for _ in range(arguments.repeats)]
        print(f"  {targets} targets, {drafters} drafters, {slots} slots, read {read} s: {spread(ratios)}", flush=True)

    print("one target of five ten times slower: time of its four peers alone / time of the five")
    usual, slow = Pace(usual=0.04, read=0.002), Pace(usual=0.04, slow_target=4, read=0.002)
    many = 8 * packs  # it is found out in the first of them
    ratios = [measure(many, 4, 1, 8, usual) / measure(many, 5, 1, 8, slow) for _ in range(arguments.repeats)]
    print(f"  {many} packs: {spread(ratios)}")


if __name__ == "__main__":
    main()
