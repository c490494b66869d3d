"""The glm4 family: glm with a norm of what each branch gives as well as of what it reads.

Z.ai 2025, the model cards and published code of GLM-4-9B-0414 and GLM-4-32B-0414.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import glm
from asbuilt.families.shared.names import Names

POST_NORMS = {"attention.post_norm": "post_self_attn_layernorm", "ffn.post_norm": "post_mlp_layernorm"}

FAMILY = replace(
    glm.FAMILY,
    name="glm4",
    heads=("Glm4ForCausalLM",),
    padding=151329,
    keys=glm.FAMILY.keys,  # Glm4Config has GlmConfig's defaults
    build=partial(glm.FAMILY.build, norm_at="both"),
    names=Names(stems=glm.STEMS | POST_NORMS, fused=glm.FUSED),
)
