"""The step3p7 family: a tower with RoPE by column and row, two convolutions that halve its sides, and a step3p5 text.

StepFun 2026, the model card and published code of Step-3.7-Flash. Images have any size; the processor makes one square
of a picture as a whole, of which costs are declared, and cuts a large one into smaller squares before it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asbuilt.families import step3p5
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import TowerRope
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Values, but, defaults
from asbuilt.families.shared.multimodal import Text, placeholder, projector_of
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import TIED, ConfigReader
from asbuilt.families.shared.table import Entry, TensorTable, entry
from asbuilt.families.shared.towers import CLIP, Nested
from asbuilt.spec import (
    Block,
    ConvolvedProjector,
    GridPatches,
    GridPositions,
    GridVision,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    Model,
    Plane,
    Rotary,
    VisionLanguageModel,
    stored_weights,
)

STEPS = 2
TEXT, IMAGES = "text_config", "vision_config"
# Other spellings of a tower's keys, in published configs.
ALSO = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ls_init_value": "layer_scale_init_value",
}
JOINED = "attn.in_proj"
# Names of modules in newer versions of transformers.
NEWER = (
    ("model.", "model.language_model."),
    ("vision_model.transformer.resblocks.", "model.vision_model.layers."),
    ("vision_model.vit_", "model.vision_model."),
    ("vision_model.", "model.vision_model."),
    ("vit_large_projector.", "model.multi_modal_projector."),
)
NAMES = Names(
    stems={
        "attention.norm": "ln_1",
        "attention.body.o": "attn.out_proj",
        "attention.layer_scale": "ls_1.gamma",
        "ffn.norm": "ln_2",
        "ffn.body.up": "mlp.c_fc",
        "ffn.body.down": "mlp.c_proj",
        "ffn.layer_scale": "ls_2.gamma",
    },
    outside={"embedding": "conv1", "positions.weight": "positional_embedding", "embedding_norm": "ln_pre"},
    layers="transformer.resblocks",
    fused={JOINED: Fused.qkv()},
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with a text and a tower of their kinds, in transformers' keys.

    What both say of tied embeddings is the text's: transformers' class of the whole does not read it.
    """
    text, images = config.get(TEXT), config.get(IMAGES)
    said = {key: value for key, value in config.items() if key != TIED}
    if text is None or isinstance(text, dict):
        said[TEXT] = {TIED: config[TIED]} if TIED in config else {}
        said[TEXT] |= (text or {}) | {"model_type": step3p5.FAMILY.name}
    if isinstance(images, dict):
        renamed = {ALSO.get(key, key): value for key, value in images.items()}
        said[IMAGES] = renamed | {"model_type": "step3p5_vision"}
    return said


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int, bias: bool = False) -> Model:
    """Returns the text with images in it, of a tower of these sizes; the map to the text's width has a `bias`."""
    made = _tower(**images)
    side = made.embedding.n_side
    projector = ConvolvedProjector(d_in=made.d_model, d_out=text.d_model, n_side=side, steps=STEPS, bias=bias)
    return VisionLanguageModel.of(text, GridVision(tower=made, projector=projector, placeholder=placeholder))


def _tower(
    *,
    image_size: int,
    patch_size: int,
    channels: int,
    eps: float,
    theta: float,
    **sizes: Any,  # noqa: ANN401  # those of `Dimensions`
) -> ImageEncoder:
    """Returns the tower, with learned positions and RoPE, whose branches have learned factors."""
    d_model = sizes["d_model"]
    embedding = GridPatches(image_size=image_size, patch_size=patch_size, channels=channels, d_model=d_model)
    made = sized(sizes, n_vocab=0, max_positions=embedding.n_tokens, name="tower")
    norm = LayerNorm(d=d_model, eps=eps)
    rotary = Rotary(d_rotary=made.head_width, theta=theta, pairing="adjacent", axes=Plane(columns_first=True))
    attention = made.attention(causal=False, cached=False, bias=True, output_bias=True, positions=rotary)
    block = pre_norm(attention, made.plain(True), norm)
    block = Block(branches=tuple(replace(branch, layer_scale=True) for branch in block.branches))
    return made.whole(
        ImageEncoder,
        (block,) * made.n_layers,
        None,
        embedding=embedding,
        positions=GridPositions(n_side=embedding.n_side, d_model=d_model, interpolation="linear"),
        embedding_norm=norm,
        head=None,
    )


