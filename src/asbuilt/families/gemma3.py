"""The gemma3 family: SigLIP's tower, patches averaged and projected, and a gemma3 text, bidirectional in images.

Gemma Team 2025 (arXiv 2503.19786).
"""

from __future__ import annotations

from typing import Any

from asbuilt.families import gemma3_text
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Values, tied
from asbuilt.families.shared.multimodal import (
    IMAGE_DELIMITERS,
    SAME_TIE,
    Text,
    multimodal_table,
    placeholder,
    projector_of,
    vision_of,
)
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import TensorTable, Transpose, entry
from asbuilt.families.shared.towers import SIGLIP, TOWER_IRRELEVANT, Nested, tower
from asbuilt.spec import LanguageModel, Model, PooledProjector, RMSNorm, Vision, VisionLanguageModel


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int, n_tokens: int = 256) -> Model:
    """Returns the text with images in it, of a tower as `towers.tower` takes it, `n_tokens` of each image."""
    made = tower(**images, patch_bias=True, class_token="none")
    side = made.embedding.n_side
    projector = PooledProjector(
        d_in=made.d_model,
        d_out=text.d_model,
        n_side=side,
        pool=side // int(n_tokens**0.5),
        norm=RMSNorm(d=made.d_model, eps=images["eps"], gain="offset"),
    )
    vision = Vision(tower=made, projector=projector, placeholder=placeholder, both_ways=True)
    return VisionLanguageModel.of(text, vision)


class NoHead:
    """`vision_use_head`, which must be false; the class default is true."""

    key = "vision_use_head"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Refuses a head, and a config that does not say."""
        reader.only(self.key, False, reason="a tower with a head of its own is not supported")
        if self.key not in reader.config:
            raise reader.error(self.key, "missing, and true by default", allowed="false")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns that there is none."""
        return {self.key: False}


class Tokens:
    """How many tokens an image becomes; the projector says it up to rounding, so it is carried."""

    key = "mm_tokens_per_image"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number."""
        images = values["images"]
        side = images["image_size"] // images["patch_size"]
        values["n_tokens"] = reader.size(self.key, default=256, most=2**28)
        reader.require(self.key, int(values["n_tokens"] ** 0.5) <= side, f"at most the {side**2} patches")
        reader.irrelevant(self.key, "the projector says it, up to rounding")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number, as carried where it means the same."""
        projector, made = projector_of(parts, PooledProjector), vision_of(parts).n_tokens
        said = parts.carried.get(self.key, made)
        same = projector.n_side // max(1, int(said**0.5)) == projector.pool
        return {self.key: said if same else made}


def _uncapped(values: Values) -> bool:
    head = values["text"].language_head
    return head is not None and head.softcap is None


def _names(spec: Model, family: str) -> TensorTable:
    projector = [
        entry("vision.projector.weight", "multi_modal_projector.mm_input_projection_weight", Transpose()),
        entry("vision.projector.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    ]
    whole = expect_whole(spec, VisionLanguageModel, family)
    return multimodal_table(whole, gemma3_text.FAMILY.table(whole.text), projector, family)


FAMILY = Family(
    name="gemma3",
    heads=("Gemma3ForConditionalGeneration",),
    keys=(  # defaults as in transformers' Gemma3Config
        IMAGE_DELIMITERS,
        tied(True),
        Text(gemma3_text.FAMILY),
        Check("text_config", (_uncapped, "one without final_logit_softcapping, which is not applied with images")),
        SAME_TIE,
        Nested(
            key="vision_config",
            into="images",
            kind="siglip_vision_model",
            at="vision.tower",
            keys=(*TOWER_IRRELEVANT, NoHead(), *SIGLIP),
        ),
        Tokens(),
        placeholder(262144, beyond=True),
    ),
    build=build,
    names=_names,
)
