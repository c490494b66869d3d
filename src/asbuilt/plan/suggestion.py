"""A change that is suggested if a plan does not meet its requirements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change and its options; `fits` tells whether it suffices by itself.

    For serving, `users` is the resulting number of users; for training, `per_device_bytes` and `step_seconds` are the
    resulting costs.
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
