"""What all tests share: one thread, one hypothesis profile, and tests/ itself on the path (for `strategies`)."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# Of parity's draws, unless it is given: said before processes that run tests side by side take it over.
os.environ.setdefault("PARITY_SEED", str(random.SystemRandom().randrange(2**32)))
torch.set_num_threads(1)
settings.register_profile(
    "asbuilt",
    deadline=None,
    # a change is not to fail by a draw that has nothing to do with it; the same draws again need not be so many
    max_examples=25 if os.environ.get("CI") else 50,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("asbuilt")
