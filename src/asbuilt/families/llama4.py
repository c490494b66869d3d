"""The llama4 family: a tower turned by column and row, squares of its patches through matrices, a llama4_text.

Meta 2025, the Llama 4 model card and published code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import llama4_text
from asbuilt.families.clip import nested
from asbuilt.families.shared import towers
from asbuilt.families.shared.common import named_entries, read_common
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.multimodal import (
    TEXT,
    read_around,
    read_placeholder,
    read_text,
    vision_of,
    write_multimodal,
)
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary
from asbuilt.families.shared.table import Entry, Flattened, Table, entry, respelled
from asbuilt.spec import MLPProjector, Model, PatchEmbedding, Rotary, TiedHead, Vision

FAMILY = "llama4"
HEADS = ("Llama4ForConditionalGeneration",)
IMAGES = "llama4_vision_model"
# of transformers' Llama4VisionConfig, whose code norms with 1e-5 whatever the config says
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
D_OUTPUT, D_PROJECTOR, RATIO = 7680, 4096, 0.5
STEMS = towers.STEMS | {
    "attention.norm": "input_layernorm",
    "attention.body.o": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
}
OUTSIDE = {
    "embedding.weight": "patch_embedding.linear.weight",
    "embedding.class_token": "class_embedding",
    "positions.weight": "positional_embedding_vlm",
    "embedding_norm.weight": "layernorm_pre.weight",
    "embedding_norm.bias": "layernorm_pre.bias",
    "norm.weight": "layernorm_post.weight",
    "norm.bias": "layernorm_post.bias",
}
PROJECTOR = {
    "layers_0.weight": "vision_model.vision_adapter.mlp.fc1",
    "layers_1.weight": "vision_model.vision_adapter.mlp.fc2",
    "layers_2.weight": "multi_modal_projector.linear_1",
}


def build(
    text: Model,
    images: dict[str, Any],
    *,
    placeholder: int,
    width: int = D_PROJECTOR,
    merge: int = 2,
    theta: float = 10000.0,
) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it.

    Squares of `merge` x `merge` patches go through two matrices of this `width` and one to the text's.
    """
    grid = images["image_size"] // images["patch_size"]
    turned = Rotary(d_rotary=images["d_model"] // images["n_heads"], theta=theta, pairing="adjacent", grid=grid)
    projector = MLPProjector(
        widths=(images["d_model"] * merge**2, width, width, text.d_model), activation="gelu", merge=merge
    )
    tower = towers.tower(**images, class_token="last", pre_norm=True, rotary=turned)
    return replace(text, vision=Vision(tower=tower, projector=projector, placeholder=placeholder))


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' Llama4Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    read_around(reader)
    text = read_text(reader, llama4_text)
    same = isinstance(text.spec.head, TiedHead) == reader.flag("tie_word_embeddings", default=False)
    reader.require("tie_word_embeddings", same, "what text_config says")
    images = nested(reader, "vision_config", IMAGES)
    seen, width, merge, theta = _read_tower(images)
    images.finish()
    placeholder = read_placeholder(reader, 200092, text.spec)
    reader.finish()
    spec = build(text.spec, seen, placeholder=placeholder, width=width, merge=merge, theta=theta)
    carried = reader.carried | {"text_config": text.carried, "vision_config": images.carried}
    return Reading(spec=spec, carried=carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes)


def _read_tower(images: ConfigReader) -> tuple[dict[str, Any], int, int, float]:
    """Returns the tower, the width between its squares and the text, how wide a square is, and the rotary base."""
    towers.read_tower_common(images)
    images.irrelevant("projector_dropout", "training only")
    for key, value, reason in (
        ("norm_eps", 1e-5, "the published code norms with 1e-5"),
        ("hidden_act", "gelu", "the published code uses gelu"),
        ("multi_modal_projector_bias", False, "the published code has none"),
        ("vision_feature_layer", -1, "the published code takes what the last layer makes"),
        ("vision_feature_select_strategy", "default", "the published code leaves the class token out"),
    ):
        images.only(key, value, reason=reason)
    seen = towers.read_tower(images, DEFAULTS)
    d_head = seen["d_model"] // seen["n_heads"]
    images.require("num_attention_heads", d_head % 4 == 0, "heads whose width is a multiple of 4, for columns and rows")
    rotary = read_rotary(images, d_head, seen["image_size"])
    images.require("rope_scaling", rotary.scaling is None, "none, in a tower")
    ratio = images.number("pixel_shuffle_ratio", default=RATIO, above=1 / 2**14, most=1.0)
    merge, side = round(1 / ratio), seen["image_size"] // seen["patch_size"]
    fits = merge * ratio == 1.0 and side % merge == 0
    images.require("pixel_shuffle_ratio", fits, f"1/n, n dividing the {side} patches on a side")
    wide = seen["d_model"] * merge**2
    images.require("intermediate_size", seen["d_ff"] == wide, f"{wide}, the width of {merge}x{merge} patches, as well")
    width = images.size("projector_output_dim", default=D_PROJECTOR)
    for key, default in (("projector_input_dim", D_PROJECTOR), ("vision_output_dim", D_OUTPUT)):
        images.require(key, images.size(key, default=default) == width, f"projector_output_dim = {width}")
    return seen, width, merge, rotary.theta


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    vision = vision_of(spec, FAMILY)
    projector = expect(vision.projector, MLPProjector, "vision.projector", FAMILY)
    attention, _, _ = towers.first_parts(vision.tower, FAMILY)
    rotary = expect(attention.positions, Rotary, "vision.tower.blocks.0.attention.body.positions", FAMILY)
    images = towers.write_tower(vision.tower, FAMILY) | {
        "model_type": IMAGES,
        "rope_theta": float(rotary.theta),
        "pixel_shuffle_ratio": 1 / projector.merge,
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), projector.widths[1]),
    }
    del images["layer_norm_eps"]
    written = {
        "architectures": [HEADS[0]],
        "vision_config": images,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    return write_multimodal(spec, llama4_text, written, carried, dtype, FAMILY, read)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    vision = vision_of(spec, FAMILY)
    tower, path, prefix = vision.tower, "vision.tower.", "vision_model."
    embedding = expect(tower.embedding, PatchEmbedding, f"{path}embedding", FAMILY)
    shape = embedding.holds()["weight"].shape[1:]
    text = llama4_text.table(replace(spec, vision=None))
    entries: list[Entry] = [
        *respelled(text.entries, TEXT),
        *towers.outside_entries(tower, path, prefix, OUTSIDE, FAMILY, {"embedding.weight": Flattened(shape)}),
    ]
    for i, block in enumerate(tower.blocks):
        entries += named_entries(block, f"{path}blocks.{i}.", STEMS, f"{prefix}model.layers.{i}.", {}, FAMILY)
    projector = expect(vision.projector, MLPProjector, "vision.projector", FAMILY)
    for weight in projector.holds():
        if weight not in PROJECTOR:
            raise InputError(f"{FAMILY} files have no name for this weight", field=f"vision.projector.{weight}")
        entries.append(entry(f"vision.projector.{weight}", f"{PROJECTOR[weight]}.weight"))
    again: dict[str, str] = {"language_model.lm_head.weight": "embedding.weight"} if text.duplicates else {}
    return Table(entries=tuple(entries), ignored=text.ignored, duplicates=again)
