"""The gradient exchange between drafters on one machine: one all-reduce of one flat tensor, over loopback."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor


class ExchangeLost(ConnectionError):
    """Another drafter is gone. No fault of this one."""


class Gloo:
    """`train.gradients.Exchange` of `world` processes that meet at the file `rendezvous`, new for every meeting."""

    def __init__(self, rank: int, world: int, rendezvous: Path, timeout: timedelta) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's only way to be told: listen on this machine alone
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous.absolute()}", rank=rank, world_size=world, timeout=timeout
        )

    def sum(self, flat: Tensor) -> None:
        """Waits for all; raises ExchangeLost where one of them has ended, or does not come within the time limit."""
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:  # gloo's connections and time limits have no class of their own
            raise ExchangeLost(f"the exchange with the other drafters broke: {error}") from error
