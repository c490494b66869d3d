"""The siglip family: a tower of texts and one of images, the logit of each pair, an attention that pools the image.

Zhai et al. 2023 (arXiv 2303.15343); names on disk as on the hub. Texts are read both ways, at their last token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.clip import TEXT_NAMES
from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, Values, defaults
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.table import Concat, Entry, Leading, TensorTable, entry
from asbuilt.families.shared.towers import (
    LAYERS,
    NAMES,
    POSITION_IDS,
    SIGLIP,
    TOWER_IRRELEVANT,
    Nested,
    layers,
    tower,
)
from asbuilt.spec import (
    MLP,
    AttentionPooling,
    Contrast,
    DualEncoder,
    LayerNorm,
    LearnedPositions,
    Model,
    Projection,
)

TEXT, IMAGES = "siglip_text_model", "siglip_vision_model"

IMAGE_NAMES = replace(
    NAMES,
    outside={
        **NAMES.outside,
        "head.probe": "head.probe",
        "head.o": "head.attention.out_proj",
        "head.norm": "head.layernorm",
        "head.ffn.up": "head.mlp.fc1",
        "head.ffn.down": "head.mlp.fc2",
    },
    layouts={"head.probe": Leading(2)},
    elsewhere=("head.q", "head.k", "head.v"),
)


def build(text: dict[str, Any], images: dict[str, Any], *, name: str = "siglip") -> Model:
    """Returns the model of these towers: the sizes of `text`, and `images` as `tower` takes them, both with an `eps`.

    The text's vector is `d_shared` wide, None for its width; that of an image is as wide as its tower.
    """
    own = ("eps", "d_shared")
    made = sized({key: value for key, value in text.items() if key not in own}, name=name)
    norm = LayerNorm(d=made.d_model, eps=text["eps"])
    head = Projection(d_model=made.d_model, d_out=text.get("d_shared") or made.d_model, bias=True, reads="last")
    return made.whole(
        DualEncoder,
        layers(made, norm),
        norm,
        vision=Contrast(tower=tower(**images, patch_bias=True, class_token="none", head=_pooling(images)), bias=True),
        positions=LearnedPositions(n_positions=made.max_positions, d_model=made.d_model),
        head=head,
    )


def _pooling(images: dict[str, Any]) -> AttentionPooling:
    """Returns the head of a tower, with the sizes of its blocks."""
    d_model, n_heads = images["d_model"], images["n_heads"]
    return AttentionPooling(
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_model // n_heads,
        bias=True,
        norm=LayerNorm(d=d_model, eps=images["eps"]),
        ffn=MLP(d_model=d_model, d_ff=images["d_ff"], activation=images["activation"], bias=True),
    )


def _one_width(values: Values) -> bool:
    return values["text"]["d_shared"] == values["images"]["d_model"]


def _names(spec: Model, family: str) -> TensorTable:
    images = expect_whole(spec, DualEncoder, family).vision.tower
    width, head = images.d_model, "vision.tower.head"
    joined = tuple(
        Entry(
            paths=tuple(f"{head}.{part}.{kind}" for part in "qkv"),
            names=(f"vision_model.head.attention.in_proj_{kind}",),
            layout=Concat((width,) * 3),
        )
        for kind in ("weight", "bias")
    )
    entries = (
        *TEXT_NAMES.entries(spec, family, prefix="text_model."),
        *IMAGE_NAMES.entries(images, family, "vision.tower.", "vision_model."),
        *joined,
        entry("head.weight", "text_model.head.weight"),
        entry("head.bias", "text_model.head.bias"),
        entry("vision.scale", "logit_scale", Leading(1)),
        entry("vision.bias", "logit_bias", Leading(1)),
    )
    return TensorTable(entries=entries, ignored=POSITION_IDS)


FAMILY = Family(
    name="siglip",
    prefix="siglip.",
    heads=("SiglipModel",),
    keys=(  # defaults as in transformers' SiglipTextConfig and SiglipVisionConfig
        Nested(
            key="text_config",
            into="text",
            kind=TEXT,
            at="model",
            keys=(
                *defaults(LAYERS, activation="gelu_pytorch_tanh", eps=1e-6),
                Size("vocab_size", "n_vocab", default=32000),
                Size("max_position_embeddings", "max_positions", default=64),
                Size(
                    "projection_size",
                    "d_shared",
                    default=lambda values: values["d_model"],
                    null=lambda values: values["d_model"],
                    derived=True,
                    at="model.head.d_out",
                ),
                *TOWER_IRRELEVANT[:2],
            ),
        ),
        Nested(
            key="vision_config",
            into="images",
            kind=IMAGES,
            at="vision.tower",
            keys=(
                *TOWER_IRRELEVANT,
                Only("vision_use_head", True, reason="images are compared by what the head makes of them"),
                *SIGLIP,
            ),
        ),
        Check("text_config", (_one_width, "one whose projection_size is the hidden_size of vision_config")),
        Irrelevant("training only", "initializer_factor"),
    ),
    build=build,
    names=_names,
)
