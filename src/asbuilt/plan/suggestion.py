"""What to change where a plan does not meet what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One thing to change, and the options that change it; `fits` says whether it is enough by itself.

    Of serving `users` says how many there are then, of training `per_device_bytes` and `step_seconds` what it takes.
    """

    change: str
    option: str
    effect: str
    fits: bool
    users: int = 0
    per_device_bytes: int = 0
    step_seconds: float = 0.0

    def plain(self, *names: str) -> dict[str, str | bool | float]:
        """Returns the named fields as plain data."""
        return {name: getattr(self, name) for name in names}
