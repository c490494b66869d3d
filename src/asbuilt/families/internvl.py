"""The internvl family: InternViT, squares of patches through a normed MLP, and a qwen2 or qwen3 text.

Chen et al. 2023, InternVL (arXiv 2312.14238); Zhu et al. 2025, InternVL3 (arXiv 2504.10479). An image is one square
tile here; a large one comes in several (`media/pieces.py`), each with tokens of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import qwen2, qwen3
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import projector_entries
from asbuilt.families.shared.key import Choice, Flag, Irrelevant, Only, Values, activation, but, defaults, tied
from asbuilt.families.shared.multimodal import SAME_TIE, SPELLINGS, TEXT, TextOf, placeholder, projector_of
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Leading, TensorTable, respelled
from asbuilt.families.shared.towers import CLIP, TOWER_IRRELEVANT, Nested
from asbuilt.spec import (
    Activation,
    Block,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    LearnedPositions,
    MLPProjector,
    Model,
    PatchEmbedding,
    RMSNorm,
    Vision,
    VisionLanguageModel,
)

TEXT_OF = TextOf(qwen2.FAMILY, qwen3.FAMILY, told=lambda parts: "qwen2" if parts.attention.q_norm is None else "qwen3")
NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
# The epsilon of the norms of queries and keys, which no config says.
QK_EPS = 1e-6
NAMES = Names(
    stems={
        "attention.norm": "layernorm_before",
        **{f"attention.body.{part}": f"attention.{part}_proj" for part in "qkv"},
        **{f"attention.body.{part}_norm": f"attention.{part}_norm" for part in "qk"},
        "attention.body.o": "attention.projection_layer",
        "attention.layer_scale": "lambda_1",
        "ffn.norm": "layernorm_after",
        "ffn.body.up": "mlp.fc1",
        "ffn.body.down": "mlp.fc2",
        "ffn.layer_scale": "lambda_2",
    },
    outside={
        "embedding": "embeddings.patch_embeddings.projection",
        "embedding.class_token": "embeddings.cls_token",
        "embedding.mask_token": "embeddings.mask_token",
        "positions.weight": "embeddings.position_embeddings",
        "norm": "layernorm",
    },
    layers="encoder.layer",
    layouts={"embedding.class_token": Leading(2), "embedding.mask_token": Leading(2), "positions": Leading(1)},
)
PROJECTOR = {"norm": "layer_norm", "layers_0": "linear_1", "layers_1": "linear_2"}


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with ties said in both places, and a text of the class's sizes where it describes none."""
    if config.get("text_config") is None:
        config = config | {"text_config": {}}
    return row_towers.tied_as_whole(config)


def build(
    text: LanguageModel, images: dict[str, Any], *, placeholder: int, merge: int = 2, activation: Activation = "gelu"
) -> Model:
    """Returns the text with images in it, of a tower of these sizes, in squares of `merge` x `merge` patches."""
    made = _tower(**images)
    width = made.d_model * merge**2
    projector = MLPProjector(
        widths=(width, text.d_model, text.d_model),
        activation=activation,
        bias=True,
        merge=merge,
        norm=LayerNorm(d=width),
    )
    return VisionLanguageModel.of(text, Vision(tower=made, projector=projector, placeholder=placeholder))


def _tower(
    *,
    image_size: int,
    patch_size: int,
    channels: int = 3,
    masked: bool = False,
    headed: bool = False,
    bias: bool = False,
    norms: type[LayerNorm] | type[RMSNorm] = LayerNorm,
    last_normed: bool = False,
    eps: float,
    **sizes: Any,  # noqa: ANN401  # those of `Dimensions`
) -> ImageEncoder:
    """Returns the tower, with norms over all `headed` queries and keys, and learned positions."""
    embedding = PatchEmbedding(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        d_model=sizes["d_model"],
        bias=True,
        class_token="first",
        mask_token=masked,
    )
    made, d = sized(sizes, n_vocab=0, max_positions=embedding.n_tokens, name="tower"), sizes["d_model"]
    whole = RMSNorm(d=d, eps=QK_EPS) if headed else None
    attention = made.attention(causal=False, cached=False, bias=bias, output_bias=True, q_norm=whole, k_norm=whole)
    block = pre_norm(attention, made.plain(True), norms(d=d, eps=eps))
    block = Block(branches=tuple(replace(branch, layer_scale=True) for branch in block.branches))
    return made.whole(
        ImageEncoder,
        (block,) * made.n_layers,
        LayerNorm(d=d, eps=eps) if last_normed else None,
        embedding=embedding,
        positions=LearnedPositions(n_positions=embedding.n_tokens, d_model=d),
        head=None,
    )


