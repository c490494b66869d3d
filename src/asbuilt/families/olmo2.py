"""The olmo2 family: no norm before a branch but one after it, and an RMSNorm over the queries and keys of all heads.

Walsh et al. 2025 (arXiv 2501.00656).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import llama
from asbuilt.families.olmo import SIZES
from asbuilt.families.shared.key import eps
from asbuilt.families.shared.names import ATTENTION, GATED, POST_NORMS, QK_NORMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS

EPS = eps("rms_norm_eps", 1e-5)

FAMILY = replace(
    llama.FAMILY,
    name="olmo2",
    heads=("Olmo2ForCausalLM",),
    padding=1,
    keys=(*SIZES, EPS, ATTENTION_BIAS),  # Olmo2Config has OlmoConfig's defaults
    build=partial(llama.build, norm_at="after", whole_norms=True),
    names=Names(stems=POST_NORMS | ATTENTION | GATED | QK_NORMS),
)
