"""The gemma3 family: SigLIP's tower, its patches averaged, one matrix, and a gemma3 text whose images see both ways.

Gemma Team 2025 (arXiv 2503.19786).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import gemma3_text
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Values, tied
from asbuilt.families.shared.multimodal import (
    AROUND,
    SAME_TIE,
    Text,
    multimodal_table,
    placeholder,
    projector_of,
    vision_of,
)
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Table, Transpose, entry
from asbuilt.families.shared.towers import BESIDE, SIGLIP, Nested, tower
from asbuilt.spec import Model, PatchEmbedding, PooledProjector, RMSNorm, Vision


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


class _NoHead:
    """`vision_use_head`, which has to say false, as the class default is true."""

    key = "vision_use_head"

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.only(self.key, False, reason="a tower with a head of its own is not read")
        if self.key not in reader.config:
            raise reader.error(self.key, "missing, which means true", allowed="false")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: False}


class Tokens:
    """How many tokens an image becomes; the projector tells it up to a rest, so it is carried."""

    key = "mm_tokens_per_image"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number."""
        images = values["images"]
        side = images["image_size"] // images["patch_size"]
        values["n_tokens"] = reader.size(self.key, default=256, most=2**28)
        reader.require(self.key, int(values["n_tokens"] ** 0.5) <= side, f"at most the {side**2} patches")
        reader.irrelevant(self.key, "told by the projector, up to a rest")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number, as carried where it means the same."""
        projector, made = projector_of(parts, PooledProjector), vision_of(parts).n_tokens
        said = parts.carried.get(self.key, made)
        same = projector.n_side // max(1, int(said**0.5)) == projector.pool
        return {self.key: said if same else made}


def _uncapped(values: Values) -> bool:
    head = values["text"].language_head
    return head is not None and head.softcap is None


def _names(spec: Model, family: str) -> Table:
    projector = [
        entry("vision.projector.weight", "multi_modal_projector.mm_input_projection_weight", Transpose()),
        entry("vision.projector.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    ]
    return multimodal_table(spec, gemma3_text.FAMILY.table(replace(spec, vision=None)), projector, family)


FAMILY = Family(
    name="gemma3",
    heads=("Gemma3ForConditionalGeneration",),
    keys=(  # defaults as in transformers' Gemma3Config
        AROUND,
        tied(True),
        Text(gemma3_text.FAMILY),
        Check("text_config", (_uncapped, "one without final_logit_softcapping, which is not applied beside images")),
        SAME_TIE,
        Nested(
            key="vision_config",
            into="images",
            kind="siglip_vision_model",
            at="vision.tower",
            keys=(*BESIDE, _NoHead(), *SIGLIP),
        ),
        Tokens(),
        placeholder(262144, beyond=True),
    ),
    build=build,
    names=_names,
)
