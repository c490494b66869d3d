"""The clip family: a tower of texts and a tower of images whose projected vectors are compared.

Radford et al. 2021 (arXiv 2103.00020); names on disk as on the hub. The text's tower is causal, and read as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Size, defaults
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.families.shared.towers import (
    CLIP,
    LAYERS,
    NAMES,
    POSITION_IDS,
    TOWER_IRRELEVANT,
    Nested,
    layers,
    tower,
)
from asbuilt.spec import Contrast, DualEncoder, LayerNorm, LearnedPositions, Model, Projection

TEXT, IMAGES = "clip_text_model", "clip_vision_model"
# In the first configs it was that of another tokenizer, and the end is the highest number.
OLD_END, END = 2, 49407

TEXT_NAMES = replace(
    NAMES,
    outside={
        "embedding": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
        "norm": "final_layer_norm",
    },
)


def build(text: dict[str, Any], images: dict[str, Any], *, d_shared: int, end: int = END, name: str = "clip") -> Model:
    """Returns the model of these towers: the sizes of `text`, and `images` as `tower` takes them, both with an `eps`.

    Their vectors are `d_shared` wide.
    """
    made = sized({key: value for key, value in text.items() if key != "eps"}, name=name)
    norm = LayerNorm(d=made.d_model, eps=text["eps"])
    reads: dict[str, Any] = {"reads": "highest"} if end == OLD_END else {"reads": "end", "end": end}
    head = Projection(d_model=images["d_model"], d_out=d_shared)
    return made.whole(
        DualEncoder,
        layers(made, norm, causal=True),
        norm,
        vision=Contrast(tower=tower(**images, embedding_norm=True, head=head)),
        positions=LearnedPositions(n_positions=made.max_positions, d_model=made.d_model),
        head=Projection(d_model=made.d_model, d_out=d_shared, **reads),
    )


def _end(parts: Parts) -> int:
    return OLD_END if parts.at("model.head.end") is None else parts.at("model.head.end")


def _build(text: dict[str, Any], images: dict[str, Any], **rest: Any) -> Model:  # noqa: ANN401
    return build(text, images, end=text.pop("end"), **rest)


def _names(spec: Model, family: str) -> TensorTable:
    images = expect_whole(spec, DualEncoder, family).vision.tower
    entries = (
        *TEXT_NAMES.entries(spec, family, prefix="text_model."),
        *NAMES.entries(images, family, "vision.tower.", "vision_model."),
        entry("head.weight", "text_projection.weight"),
        entry("vision.tower.head.weight", "visual_projection.weight"),
        entry("vision.scale", "logit_scale"),
    )
    return TensorTable(entries=entries, ignored=POSITION_IDS)


FAMILY = Family(
    name="clip",
    prefix="clip.",
    heads=("CLIPModel",),
    keys=(  # defaults as in transformers' CLIPConfig, CLIPTextConfig and CLIPVisionConfig
        Nested(
            key="text_config",
            into="text",
            kind=TEXT,
            older=True,
            at="model",
            keys=(
                *defaults(LAYERS, d_model=512, d_ff=2048, n_heads=8),
                Size("vocab_size", "n_vocab", default=49408),
                Size("max_position_embeddings", "max_positions", default=77),
                Size(
                    "eos_token_id",
                    "end",
                    default=END,
                    least=0,
                    at=_end,
                ),
                *TOWER_IRRELEVANT[:2],
            ),
        ),
        Nested(
            key="vision_config",
            into="images",
            kind=IMAGES,
            older=True,
            at="vision.tower",
            keys=(*TOWER_IRRELEVANT, *CLIP),
        ),
        Size(
            "projection_dim",
            "d_shared",
            default=512,
            at="model.head.d_out",
        ),
        Irrelevant("training only: the factor is stored with the weights", "logit_scale_init_value"),
        Irrelevant("training only", "initializer_factor"),
    ),
    build=_build,
    names=_names,
)
