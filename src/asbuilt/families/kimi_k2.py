"""The kimi_k2 family: deepseek_v3 under another name, with one group of experts (Kimi Team 2025, arXiv 2507.20534)."""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")
