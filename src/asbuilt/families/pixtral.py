"""The pixtral family: Pixtral's tower alone, images of any size to the stream, with RoPE by row and column.

Agrawal et al. 2024, Pixtral 12B (arXiv 2410.07073). There is no norm after the last block; the same tower stands
before a text in mistral3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import row_towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import TowerRope
from asbuilt.families.shared.key import Irrelevant, Only, Size, activation, depth
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.table import Entry, TensorTable
from asbuilt.families.shared.towers import SMALL, Pixels
from asbuilt.spec import ImageEncoder, Model, Plane, RMSNorm

STEMS = {
    "attention.norm": "attention_norm",
    "ffn.norm": "ffn_norm",
    **{f"attention.body.{part}": f"attention.{part}_proj" for part in "qkvo"},
    **{f"ffn.body.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
NAMES = Names(stems=STEMS, outside={"embedding": "patch_conv", "embedding_norm": "ln_pre"}, layers="transformer.layers")
PATCH = Pixels("patch_size", "patch_size", default=16, most=2**10, at="model.embedding.patch_size")
BLOCKS = (  # defaults as in transformers' PixtralVisionConfig
    Size("hidden_size", "d_model", default=1024),
    Size("num_attention_heads", "n_heads", default=16, divides="d_model"),
    depth("num_hidden_layers", 24),
    Size("intermediate_size", "d_ff", default=4096),
    activation(default="gelu"),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    Only("head_dim", lambda values: values["d_model"] // values["n_heads"], reason="heads are that wide"),
    TowerRope(),
    Irrelevant("a tower of patches has none; left over in older configs", "vocab_size"),
)
# of a tower within a whole: images have the size that comes
WITHIN = (*BLOCKS, PATCH, Irrelevant("the largest image that the processor makes", "image_size"))


def axial(images: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Returns a tower's config with its RoPE in the newer spelling."""
    images, rope = dict(images), images.get("rope_parameters")
    if rope is None and "rope_theta" in images:
        images["rope_parameters"] = {"rope_theta": images.pop("rope_theta")}
    elif isinstance(rope, dict) and rope.get("rope_type") == "default":  # the same frequencies by an older name
        images["rope_parameters"] = rope | {"rope_type": "axial"}
    return images


def tower(images: dict[str, Any]) -> ImageEncoder:
    """Returns the tower of these sizes."""
    norm = RMSNorm(d=images["d_model"], eps=row_towers.EPS)
    return row_towers.tower(images, norm, Plane(staggered=True), gated=True, embedding_norm=norm)


def entries(tower: ImageEncoder, family: str, path: str = "", stem: str = "") -> list[Entry]:
    """Returns the entries of the tower at `path`, whose names begin with `stem`."""
    names = replace(NAMES, layouts={"embedding.weight": row_towers.patches(tower, family, path)})
    return names.entries(tower, family, path, stem)


def _build(*, name: str, **images: Any) -> Model:  # noqa: ANN401
    return replace(tower(images), name=name)


def _names(spec: Model, family: str) -> TensorTable:
    return TensorTable(entries=tuple(entries(expect_whole(spec, ImageEncoder, family), family)))


FAMILY = Family(
    name="pixtral",
    prefix="vision_encoder.",
    heads=("PixtralVisionModel",),
    causal=False,
    prepare=axial,
    keys=(
        # images may have any size; costs are those of the largest that the processor makes
        Pixels("image_size", "image_size", default=1024, most=2**14, at="model.embedding.image_size"),
        replace(PATCH, must=SMALL),
        *BLOCKS,
        Irrelevant("a tower has no head", "tie_word_embeddings"),
    ),
    build=_build,
    names=_names,
)
