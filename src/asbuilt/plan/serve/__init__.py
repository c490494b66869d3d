"""Serving plans: whether a model fits, how many users, how fast, and what to change."""

from typing import TYPE_CHECKING

from asbuilt.packages import on_first_use

if TYPE_CHECKING:
    from asbuilt.plan.serve.ask import serve
    from asbuilt.plan.serve.conventions import Conventions
    from asbuilt.plan.serve.plan import ServePlan

PUBLIC = {
    "Conventions": "asbuilt.plan.serve.conventions",
    "ServePlan": "asbuilt.plan.serve.plan",
    "serve": "asbuilt.plan.serve.ask",
}
__all__ = ["Conventions", "ServePlan", "serve"]

if not TYPE_CHECKING:  # a checker would take every name for one
    __getattr__ = on_first_use(__name__, PUBLIC)
