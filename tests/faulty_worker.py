"""A worker that fails as FAULT says. On one document its target may die, hang-once, hang-9s, give nan or garbage-once,
be slow on all or raise on all; hang-drafter-once is the drafter's; no-pickle ends a worker that unpickles anything.

    python faulty_worker.py FAULT DOCUMENT_IDS MARKER ROLE INDEX FD RUN_DIR OPTIONS

DOCUMENT_IDS: the document's token ids, by which the target knows it. MARKER: a file; a fault other than nan happens
only while it exists, and `once` faults remove it first.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from draftmill.run import worker
from draftmill.target.model import NonFiniteFeatures, Target
from draftmill.train.step import EagerStep


def forbid_pickle(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickles {arguments}")


def main() -> int:
    fault, document, marker = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    original = Target.features

    def features(self, token_ids, lengths):
        if fault == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        for index, tokens in enumerate(token_ids.split(list(lengths))):
            if tokens.tolist() != document:
                continue
            if fault == "nan":
                raise NonFiniteFeatures([index])
            if fault == "die" and marker.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang-once" and marker.exists():
                marker.unlink()
                time.sleep(600)
            if fault == "hang-9s" and marker.exists():
                end = float(marker.read_text() or time.time() + 9)
                marker.write_text(str(end))  # for whoever is given the pack as well
                time.sleep(max(0.0, end - time.time()))
            if fault == "garbage-once" and marker.exists():
                marker.unlink()
                os.write(int(sys.argv[6]), b"\x14\0\0\0\0" + b"no record at all....")
        if fault == "slow":
            marker.with_name(f"{marker.name}.{os.getpid()}").touch()
            while len(list(marker.parent.glob(f"{marker.name}.*"))) < 3:  # nobody begins before all three are there
                time.sleep(0.05)
            time.sleep(0.1)
        return original(self, token_ids, lengths)

    step = EagerStep.__call__

    def hanging_step(self, pack, features):
        if marker.exists():
            marker.unlink()
            time.sleep(600)
        return step(self, pack, features)

    Target.features = features
    if fault == "hang-drafter-once":
        EagerStep.__call__ = hanging_step
    if fault == "no-pickle":
        sys.addaudithook(forbid_pickle)
    torch.set_num_threads(1)
    return worker.main(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
