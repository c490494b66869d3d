"""The falcon_mamba family: mamba with norms, without weights, of what steps are computed from, b and c.

Zuo et al. 2024 (arXiv 2410.05355).
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families import mamba
from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Number
from asbuilt.families.shared.parts import Parts
from asbuilt.spec import Mamba, RMSNorm


def _eps(parts: Parts) -> float:
    return parts.expect(first(Mamba, "dt_norm")(parts), RMSNorm, "blocks.0.mixer.body.dt_norm").eps


FAMILY = replace(
    mamba.FAMILY,
    name="falcon_mamba",
    heads=("FalconMambaForCausalLM",),
    keys=(  # defaults as in transformers' FalconMambaConfig
        *mamba.keys(n_vocab=50280, d_model=768, n_layers=32, ties=True),
        Number("mixer_rms_eps", "norm_eps", default=1e-6, most=1.0, at=_eps),
    ),
)
