"""The kimi_k2 family: deepseek_v3 under another name, with one group of experts (Kimi Team 2025, arXiv 2507.20534)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import deepseek_v3
from asbuilt.families.shared import latent
from asbuilt.families.shared.reader import Reading
from asbuilt.families.shared.table import Table
from asbuilt.spec import Model

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; raises InputError naming the key at fault."""
    return latent.read(FAMILY, config, name)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    return latent.write(FAMILY, spec, carried, dtype)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return latent.table(spec, FAMILY.name)
