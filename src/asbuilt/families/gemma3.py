"""The gemma3 family: SigLIP's tower, its patches averaged, one matrix, and a gemma3 text whose images see both ways.

Gemma Team 2025 (arXiv 2503.19786).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import gemma3_text
from asbuilt.families.clip import nested
from asbuilt.families.shared.common import read_common
from asbuilt.families.shared.fused import expect
from asbuilt.families.shared.multimodal import (
    multimodal_table,
    read_around,
    read_placeholder,
    read_text,
    vision_of,
    write_multimodal,
)
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Table, Transpose, entry
from asbuilt.families.shared.towers import SIGLIP_DEFAULTS, read_tower, read_tower_common, tower, write_tower
from asbuilt.spec import Model, PatchEmbedding, PooledProjector, RMSNorm, TiedHead, Vision

FAMILY = "gemma3"
HEADS = ("Gemma3ForConditionalGeneration",)
IMAGES = "siglip_vision_model"


def build(text: Model, images: dict[str, Any], *, placeholder: int, n_tokens: int = 256) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it, `n_tokens` of each image."""
    seen = tower(**images, patch_bias=True, class_token="none")
    assert isinstance(seen.embedding, PatchEmbedding)
    side = seen.embedding.n_side
    projector = PooledProjector(
        d_in=seen.d_model,
        d_out=text.d_model,
        n_side=side,
        pool=side // int(n_tokens**0.5),
        norm=RMSNorm(d=seen.d_model, eps=images["eps"], gain="offset"),
    )
    return replace(text, vision=Vision(tower=seen, projector=projector, placeholder=placeholder, both_ways=True))


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' Gemma3Config.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    read_around(reader)
    tied = reader.flag("tie_word_embeddings", default=True)
    text = read_text(reader, gemma3_text)
    uncapped = text.spec.language_head is not None and text.spec.language_head.softcap is None
    reader.require("text_config", uncapped, "one without final_logit_softcapping, which is not applied beside images")
    same = isinstance(text.spec.head, TiedHead) == tied
    reader.require("tie_word_embeddings", same, "what text_config says")
    images = nested(reader, "vision_config", IMAGES)
    read_tower_common(images)
    images.only("vision_use_head", False, reason="a tower with a head of its own is not read")
    seen = read_tower(images, SIGLIP_DEFAULTS)
    if "vision_use_head" not in images.config:
        raise images.error("vision_use_head", "missing, which means true", allowed="false")
    images.finish()
    side = seen["image_size"] // seen["patch_size"]
    n_tokens = reader.size("mm_tokens_per_image", default=256, most=2**28)
    reader.require("mm_tokens_per_image", int(n_tokens**0.5) <= side, f"at most the {side**2} patches")
    placeholder = read_placeholder(reader, 262144, text.spec, beyond=True)
    spec = build(text.spec, seen, placeholder=placeholder, n_tokens=n_tokens)
    reader.irrelevant("mm_tokens_per_image", "told by the projector, up to a rest")
    reader.finish()
    carried = reader.carried | {"text_config": text.carried, "vision_config": images.carried}
    return Reading(spec=spec, carried=carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes)


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    vision = vision_of(spec, FAMILY)
    projector = expect(vision.projector, PooledProjector, "vision.projector", FAMILY)
    said = carried.get("mm_tokens_per_image", vision.n_tokens)
    same = projector.n_side // max(1, int(said**0.5)) == projector.pool
    written = {
        "architectures": [HEADS[0]],
        "vision_config": write_tower(vision.tower, FAMILY) | {"model_type": IMAGES, "vision_use_head": False},
        "mm_tokens_per_image": said if same else vision.n_tokens,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }
    return write_multimodal(spec, gemma3_text, written, carried, dtype, FAMILY, read)


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    projector = [
        entry("vision.projector.weight", "multi_modal_projector.mm_input_projection_weight", Transpose()),
        entry("vision.projector.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    ]
    return multimodal_table(spec, gemma3_text.table(replace(spec, vision=None)), projector, FAMILY)
