"""What every worker process does: its entry, its signals, its end. The roles are in target_worker and drafter_worker.

    python -m draftmill.run.worker ROLE INDEX FD RUN_DIR OPTIONS

A worker reads its settings from the run folder and talks to the supervisor through one inherited socket. It ignores
the terminal's signals, and it never outlives the supervisor: the kernel ends it with its parent, and a closed socket
ends it too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftmill.config.load import load_config
from draftmill.run.channel import Channel, PeerClosed
from draftmill.wire import Failed

STACK_DUMP = signal.SIGUSR1  # answered with the stacks of all threads, in the worker's log
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    role, index, descriptor, run_dir, options = arguments
    _settle_in()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        _work(role, int(index), channel, Path(run_dir), json.loads(options))
    except PeerClosed:
        return 1  # the supervisor is gone, and with it everyone to tell
    except ConnectionError as error:  # a peer is gone; the supervisor knows of it, and this worker has no fault
        logging.getLogger("draftmill").warning("%s %s leaves: %s", role, index, error)
        return 1
    except Exception as error:
        logging.getLogger("draftmill").exception("%s %s failed", role, index)
        with suppress(PeerClosed):
            channel.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


def _work(role: str, index: int, channel: Channel, run_dir: Path, options: dict[str, Any]) -> None:
    config = load_config(run_dir / "config.yaml")
    import torch

    torch.set_num_threads(options["threads"])
    if role == "target":
        from draftmill.run.target_worker import run_target

        run_target(channel, config, options)
    else:
        from draftmill.run.drafter_worker import run_drafter

        run_drafter(index, channel, config, options)


def _settle_in() -> None:
    """Signals: stops come by socket, so that Ctrl-C in a terminal cannot lose a step; a dead parent ends us."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACK_DUMP, all_threads=True)
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