class _Ratio:
    """What an image's sides are multiplied by when squares of patches are joined: 1, 1/2, 1/4 ..."""

    key = "downsample_ratio"

    def read(self, reader: ConfigReader, values: Values) -> None:
        ratio = reader.number(self.key, default=0.5, above=0.0)
        images = values["images"]
        side = images["image_size"] // images["patch_size"]
        fitting = [2**i for i in range(side.bit_length()) if side % 2**i == 0]
        merge = next((n for n in fitting if 1 / n == ratio), 0)  # others are refused there for a remainder
        allowed = f"1 over a power of 2 that divides {side}, the patches on a side"
        reader.require(self.key, merge > 0, allowed)
        values["merge"] = merge

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: 1 / projector_of(parts, MLPProjector).merge}


class _Pooled:
    """Whether the tower's output is meant to be averaged, and so not normed; nothing here averages it."""

    key = "use_mean_pooling"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["last_normed"] = not reader.flag(self.key, default=True)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: parts.model.norm is None}


TOWER = (  # defaults as in transformers' InternVLVisionConfig
    *TOWER_IRRELEVANT,
    *defaults(
        but(CLIP, eps={"at": "first.norm.eps"}),
        image_size=448,
        patch_size=14,
        d_model=1024,
        n_layers=24,
        n_heads=16,
        d_ff=4096,
        activation="gelu",
        eps=1e-6,
    ),
    Flag("attention_bias", "bias", default=False),
    Flag("use_qk_norm", "headed", default=False, at=lambda parts: parts.attention.q_norm is not None),
    Choice("norm_type", "norms", default="layer_norm", choices=NORMS, at=lambda parts: type(parts.first.norm)),
    Flag("use_mask_token", "masked", default=False, at="model.embedding.mask_token"),
    Only("use_absolute_position_embeddings", True, reason="a tower without positions is not supported"),
    _Pooled(),
    Irrelevant("training only", "projection_dropout"),
    Irrelevant("where training begins: the factors are stored with the weights", "layer_scale_init_value"),
)


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    first = Parts(whole.text, family, {}).attention
    text = (qwen2 if first.q_norm is None else qwen3).FAMILY.table(whole.text)
    again = {f"language_model.{name}": path for name, path in text.duplicates.items()}
    return TensorTable(
        entries=(
            *respelled(text.entries, TEXT),
            *NAMES.entries(whole.vision.tower, family, "vision.tower.", "vision_tower."),
            *projector_entries(whole, "vision.projector", PROJECTOR, "multi_modal_projector", family),
        ),
        ignored=text.ignored,
        duplicates=again | text.duplicates,
        spellings=SPELLINGS,
    )


FAMILY = Family(
    name="internvl",
    heads=("InternVLForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' InternVLConfig
        TEXT_OF,
        tied(True),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind="internvl_vision", at="vision.tower", keys=TOWER),
        _Ratio(),
        replace(activation("projector_hidden_act", "gelu"), at="vision.projector.activation"),
        replace(placeholder(151667), key="image_token_id", also=("image_token_index",)),
        Only("vision_feature_layer", -1, reason="only the tower's output is projected here"),
        Only("vision_feature_select_strategy", "default", reason="squares are of patches, without the class token"),
        Irrelevant("follows from the tower's size, and only the processor uses it", "image_seq_length"),
    ),
    build=build,
    names=_names,
)
