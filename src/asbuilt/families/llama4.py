"""The llama4 family: a tower with RoPE by column and row, squares of patches through an MLP, and a llama4_text.

Meta 2025, the Llama 4 model card and published code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import llama4_text
from asbuilt.families.shared import towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import DROPPED, Irrelevant, Key, Number, Only, Values, defaults, tied
from asbuilt.families.shared.multimodal import IMAGE_DELIMITERS, SAME_TIE, TEXT, Text, placeholder, projector_of
from asbuilt.families.shared.parts import Parts, expect, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import read_rotary
from asbuilt.families.shared.table import Entry, Flattened, TensorTable, entry, respelled
from asbuilt.spec import LanguageModel, MLPProjector, Model, Rotary, Vision, VisionLanguageModel

WIDTH = 4096
NAMES = replace(
    towers.NAMES,
    stems={
        **towers.NAMES.stems,
        "attention.norm": "input_layernorm",
        "attention.body.o": "self_attn.o_proj",
        "ffn.norm": "post_attention_layernorm",
    },
    outside={
        "embedding": "patch_embedding.linear",
        "embedding.class_token": "class_embedding",
        "positions.weight": "positional_embedding_vlm",
        "embedding_norm": "layernorm_pre",
        "norm": "layernorm_post",
    },
    layers="model.layers",
)
PROJECTOR = {
    "layers_0.weight": "vision_model.vision_adapter.mlp.fc1",
    "layers_1.weight": "vision_model.vision_adapter.mlp.fc2",
    "layers_2.weight": "multi_modal_projector.linear_1",
}


def build(
    text: LanguageModel,
    images: dict[str, Any],
    *,
    placeholder: int,
    width: int = WIDTH,
    merge: int = 2,
    theta: float = 10000.0,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it.

    Squares of `merge` x `merge` patches go through two matrices of this `width` and one to the text's.
    """
    grid = images["image_size"] // images["patch_size"]
    rotary = Rotary(d_rotary=images["d_model"] // images["n_heads"], theta=theta, pairing="adjacent", grid=grid)
    projector = MLPProjector(
        widths=(images["d_model"] * merge**2, width, width, text.d_model), activation="gelu", merge=merge
    )
    tower = towers.tower(**images, class_token="last", embedding_norm=True, rotary=rotary)
    return VisionLanguageModel.of(text, Vision(tower=tower, projector=projector, placeholder=placeholder))


def _build(text: LanguageModel, images: dict[str, Any], placeholder: int) -> Model:
    width, merge, theta = (images.pop(name) for name in ("width", "merge", "theta"))
    return build(text, images, placeholder=placeholder, width=width, merge=merge, theta=theta)


class _TowerRope:
    """The RoPE base of a tower, which rotates heads by column and by row."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        d_head, heads = values["d_model"] // values["n_heads"], reader.names["n_heads"]
        reader.require(heads, d_head % 4 == 0, "such that heads are a multiple of 4 wide (RoPE by column and row)")
        rotary = read_rotary(reader, d_head, values["image_size"])
        reader.require("rope_scaling", rotary.scaling is None, "null in a tower")
        values["theta"] = rotary.theta

    def write(self, parts: Parts) -> dict[str, Any]:
        path = "vision.tower.blocks.0.attention.body.positions"
        return {"rope_theta": float(parts.expect(parts.attention.positions, Rotary, path).theta)}


def _merges(values: Values) -> bool:
    side = values["image_size"] // values["patch_size"]
    return values["merge"] * values["ratio"] == 1.0 and side % values["merge"] == 0


class _Shuffle:
    """How squares of patches become one token: the ratio and four widths, which must agree."""

    ratio = Number("pixel_shuffle_ratio", "ratio", default=0.5, above=1 / 2**14, most=1.0)
    width, others = "projector_output_dim", {"projector_input_dim": WIDTH, "vision_output_dim": 7680}

    def read(self, reader: ConfigReader, values: Values) -> None:
        self.ratio.read(reader, values)
        side = values["image_size"] // values["patch_size"]
        values["merge"] = round(1 / values["ratio"])
        reader.require(self.ratio.key, _merges(values), f"1/n, where n divides the {side} patches on a side")
        del values["ratio"]
        merge = values["merge"]
        wide = values["d_model"] * merge**2
        allowed = f"{wide}, the width of {merge}x{merge} patches"
        reader.require(reader.names["d_ff"], values["d_ff"] == wide, allowed)
        values["width"] = reader.size(self.width, default=WIDTH)
        for key, default in self.others.items():
            same = reader.size(key, default=default) == values["width"]
            reader.require(key, same, f"equal to {self.width} = {values['width']}")

    def write(self, parts: Parts) -> dict[str, Any]:
        projector = projector_of(parts.around, MLPProjector)
        widths = dict.fromkeys((self.width, *self.others), projector.widths[1])
        return {self.ratio.key: 1 / projector.merge, "layer_norm_eps": DROPPED} | widths


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    vision = whole.vision
    shape = vision.tower.embedding.holds()["weight"].shape[1:]
    names = replace(NAMES, layouts={"embedding.weight": Flattened(shape)})
    text = llama4_text.FAMILY.table(whole.text)
    entries: list[Entry] = [
        *respelled(text.entries, TEXT),
        *names.entries(vision.tower, family, "vision.tower.", "vision_model."),
    ]
    projector = expect(vision.projector, MLPProjector, "vision.projector", family)
    for weight in projector.local_weights():
        if weight not in PROJECTOR:
            raise InputError(f"{family} files have no name for this weight", field=f"vision.projector.{weight}")
        entries.append(entry(f"vision.projector.{weight}", f"{PROJECTOR[weight]}.weight"))
    again: dict[str, str] = {"language_model.lm_head.weight": "embedding.weight"} if text.duplicates else {}
    return TensorTable(entries=tuple(entries), ignored=text.ignored, duplicates=again)


TOWER: tuple[Key, ...] = (
    *towers.TOWER_IRRELEVANT,
    Irrelevant("training only", "projector_dropout"),
    Only("norm_eps", 1e-5, reason="the published code has this epsilon"),
    Only("hidden_act", "gelu", reason="the published code uses gelu"),
    Only("multi_modal_projector_bias", False, reason="the published code has none"),
    Only("vision_feature_layer", -1, reason="the published code takes the last layer's output"),
    Only("vision_feature_select_strategy", "default", reason="the published code leaves the class token out"),
    # of transformers' Llama4VisionConfig, whose code norms with 1e-5 whatever the config says
    *defaults(towers.CLIP, d_ff=5632, n_layers=34, n_heads=16, image_size=448, patch_size=14, activation="gelu"),
    _TowerRope(),
    _Shuffle(),
)

FAMILY = Family(
    name="llama4",
    heads=("Llama4ForConditionalGeneration",),
    keys=(  # defaults as in transformers' Llama4Config
        IMAGE_DELIMITERS,
        Text(llama4_text.FAMILY),
        tied(False),
        SAME_TIE,
        towers.Nested(key="vision_config", into="images", kind="llama4_vision_model", at="vision.tower", keys=TOWER),
        placeholder(200092),
    ),
    build=_build,
    names=_names,
)
