"""The clip family: a tower of texts and a tower of images whose projected vectors are compared.

Radford et al. 2021 (arXiv 2103.00020); names on disk as on the hub. The text's tower is causal, and read as a whole.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import named_entries
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Size
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.table import Table, entry
from asbuilt.families.shared.towers import (
    BESIDE,
    CLIP,
    POSITION_IDS,
    STEMS,
    Nested,
    layer_keys,
    layers,
    outside_entries,
    tower,
    tower_entries,
    tower_keys,
)
from asbuilt.spec import Contrast, LayerNorm, LearnedPositions, Model, Projection, TokenEmbedding

TEXT, IMAGES = "clip_text_model", "clip_vision_model"
# In the first configs it was that of another tokenizer, and the end is the highest number.
OLD_END, END = 2, 49407

OUTSIDE = {
    "embedding.weight": "embeddings.token_embedding.weight",
    "positions.weight": "embeddings.position_embedding.weight",
    "norm.weight": "final_layer_norm.weight",
    "norm.bias": "final_layer_norm.bias",
}


def build(text: dict[str, Any], images: dict[str, Any], *, d_shared: int, end: int = END, name: str = "clip") -> Model:
    """Returns the model of these towers: `text` as `towers.layers` takes it, with n_vocab and n_positions, `images` as
    `towers.tower`; their vectors are `d_shared` wide.
    """
    text = dict(text)
    n_vocab, n_positions, d_model = text.pop("n_vocab"), text.pop("n_positions"), text["d_model"]
    reads: dict[str, Any] = {"reads": "highest"} if end == OLD_END else {"reads": "end", "end": end}
    seen = tower(**images, pre_norm=True, head=Projection(d_model=images["d_model"], d_out=d_shared))
    return Model(
        name=name,
        vision=Contrast(tower=seen),
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        positions=LearnedPositions(n_positions=n_positions, d_model=d_model),
        blocks=layers(**text, causal=True),
        norm=LayerNorm(d=d_model, eps=text["eps"]),
        head=Projection(d_model=d_model, d_out=d_shared, **reads),
        max_positions=n_positions,
    )


def _end(parts: Parts) -> int:
    head = parts.expect(parts.model.head, Projection, "head")
    return OLD_END if head.end is None else head.end


def _build(text: dict[str, Any], images: dict[str, Any], **rest: Any) -> Model:  # noqa: ANN401
    return build(text, images, end=text.pop("end"), **rest)


def _names(spec: Model, family: str) -> Table:
    contrast = expect(spec.vision, Contrast, "vision", family)
    entries = outside_entries(spec, "", "text_model.", OUTSIDE, family)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"text_model.encoder.layers.{i}.", {}, family)
    entries += tower_entries(contrast.tower, "vision.tower.", "vision_model.", family)
    entries += [
        entry("head.weight", "text_projection.weight"),
        entry("vision.tower.head.weight", "visual_projection.weight"),
        entry("vision.scale", "logit_scale"),
    ]
    return Table(entries=tuple(entries), ignored=POSITION_IDS)


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
            at=lambda parts: parts.model,
            keys=(
                *layer_keys({**CLIP, "d_model": 512, "d_ff": 2048, "n_heads": 8}),
                Size("vocab_size", "n_vocab", default=49408, at=lambda parts: parts.embedding.n_vocab),
                Size("max_position_embeddings", "n_positions", default=77, at=lambda parts: parts.max_positions),
                Size("eos_token_id", "end", default=END, least=0, at=_end),
                *BESIDE[:2],
            ),
        ),
        Nested(
            key="vision_config",
            into="images",
            kind=IMAGES,
            older=True,
            at=lambda parts: parts.expect(parts.model.vision, Contrast, "vision").tower,
            keys=(*BESIDE, *tower_keys(CLIP)),
        ),
        Size(
            "projection_dim",
            "d_shared",
            default=512,
            at=lambda parts: parts.expect(parts.model.head, Projection, "head").d_out,
        ),
        Irrelevant("training only: the factor is stored with the weights", "logit_scale_init_value"),
        Irrelevant("training only", "initializer_factor"),
    ),
    build=_build,
    names=_names,
)