class _Ratio:
    """The width of the feed-forward, as a multiple of the stream's, rounded down."""

    key, usual, into = "mlp_ratio", 8960 / 1536, "d_ff"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the ratio; an `intermediate_size` is not read by transformers, and is the same."""
        ratio = reader.number(self.key, default=self.usual, above=0.0, most=2.0**10)
        values["d_ff"] = int(values["d_model"] * ratio)
        reader.require(self.key, values["d_ff"] > 0, "such that the feed-forward has a width")
        reader.irrelevant("intermediate_size", f"{self.key} says it")
        reader.irrelevant(self.key, "carried: several ratios are rounded to one width")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the ratio, and the width."""
        plain = parts.d_ff / parts.d_model
        ratios = parts.carried.get(self.key, self.usual), plain, math.nextafter(plain, math.inf)
        fitting = next(ratio for ratio in ratios if int(parts.d_model * ratio) == parts.d_ff)
        return {self.key: fitting, "intermediate_size": parts.d_ff}


TOWER = (  # defaults as in transformers' Step3p7VisionConfig
    *defaults(
        but(CLIP, eps={"at": "first.norm.eps"}, d_ff=lambda key: _Ratio()),
        image_size=728,
        patch_size=14,
        d_model=1536,
        n_layers=47,
        n_heads=16,
    ),
    TowerRope(),
    Irrelevant("where training begins: the factors are stored with the weights", "layer_scale_init_value"),
    Irrelevant("follows from the image's size", "max_position_embeddings"),
    Irrelevant("of a head that is not built", "output_dim"),
    Only("pool_type", "none", None, reason="the tower's output is not pooled"),
    Only("use_cls_token", False, reason="towers of this family have no class token"),
    Only("ues_cls_token", False, reason="towers of this family have no class token"),
    Only("use_ln_pre", True, reason="patches of this family are always normed"),
    Only("use_ln_post", False, reason="towers of this family have no norm after the blocks"),
    Only("use_abs_posemb", True, reason="patches of this family always have learned positions"),
    Only("use_rope2d", True, reason="patches of this family always have RoPE"),
)


def _projector_entries(spec: VisionLanguageModel) -> list[Entry]:
    entries = []
    for name, _, _ in stored_weights(spec.vision.projector):
        stem, _, kind = name.rpartition(".")
        stored = f"vision_model.vit_downsampler{int(stem[-1]) + 1}" if stem else "vit_large_projector"
        entries.append(entry(f"vision.projector.{name}", f"{stored}.{kind}"))
    return entries


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    projector_of(Parts(whole, family, {}), ConvolvedProjector)
    text, patches = step3p5.FAMILY.table(whole.text), row_towers.patches(whole.vision.tower, family, "vision.tower.")
    names = replace(NAMES, layouts={"embedding.weight": patches})
    tower = names.entries(whole.vision.tower, family, "vision.tower.", "vision_model.")
    joined = (
        replace(one, names=tuple(name.replace(f"{JOINED}.", f"{JOINED}_") for name in one.names)) for one in tower
    )
    return replace(text, entries=(*text.entries, *joined, *_projector_entries(whole)), spellings=(NEWER,))


FAMILY = Family(
    name="step3p7",
    heads=("Step3p7ForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' Step3p7Config
        Text(step3p5.FAMILY),
        Nested(key=IMAGES, into="images", kind="step3p5_vision", at="vision.tower", keys=TOWER),
        replace(placeholder(151679, beyond=True), key="image_token_id", also=("image_token_index",)),
        Flag("projector_bias", "bias", default=False, at="vision.projector.bias"),
        Only("understand_projector_stride", 2, reason="convolutions of this family have a stride of 2"),
        Only("vision_select_layer", -1, reason="the tower's output is projected"),
        Irrelevant(
            "of the processor",
            *("im_start_token", "im_end_token", "im_patch_token", "image_token_len", "patch_token_len"),
        ),
    ),
    build=build,
    names=_names,
)
