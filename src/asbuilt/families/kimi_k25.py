"""The kimi_k25 family: images of any size through MoonViT, and a deepseek_v3 text.

Kimi Team 2025, Kimi-VL (arXiv 2504.07491), and the published code of Kimi-K2.5. Images alone are read: a video's frames
attend to each other and are averaged, which no part here does. Names and keys of published folders are those of the
first release; newer versions of transformers have other keys, and some of the tower's stand outside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import deepseek_v3
from asbuilt.families.shared import row_towers
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import TowerRope, projector_entries
from asbuilt.families.shared.key import Check, Declared, Irrelevant, Only, Size, Values, activation, depth, eps, tied
from asbuilt.families.shared.multimodal import SAME_TIE, TEXT, Text, placeholder
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import Reshaped, TensorTable, respelled
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    GridPositions,
    GridVision,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    Model,
    Plane,
    VisionLanguageModel,
)

KIND = "kimi_k25_vision"
# Keys of the projector, which the first release had among the tower's, and their newer names outside it.
OUTSIDE = {"mm_hidden_size": "projection_hidden_size", "projector_ln_eps": "projection_layer_norm_eps"}
PROJECTOR = {"norm": "pre_norm", "layers_0": "proj.0", "layers_1": "proj.2"}
# Names that transformers 5.24 gives where it saves: the tower's renaming is undone in the text too, others are not.
SAVED_AGAIN = (
    ("language_model.model.layers.", "language_model.model.blocks."),
    ("vision_tower.patch_embed.proj.", "vision_tower.encoder.patch_embed.proj."),
    ("mm_projector.pre_norm.", "model.mm_projector.pre_norm."),
)
# Names of modules in newer versions of transformers.
NEWER = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.encoder.blocks.", "model.vision_tower.layers."),
    ("vision_tower.encoder.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("mm_projector.", "model.mm_projector."),
)
HEADS = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
STEMS = {
    "attention.norm": "norm0",
    "attention.body.o": "wo",
    "ffn.norm": "norm1",
    "ffn.body.up": "mlp.fc0",
    "ffn.body.down": "mlp.fc1",
}


class _Square:
    """The side of a square, said as two keys or as one list of two numbers, which must be equal."""

    def __init__(self, into: str, default: int, *spellings: tuple[str, ...]) -> None:
        self.into, self.default, self.spellings = into, default, spellings

    def read(self, reader: ConfigReader, values: Values) -> None:
        said = next((keys for keys in self.spellings if any(key in reader.config for key in keys)), self.spellings[0])
        usual = self.default if len(said) == 2 else [self.default] * 2
        found = [reader.config.get(key, usual) for key in said]
        sides = list(found[0]) if len(said) == 1 and isinstance(found[0], list | tuple) else found
        ok = len(sides) == 2 and all(is_whole(side) and 1 <= side <= 2**10 for side in sides) and sides[0] == sides[1]
        reader.require(said[0], ok, "a square: two equal whole numbers from 1 to 1024")
        reader.known.update(said)
        values[self.into] = sides[0]

    def write(self, parts: Parts) -> dict[str, Any]:
        vision, first = row_towers.vision(parts), self.spellings[0]
        if self.into == "merge":
            return {first[0]: [vision.projector.merge] * 2}
        found = parts.expect(vision.tower.positions, GridPositions, "vision.tower.positions").n_side
        return dict.fromkeys(first, found)


class _Class:
    """The name of the class, which transformers spells otherwise than published configs do; kept as it was."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        said = reader.config.get("architectures")
        if said in [[head] for head in HEADS]:
            reader.carried["architectures"] = said

    def write(self, parts: Parts) -> dict[str, Any]:
        return {"architectures": parts.carried.get("architectures") or [HEADS[0]]}


