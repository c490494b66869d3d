"""Serving plans: whether a model fits, how many users, how fast, and what to change."""

from asbuilt.plan.serve.ask import serve
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.plan import ServePlan

__all__ = ["Conventions", "ServePlan", "serve"]
