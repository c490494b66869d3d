"""The lfm2_vl family: images of any size through SigLIP 2's tower, squares of patches projected, and an lfm2 text.

Liquid AI 2025 (arXiv 2511.23404); Tschannen et al. 2025, SigLIP 2 (arXiv 2502.14786). The projector's norm has an
epsilon of 1e-5 in the published code, which no key says. Large images reach the model as tiles, each an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import lfm2
from asbuilt.families.qwen3_vl import Positions
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import projector_entries
from asbuilt.families.shared.key import Flag, Irrelevant, Size, activation, defaults
from asbuilt.families.shared.multimodal import SAME_TIE, Text, placeholder, projector_of
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect, expect_whole
from asbuilt.families.shared.reader import TIED
from asbuilt.families.shared.table import PixelsLast, TensorTable, respelled
from asbuilt.families.shared.towers import LAYERS, NAMES, TOWER_IRRELEVANT, Nested, Pixels
from asbuilt.spec import (
    Activation,
    GridPatches,
    GridPositions,
    GridVision,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    Model,
    VisionLanguageModel,
)

OLDER_TIE = "tie_embedding"
PROJECTOR = {"norm": "layer_norm", "layers_0": "linear_1", "layers_1": "linear_2"}
TEXT_NAMES = (("model.", "model.language_model."),)
# Folders of transformers 4 have the tower within a model of its own.
OLDER = (("model.vision_tower.", "model.vision_tower.vision_model."),)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with one spelling of ties, which the whole decides on."""
    if OLDER_TIE in config:
        config = {key: value for key, value in config.items() if key != OLDER_TIE} | {TIED: config[OLDER_TIE]}
    inner = {} if config.get("text_config") is None else config["text_config"]
    if isinstance(inner, dict):
        config = config | {"text_config": {key: value for key, value in inner.items() if key != OLDER_TIE}}
    return row_towers.tied_as_whole(config)


def build(
    text: LanguageModel,
    images: dict[str, Any],
    placeholder: int,
    *,
    merge: int,
    hidden: int,
    activation: Activation,
    bias: bool,
    normed: bool,
) -> Model:
    """Returns the text with images in it, of a tower of these sizes; `normed` is what the projector reads."""
    d_model, wide = images["d_model"], images["d_model"] * merge**2
    norm = LayerNorm(d=d_model, eps=images["eps"])
    sizes = {key: value for key, value in images.items() if key not in ("eps", "side", "head")}
    positions = GridPositions(n_side=images["side"], d_model=d_model, interpolation="triangle")
    tower = row_towers.tower(sizes | {"merge": merge}, norm, None, bias=True, norm=norm, positions=positions)
    projector = MLPProjector(
        widths=(wide, hidden, text.d_model),
        activation=activation,
        bias=bias,
        merge=merge,
        norm=LayerNorm(d=wide, eps=row_towers.EPS) if normed else None,
    )
    return VisionLanguageModel.of(text, GridVision(tower=tower, projector=projector, placeholder=placeholder))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text = lfm2.FAMILY.table(whole.text)
    row_towers.patches(whole.vision.tower, family, "vision.tower.")  # of one frame
    embedding = expect(whole.vision.tower.embedding, GridPatches, "vision.tower.embedding", family)
    names: Names = replace(NAMES, layouts={"embedding.weight": PixelsLast(embedding.holds()["weight"].shape[1:])})
    entries = (
        *respelled(text.entries, TEXT_NAMES),
        *names.entries(whole.vision.tower, family, "vision.tower.", "model.vision_tower."),
        *projector_entries(whole, "vision.projector", PROJECTOR, "model.multi_modal_projector", family),
    )
    return TensorTable(entries=entries, ignored=text.ignored, duplicates=text.duplicates, spellings=(OLDER,))


def _projector(parts: Parts) -> MLPProjector:
    return projector_of(parts, MLPProjector)


TOWER = (  # defaults as in transformers' Siglip2VisionConfig
    *defaults(LAYERS, activation="gelu_pytorch_tanh", eps=1e-6),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    Pixels("patch_size", "patch_size", default=16, most=2**10, at="model.embedding.patch_size"),
    Positions("num_patches", 256),
    Flag(
        "vision_use_head",
        "head",
        default=True,
        must=(lambda values: not values["head"], "false, since no text reads what the tower's head pools"),
        at=lambda parts: parts.at("model.head") is not None,
    ),
    *TOWER_IRRELEVANT,
)
FAMILY = Family(
    name="lfm2_vl",
    heads=("Lfm2VlForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' Lfm2VlConfig
        Text(lfm2.FAMILY),
        Flag(TIED, "tied", default=True),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind="siglip2_vision_model", at="vision.tower", keys=TOWER),
        replace(placeholder(396), key="image_token_id", also=("image_token_index",)),
        Size("downsample_factor", "merge", default=2, most=2**10, at=lambda parts: _projector(parts).merge),
        Size("projector_hidden_size", "hidden", default=2560, at=lambda parts: _projector(parts).widths[1]),
        replace(activation("projector_hidden_act", "gelu"), at="vision.projector.activation"),
        Flag("projector_bias", "bias", default=True, at="vision.projector.bias"),
        Flag("projector_use_layernorm", "normed", default=True, at=lambda parts: _projector(parts).norm is not None),
        Irrelevant(
            "of the processor, which divides images into tiles and says how large they are",
            *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_pixels_tolerance", "max_tiles"),
            *("min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail"),
        ),
    ),
    build=build,
    names=_names,
)