class _TextWidth(Declared):
    """The width of the projector's output, which the first release said among the tower's."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.irrelevant("text_hidden_size", "carried: it is the text's width")
        values["d_out"] = reader.config.get("text_hidden_size")


class _ProjectorWidth:
    """The width of the projector's input, which is the tower's."""

    key = "projection_hidden_size"

    def read(self, reader: ConfigReader, values: Values) -> None:
        wide = values["images"]["d_model"]
        same = reader.size(self.key, default=1152) == wide
        reader.require(self.key, same, f"{wide}, as wide as the tower")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: row_towers.vision(parts).tower.d_model}


TOWER = (  # defaults as in transformers' Kimi_K25VisionConfig
    Size("hidden_size", "d_model", default=1152, also=("vt_hidden_size",)),
    Size("num_attention_heads", "n_heads", default=16, also=("vt_num_attention_heads",), divides="d_model"),
    depth("num_hidden_layers", 27, "vt_num_hidden_layers"),
    Size("intermediate_size", "d_ff", default=4304, also=("vt_intermediate_size",)),
    activation(default="gelu_pytorch_tanh"),
    Size("patch_size", "patch_size", default=14, most=2**10, at="model.embedding.patch_size"),
    _Square("side", 64, ("pos_emb_height", "pos_emb_width"), ("init_pos_emb_height", "init_pos_emb_width")),
    _Square("merge", 2, ("merge_kernel_size",)),
    TowerRope(),
    Irrelevant("of videos alone", "pos_emb_time", "init_pos_emb_time", "video_attn_type"),
    Only("pos_emb_type", "divided_fixed", reason="the only positions of the published code"),
    Only("merge_type", "sd2_tpool", reason="the only way to merge in the published code"),
    Only("mm_projector_type", "patchmerger", reason="the only projector of these models"),
    Only("projector_hidden_act", "gelu", reason="the published code has this activation, whatever a config says"),
    _TextWidth(),
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with the projector's keys outside the tower, a text of its kind, and ties said in both."""
    inner, images = config.get("text_config"), config.get("vision_config")
    inner = {} if inner is None else inner
    if isinstance(inner, dict):
        kind = {"model_type": "deepseek_v3"} if inner.get("model_type") == "kimi_k2" else {}
        config = row_towers.tied_as_whole(config | {"text_config": inner | kind})
    if isinstance(images, dict):
        moved = {new: images[old] for old, new in OUTSIDE.items() if old in images and new not in config}
        kept = {key: value for key, value in images.items() if OUTSIDE.get(key) not in moved}
        named = {} if kept.get("model_type") else {"model_type": KIND}  # published ones have an empty one
        config = moved | config | {"vision_config": kept | named}
    return config


def build(text: LanguageModel, images: dict[str, Any], placeholder: int, eps: float) -> Model:
    """Returns the text with images in it, of a tower of these sizes."""
    d_model, merge = images["d_model"], images["merge"]
    norm, wide = LayerNorm(d=d_model, eps=row_towers.EPS), d_model * merge**2
    tower = row_towers.tower(
        {"channels": 3, **images},
        norm,
        Plane(alternating=True),
        pairing="adjacent",
        bias=True,
        norm=norm,
        positions=GridPositions(n_side=images["side"], d_model=d_model, interpolation="cubic"),
    )
    projector = MLPProjector(
        widths=(wide, wide, text.d_model),
        activation="gelu",
        bias=True,
        merge=merge,
        norm=LayerNorm(d=d_model, eps=eps),
    )
    return VisionLanguageModel.of(text, GridVision(tower=tower, projector=projector, placeholder=placeholder))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    tower, text = whole.vision.tower, deepseek_v3.FAMILY.table(whole.text)
    layouts: dict[str, Any] = {"embedding.weight": row_towers.patches(whole.vision.tower, family, "vision.tower.")}
    if isinstance(tower.positions, GridPositions):
        n, d = tower.positions.n_side, tower.d_model
        layouts["positions.weight"] = Reshaped((n * n, d), (n, n, d))
    names = Names(
        stems=STEMS,
        outside={
            "embedding": "patch_embed.proj",
            "positions": "patch_embed.pos_emb",
            "norm": "encoder.final_layernorm",
        },
        layers="encoder.blocks",
        fused={"wqkv": Fused.qkv()},
        layouts=layouts,
    )
    entries = (
        *respelled(text.entries, TEXT),
        *names.entries(tower, family, "vision.tower.", "vision_tower."),
        *projector_entries(whole, "vision.projector", PROJECTOR, "mm_projector", family),
    )
    again = {f"language_model.{name}": path for name, path in text.duplicates.items()}
    return TensorTable(entries=entries, ignored=text.ignored, duplicates=again, spellings=(SAVED_AGAIN, NEWER))


FAMILY = Family(
    name="kimi_k25",
    heads=HEADS,
    prepare=prepared,
    keys=(  # defaults as in transformers' Kimi_K25Config
        _Class(),
        Text(deepseek_v3.FAMILY),
        tied(True),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind=KIND, at="vision.tower", keys=TOWER),
        Check(
            "vision_config.text_hidden_size",
            (
                lambda values: values["images"].pop("d_out") in (None, values["text"].d_model),
                lambda values: f"as wide as the text, {values['text'].d_model}",
            ),
        ),
        replace(placeholder(163605), key="image_token_id", also=("media_placeholder_token_id",)),
        _ProjectorWidth(),
        replace(eps("projection_layer_norm_eps", 1e-5), at="vision.projector.norm.eps"),
        Irrelevant(
            "tokens that the processor puts around images, or that stand for videos",
            *("vision_start_token_id", "vision_end_token_id", "video_token_id", "video_placeholder"),
        ),
        Irrelevant("of the processor", "use_unified_vision_chunk"),
        Irrelevant("training only", "ignore_index"),
    ),
    build=build,
    names=_names,
)
