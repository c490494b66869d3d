"""The minimax_m3_vl family: images of any size through a tower with RoPE by time, row and column, and its text.

MiniMax 2026, the model card and published code of MiniMax-M3. Each patch goes through two matrices to the text's width,
and squares of them through two more. Images alone are read: frames of a video would attend to each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import minimax_m3_vl_text
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import USUAL_SIDE, projector_entries, same_tie
from asbuilt.families.shared.key import Irrelevant, Size, Values, activation, depth, eps, tied
from asbuilt.families.shared.multimodal import SAME_TIE, TEXT, Text, placeholder, projector_of
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import TensorTable, respelled
from asbuilt.families.shared.towers import NAMES, Nested
from asbuilt.spec import (
    GridPatches,
    GridVision,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    Model,
    Plane,
    Rotary,
    VisionLanguageModel,
)

KIND, MERGED = "minimax_m3_vl_vision", "img_token_compression_config"
SIZES = ("d_model", "n_heads", "n_layers", "d_ff", "activation")
PROJECTOR = {
    "first.layers_0": "multi_modal_projector.linear_1",
    "first.layers_1": "multi_modal_projector.linear_2",
    "layers_0": "patch_merge_mlp.linear_1",
    "layers_1": "patch_merge_mlp.linear_2",
}
# Names of modules in newer versions of transformers.
NEWER = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.vision_model.embeddings.patch_embedding.", "model.vision_tower.embeddings.proj."),
    ("vision_tower.vision_model.encoder.layers.", "model.vision_tower.layers."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("patch_merge_mlp.", "model.multi_modal_projector.merge_"),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with text and tower of their kinds, and the sides of merged squares among the tower's keys."""
    said = dict(config)
    kinds = {"text_config": minimax_m3_vl_text.FAMILY.name, "vision_config": KIND}
    for key, kind in kinds.items():
        if isinstance(said.get(key), dict):
            said[key] = said[key] | {"model_type": kind}
    images = said.get("vision_config")
    if isinstance(images, dict) and isinstance(images.get(MERGED), dict):
        kept = {key: value for key, value in images.items() if key != MERGED}
        said["vision_config"] = images[MERGED] | kept
    return same_tie(said)


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int, width: int) -> Model:
    """Returns the text with images in it, of a tower of these sizes; its projector has hidden `width`s."""
    made = sized({name: images[name] for name in SIZES}, n_vocab=0, max_positions=1)
    merge, d_model = images["merge"], made.d_model
    embedding = GridPatches(
        image_size=-(-USUAL_SIDE // merge) * merge * images["patch_size"],
        patch_size=images["patch_size"],
        channels=images["channels"],
        frames=images["frames"],
        d_model=d_model,
    )
    norm = LayerNorm(d=d_model, eps=images["eps"])
    rotary = Rotary(d_rotary=made.head_width // 6 * 6, theta=images["theta"], axes=Plane(timed=True))
    attention = made.attention(causal=False, cached=False, bias=True, output_bias=True, positions=rotary)
    tower = ImageEncoder(
        name="tower",
        embedding=embedding,
        embedding_norm=norm,
        blocks=(pre_norm(attention, made.plain(True), norm),) * made.n_layers,
        max_positions=embedding.n_tokens,
    )
    maps: dict[str, Any] = {"activation": "gelu", "bias": True}
    first = MLPProjector(widths=(d_model, width, text.d_model), **maps)
    projector = MLPProjector(widths=(text.d_model * merge**2, width, text.d_model), merge=merge, first=first, **maps)
    return VisionLanguageModel.of(text, GridVision(tower=tower, projector=projector, placeholder=placeholder))


class _Rope:
    """The RoPE base of a tower, in which a third of the pairs belongs to each of time, rows and columns."""

    key, usual = "rope_parameters", 10000.0

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the base, which older configs have outside the object."""
        wide = values["d_model"] // values["n_heads"]
        reader.require(reader.names["n_heads"], wide >= 6, "such that heads are at least 6 wide (RoPE by 3 axes)")
        values["theta"] = reader.number("rope_theta", default=self.usual, above=1.0)
        inner = reader.nested(self.key)
        if inner is not None:
            inner.only("rope_type", "axial", reason="a tower's RoPE is by time, row and column")
            values["theta"] = inner.number("rope_theta", default=values["theta"], above=1.0)
            inner.finish()

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object."""
        rotary = parts.expect(parts.attention.positions, Rotary, "vision.tower.blocks.0.attention.body.positions")
        return {self.key: {"rope_type": "axial", "rope_theta": float(rotary.theta)}}


def _merge(parts: Parts) -> int:
    vision = parts.around.expect(parts.around.whole(VisionLanguageModel).vision, GridVision, "vision")
    return vision.projector.merge


TOWER = (  # defaults as in transformers' MiniMaxM3VLVisionConfig
    Size("hidden_size", "d_model", default=1280),
    Size("num_attention_heads", "n_heads", default=16, divides="d_model"),
    depth("num_hidden_layers", 32),
    Size("intermediate_size", "d_ff", default=5120),
    activation(default="gelu"),
    replace(eps("layer_norm_eps", 1e-5), at="first.norm.eps"),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    Size("patch_size", "patch_size", default=14, most=2**10, at="model.embedding.patch_size"),
    Size("temporal_patch_size", "frames", default=2, most=2**10, at="model.embedding.frames"),
    Size("spatial_merge_size", "merge", default=2, most=2**10, at=_merge),
    _Rope(),
    Irrelevant("images are of any size", "image_size"),
)


def _width(parts: Parts) -> int:
    return projector_of(parts, MLPProjector).widths[1]


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text = minimax_m3_vl_text.PUBLISHED(whole.text, family)
    outside = {"embedding": "embeddings.patch_embedding", "embedding_norm": "pre_layrnorm"}
    tower = Names(stems=NAMES.stems, outside=outside, layers="encoder.layers")
    projector = projector_entries(whole, "vision.projector", PROJECTOR, "", family)
    again = {f"language_model.{name}": path for name, path in text.duplicates.items()}
    return TensorTable(
        entries=(
            *respelled(text.entries, TEXT),
            *tower.entries(whole.vision.tower, family, "vision.tower.", "vision_tower.vision_model."),
            *(replace(one, names=tuple(name.removeprefix(".") for name in one.names)) for one in projector),
        ),
        ignored=text.ignored,
        duplicates=again | text.duplicates,
        spellings=(NEWER,),
    )


FAMILY = Family(
    name="minimax_m3_vl",
    heads=("MiniMaxM3SparseForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' MiniMaxM3VLConfig
        Text(minimax_m3_vl_text.FAMILY),
        tied(False),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind=KIND, at="vision.tower", keys=TOWER),
        Size("projector_hidden_size", "width", default=6144, at=_width),
        replace(placeholder(200025), also=("image_token_id",)),
        Irrelevant("of videos alone", "video_token_index", "video_token_id"),
        Irrelevant("follows from the text's width and the tower's squares", "merged_hidden_size"),
    ),
    build=build,
    names=_names,
)
