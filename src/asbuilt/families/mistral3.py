"""The mistral3 family: images of any size through Pixtral's tower, squares merged by a matrix, and a mistral text.

Agrawal et al. 2024, Pixtral 12B (arXiv 2410.07073); Mistral AI 2025, the published code of Mistral Small 3.1 and
Devstral Small 2, whose text is ministral3's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import ministral3, mistral, pixtral
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import projector_entries
from asbuilt.families.shared.key import Flag, Only, Size, activation, defaults, tied
from asbuilt.families.shared.multimodal import SAME_TIE, SPELLINGS, TEXT, TextOf, placeholder
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.table import ChannelsFirst, TensorTable, respelled
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    Activation,
    GridVision,
    LanguageModel,
    MLPProjector,
    Model,
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


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with RoPE of the tower in its newer spelling, and ties said in both places."""
    images = config.get("vision_config")
    if isinstance(images, dict):
        config = config | {"vision_config": pixtral.axial(images)}
    if config.get("text_config") is None:
        config = config | {"text_config": USUAL_TEXT}
    return row_towers.tied_as_whole(config)


def build(
    text: LanguageModel, images: dict[str, Any], placeholder: int, merge: int, activation: Activation, bias: bool
) -> Model:
    """Returns the text with images in it, of a tower of these sizes."""
    d_model, eps = images["d_model"], row_towers.EPS if text.norm is None else text.norm.eps
    projector = MLPProjector(
        widths=(d_model * merge**2, d_model, text.d_model, text.d_model),
        activation=activation,
        bias=bias,
        merge=merge,
        merging=True,
        norm=RMSNorm(d=d_model, eps=eps),
    )
    tower = pixtral.tower({**images, "merge": merge})
    return VisionLanguageModel.of(text, GridVision(tower=tower, projector=projector, placeholder=placeholder))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    tower, text = whole.vision.tower, mistral.FAMILY.table(whole.text)
    merging, turned = "vision.projector.layers_0.weight", ChannelsFirst(tower.d_model)
    projector = projector_entries(whole, "vision.projector", PROJECTOR, "multi_modal_projector", family)
    again = {f"language_model.{name}": path for name, path in text.duplicates.items()}
    return TensorTable(
        entries=(
            *respelled(text.entries, TEXT),
            *pixtral.entries(tower, family, "vision.tower.", "vision_tower."),
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
            keys=pixtral.WITHIN,
            otherwise=defaults(pixtral.WITHIN, patch_size=14),
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
