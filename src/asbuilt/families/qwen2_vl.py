"""The qwen2_vl family: images of any size through a tower with RoPE by row and column, and a qwen2 text with M-RoPE.

Wang et al. 2024 (arXiv 2409.12191). Published folders begin names with `visual.` and `model.`, newer versions of
transformers in memory with `model.visual.` and `model.language_model.`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import qwen2
from asbuilt.families.shared import image_grid
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import AROUND, SAME_WIDTH, MultiAxisRope, OutWidth, image_token, nested_text
from asbuilt.families.shared.key import Only, but, tied
from asbuilt.families.shared.multimodal import SAME_TIE, Text
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.sizes import DerivedHeadWidth, LaterWindows, eps, sizes
from asbuilt.families.shared.table import TensorTable
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import LanguageModel, Model, VisionLanguageModel

HEAD = "Qwen2VLForConditionalGeneration"
NEWER = (("visual.", "model.visual."), ("model.", "model.language_model."))
MERGER = {"norm": "ln_q", "layers_0": "mlp.0", "layers_1": "mlp.2"}
PLAIN = {"ffn.body.up": "mlp.fc1", "ffn.body.down": "mlp.fc2"}

# Of the text, nested or not, defaults as in transformers' Qwen2VLTextConfig and Qwen2_5_VLTextConfig.
TEXT_KEYS = (
    *but(
        sizes(n_vocab=152064, d_model=8192, d_ff=29568, n_layers=80, n_heads=64, n_kv_heads=8, context=32768),
        d_head=DerivedHeadWidth(even=True),
        rotary=MultiAxisRope(theta=1000000.0),
    ),
    Only("head_dim", lambda values: values["d_head"], None, reason="heads are hidden_size / num_attention_heads wide"),
    eps("rms_norm_eps", 1e-5),
    LaterWindows(first=80),
)
TEXT = replace(qwen2.FAMILY, name="qwen2_vl_text", heads=(HEAD,), keys=TEXT_KEYS)
TOWER = (
    *image_grid.tower_keys(d_model=1280, d_ff=None, act="quick_gelu", patch_size=14, n_layers=32, width="embed_dim"),
    OutWidth("hidden_size", "d_out", default=3584),
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with a nested text and a tower of its own kind."""
    return image_grid.fix_kind(nested_text(config, name), "qwen2_vl_vision", "qwen2_vl")


def _build(text: LanguageModel, images: dict[str, Any], placeholder: int) -> Model:
    return image_grid.build(text, images, placeholder=placeholder)


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text = TEXT.table(whole.text)
    return image_grid.table(whole, text, family, merger=MERGER, mlp=PLAIN, prefix="visual.", spellings=(NEWER,))


FAMILY = Family(
    name="qwen2_vl",
    heads=(HEAD,),
    prepare=prepared,
    keys=(  # defaults as in transformers' Qwen2VLConfig and Qwen2VLVisionConfig
        AROUND,
        Text(TEXT),
        tied(False),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind="qwen2_vl_vision", at="vision.tower", keys=TOWER),
        SAME_WIDTH,
        image_token(151655),
    ),
    build=_build,
    names=_names,
)
