"""The qwen3_vl family: a tower with interpolated positions, of which some blocks reach the text's first layers too.

Bai et al. 2025 (arXiv 2511.21631). The text is qwen3's with M-RoPE whose coordinates take turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

from asbuilt.families import llama, qwen3
from asbuilt.families.shared import image_grid
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import AROUND, SAME_WIDTH, MultiAxisRope, OutWidth, image_token
from asbuilt.families.shared.key import Values, but, tied
from asbuilt.families.shared.multimodal import SAME_TIE, Text
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import TIED, ConfigReader, is_whole
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes
from asbuilt.families.shared.table import TensorTable
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import GridPositions, GridVision, LanguageModel, Model, VisionLanguageModel

HEAD = "Qwen3VLForConditionalGeneration"
ROPE = MultiAxisRope(theta=500000.0, sections=(24, 20, 20), interleaved=True)
# From the text's own names to those of a text within a whole.
TEXT_NAMES = (("model.", "model.language_model."),)
MERGER = {"norm": "norm", "layers_0": "linear_fc1", "layers_1": "linear_fc2"}
PLAIN = {"ffn.body.up": "mlp.linear_fc1", "ffn.body.down": "mlp.linear_fc2"}

TEXT = replace(
    llama.FAMILY,
    name="qwen3_vl_text",
    heads=(HEAD,),
    keys=(  # defaults as in transformers' Qwen3VLTextConfig
        *but(
            sizes(
                n_vocab=151936,
                d_model=4096,
                d_ff=22016,
                n_layers=32,
                n_heads=32,
                n_kv_heads=32,
                d_head=128,
                context=128000,
            ),
            rotary=ROPE,
        ),
        RMS_EPS,
        ATTENTION_BIAS,
    ),
    build=partial(llama.build, head_norms=True),
    names=qwen3.FAMILY.names,
)


@dataclass(frozen=True, eq=False, repr=False)
class Positions:
    """How many learned positions the tower has, those of a square."""

    key: str
    default: int

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number."""
        count = reader.size(self.key, default=self.default)
        values["side"] = isqrt(count)
        reader.require(self.key, values["side"] ** 2 == count, "a square number")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number."""
        path = "vision.tower.positions"
        return {self.key: parts.expect(parts.at("model.positions"), GridPositions, path).n_side ** 2}


class Taps:
    """Which of the tower's blocks reach the text's first layers too."""

    key, into = "deepstack_visual_indexes", "taps"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the blocks."""
        said, n = reader.config.get(self.key, [8, 16, 24]), values["n_layers"]
        reader.known.add(self.key)
        whole = isinstance(said, list) and all(is_whole(i) and 0 <= i < n for i in said)
        reader.require(self.key, whole and said == sorted({*said}), f"ascending numbers of blocks, 0 to {n - 1}")
        values["taps"] = tuple(said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the blocks."""
        vision = parts.around.expect(parts.around.whole(VisionLanguageModel).vision, GridVision, "vision")
        return {self.key: [*vision.taps]}


TOWER = (
    *image_grid.tower_keys(d_model=1152, d_ff=4304, act="gelu_pytorch_tanh", patch_size=16, n_layers=27),
    OutWidth("out_hidden_size", "d_out", default=3584),
    Positions("num_position_embeddings", 2304),
    Taps(),
)


def prepared(kind: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with a tower of its own kind; whether embeddings are tied, the whole says, not the text."""
    inner, said = config.get("text_config"), config.get(TIED, False)
    if isinstance(inner, dict):
        config = config | {"text_config": inner | {TIED: said}}
    return image_grid.fix_kind(config, f"{kind}_vision", kind)


def build(text: LanguageModel, images: dict[str, Any], placeholder: int) -> Model:
    """Returns the text with images in it, of a tower of these sizes."""
    side, taps = images["side"], images.get("taps", ())
    return image_grid.build(text, images, placeholder=placeholder, patch_bias=True, side=side, taps=taps)


def table(text: Family, spec: Model, family: str) -> TensorTable:
    """Returns the table of a whole with this text."""
    whole = expect_whole(spec, VisionLanguageModel, family)
    inner = text.table(whole.text)
    return image_grid.table(whole, inner, family, merger=MERGER, mlp=PLAIN, beginnings=TEXT_NAMES)


def nested(kind: str, keys: tuple[Any, ...] = TOWER) -> Nested:
    """Returns the key of the tower's config."""
    return Nested(key="vision_config", into="images", kind=kind, at="vision.tower", keys=keys)


FAMILY = Family(
    name="qwen3_vl",
    heads=(HEAD,),
    prepare=partial(prepared, "qwen3_vl"),
    keys=(  # defaults as in transformers' Qwen3VLConfig and Qwen3VLVisionConfig
        AROUND,
        Text(TEXT),
        tied(False),
        SAME_TIE,
        nested("qwen3_vl_vision"),
        SAME_WIDTH,
        image_token(151655),
    ),
    build=build,
    names=partial(table, TEXT),
)
