"""Settings of the whole suite: no network, repeatable property tests, two threads."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before anything imports torch or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "2")

settings.register_profile("draftmill", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("draftmill")
