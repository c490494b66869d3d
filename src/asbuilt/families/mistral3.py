"""The mistral3 family: images of any size through Pixtral's tower, squares merged by a matrix, and a mistral text.

Agrawal et al. 2024, Pixtral 12B (arXiv 2410.07073); Mistral AI 2025, the published code of Mistral Small 3.1 and
Devstral Small 2, whose text is ministral3's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import ministral3, mistral
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import TowerRope, projector_entries
from asbuilt.families.shared.key import (
    Flag,
    Irrelevant,
    Only,
    Size,
    activation,
    defaults,
    depth,
    tied,
)
from asbuilt.families.shared.multimodal import SAME_TIE, SPELLINGS, TEXT, TextOf, placeholder
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.table import ChannelsFirst, TensorTable, respelled
from asbuilt.families.shared.towers import Nested, Pixels
from asbuilt.spec import (
    Activation,
    GridVision,
    LanguageModel,
    MLPProjector,
    Model,
    Plane,
    RMSNorm,
    VisionLanguageModel,
)

TEXT_OF = TextOf(
    mistral.FAMILY,
    ministral3.FAMILY,
    told=lambda parts: "mistral" if parts.attention.temperature is None else "ministral3",
)
# The text of a config that describes none.
USUAL_TEXT = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "head_dim": 128,
    "num_hidden_layers": 40,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131072,
}
PROJECTOR = {"norm": "norm", "layers_0": "patch_merger.merging_layer", "layers_1": "linear_1", "layers_2": "linear_2"}
STEMS = {
    "attention.norm": "attention_norm",
    "ffn.norm": "ffn_norm",
    **{f"attention.body.{part}": f"attention.{part}_proj" for part in "qkvo"},
    **{f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
NAMES = Names(stems=STEMS, outside={"embedding": "patch_conv", "embedding_norm": "ln_pre"}, layers="transformer.layers")


TOWER = (  # defaults as in transformers' PixtralVisionConfig
    Size("hidden_size", "d_model", default=1024),
    Size("num_attention_heads", "n_heads", default=16, divides="d_model"),
    depth("num_hidden_layers", 24),
    Size("intermediate_size", "d_ff", default=4096),
    activation(default="gelu"),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    Pixels("patch_size", "patch_size", default=16, most=2**10, at="model.embedding.patch_size"),
    Only("head_dim", lambda values: values["d_model"] // values["n_heads"], reason="heads are that wide"),
    TowerRope(),
    Irrelevant("the largest image that the processor makes", "image_size"),
    Irrelevant("a tower of patches has none; left over in older configs", "vocab_size"),
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with RoPE of the tower in its newer spelling, and ties said in both places."""
    images = config.get("vision_config")
    if isinstance(images, dict):
        images, rope = dict(images), images.get("rope_parameters")
        if rope is None and "rope_theta" in images:
            images["rope_parameters"] = {"rope_theta": images.pop("rope_theta")}
        elif isinstance(rope, dict) and rope.get("rope_type") == "default":  # the same frequencies by an older name
            images["rope_parameters"] = rope | {"rope_type": "axial"}
        config = config | {"vision_config": images}
    if config.get("text_config") is None:
        config = config | {"text_config": USUAL_TEXT}
    return row_towers.tied_as_whole(config)


def build(
    text: LanguageModel, images: dict[str, Any], placeholder: int, merge: int, activation: Activation, bias: bool
) -> Model:
    """Returns the text with images in it, of a tower of these sizes."""
    d_model, eps = images["d_model"], row_towers.EPS if text.norm is None else text.norm.eps
    norm = RMSNorm(d=d_model, eps=row_towers.EPS)
    plane = Plane(staggered=True)
    tower = row_towers.tower({**images, "merge": merge}, norm, plane, gated=True, embedding_norm=norm)
    projector = MLPProjector(
        widths=(d_model * merge**2, d_model, text.d_model, text.d_model),
        activation=activation,
        bias=bias,
        merge=merge,
        merging=True,
        norm=RMSNorm(d=d_model, eps=eps),
    )
    return VisionLanguageModel.of(text, GridVision(tower=tower, projector=projector, placeholder=placeholder))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    tower, text = whole.vision.tower, mistral.FAMILY.table(whole.text)
    names = replace(NAMES, layouts={"embedding.weight": row_towers.patches(whole, family)})
    merging, turned = "vision.projector.layers_0.weight", ChannelsFirst(tower.d_model)
    projector = projector_entries(whole, "vision.projector", PROJECTOR, "multi_modal_projector", family)
    again = {f"language_model.{name}": path for name, path in text.duplicates.items()}
    return TensorTable(
        entries=(
            *respelled(text.entries, TEXT),
            *names.entries(tower, family, "vision.tower.", "vision_tower."),
            *(replace(one, layout=turned) if one.paths == (merging,) else one for one in projector),
        ),
        ignored=text.ignored,
        duplicates=again | text.duplicates,
        spellings=SPELLINGS,
    )


FAMILY = Family(
    name="mistral3",
    heads=("Mistral3ForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' Mistral3Config
        TEXT_OF,
        tied(True),
        SAME_TIE,
        Nested(
            key="vision_config",
            into="images",
            kind="pixtral",
            at="vision.tower",
            keys=TOWER,
            otherwise=defaults(TOWER, patch_size=14),
        ),
        Size(
            "spatial_merge_size",
            "merge",
            default=2,
            most=2**10,
            at=lambda parts: row_towers.vision(parts).projector.merge,
        ),
        replace(activation("projector_hidden_act", "gelu"), at="vision.projector.activation"),
        Flag("multimodal_projector_bias", "bias", default=False, at="vision.projector.bias"),
        placeholder(10),
        Only("vision_feature_layer", -1, reason="only the tower's output is projected here"),
    ),
    build=build,
    names=_names,
)
