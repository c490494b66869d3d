"""The measured machine as a catalogue entry: what `--gpu this` means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from asbuilt.catalog.machine import Machine, from_calibration
from asbuilt.measure.calibrate import calibrate


def this_machine(
    *,
    refresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Machine:
    """Returns this machine as calibrated: its read bandwidth and its rates of matrix products."""
    return from_calibration(asdict(calibrate(refresh=refresh, say=say, warn=warn)))
