"""The qwen3_5 family: qwen3_vl's tower without taps beside a text of gated delta nets and gated attention.

Qwen Team 2026 (Qwen3.5, its blog post).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from asbuilt.families import qwen3_5_text, qwen3_vl
from asbuilt.families.shared.image_grid import MultiAxisRope, image_token
from asbuilt.families.shared.key import Irrelevant, Only, but
from asbuilt.families.shared.multimodal import Text

HEAD = "Qwen3_5ForConditionalGeneration"
ROPE = MultiAxisRope(partial=0.25, sections=(11, 11, 10), interleaved=True)
TEXT = replace(
    qwen3_5_text.FAMILY, heads=(*qwen3_5_text.FAMILY.heads, HEAD), keys=but(qwen3_5_text.FAMILY.keys, rotary=ROPE)
)
# The tower's keys, of which no block reaches the text's layers.
TOWER = but(qwen3_vl.TOWER, taps=Only("deepstack_visual_indexes", [], None, reason="this family adds nothing there"))
OWN = Irrelevant("an engine's setting", "language_model_only")

FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_5",
    heads=(HEAD,),
    prepare=partial(qwen3_vl.prepared, "qwen3_5"),
    keys=(  # defaults as in transformers' Qwen3_5Config and Qwen3_5VisionConfig
        OWN,
        *but(
            qwen3_vl.FAMILY.keys,
            text=Text(TEXT),
            images=qwen3_vl.nested("qwen3_5_vision", TOWER),
            placeholder=image_token(248056),
        ),
    ),
    names=partial(qwen3_vl.table, TEXT),
)
