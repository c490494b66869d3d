"""The qwen3_5_moe family: qwen3_5 with a text of experts.

Qwen Team 2026 (Qwen3.5, its blog post).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import qwen3_5, qwen3_5_moe_text, qwen3_vl
from asbuilt.families.shared.key import but
from asbuilt.families.shared.multimodal import Text

HEAD = "Qwen3_5MoeForConditionalGeneration"
TEXT = replace(
    qwen3_5_moe_text.FAMILY,
    heads=(*qwen3_5_moe_text.FAMILY.heads, HEAD),
    keys=but(qwen3_5_moe_text.FAMILY.keys, rotary=qwen3_5.ROPE),
)

FAMILY = replace(
    qwen3_5.FAMILY,
    name="qwen3_5_moe",
    heads=(HEAD,),
    prepare=partial(qwen3_vl.prepared, "qwen3_5_moe"),
    keys=but(qwen3_5.FAMILY.keys, text=Text(TEXT), images=qwen3_vl.nested("qwen3_5_moe_vision", qwen3_5.TOWER)),
    names=partial(qwen3_vl.table, TEXT),
)
