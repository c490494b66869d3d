"""The qwen2_5_vl family: qwen2_vl with a tower of RMSNorm and gated feed-forward, whose attention is in windows.

Bai et al. 2025 (arXiv 2502.13923). Blocks attend within squares of `window_size` pixels, but those in
`fullatt_block_indexes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import qwen2_vl
from asbuilt.families.shared import image_grid
from asbuilt.families.shared.image_grid import OutWidth
from asbuilt.families.shared.key import Irrelevant, Values, but
from asbuilt.families.shared.multimodal import Text
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.table import TensorTable
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import LanguageModel, Model, RMSNorm, VisionLanguageModel, Windowed

HEAD = "Qwen2_5_VLForConditionalGeneration"
TEXT = replace(qwen2_vl.TEXT, name="qwen2_5_vl_text", heads=(HEAD,))


class _Windows:
    """How many patches a window has on a side, of pixels rounded down to whole squares, and the blocks without one."""

    pixels, whole = "window_size", "fullatt_block_indexes"

    def read(self, reader: ConfigReader, values: Values) -> None:
        square = values["merge"] * values["patch_size"]
        size = reader.size(self.pixels, default=112, least=square, most=2**14)
        values["window"] = size // square * values["merge"]
        reader.irrelevant(self.pixels, "carried, since it is rounded down to whole squares of patches")
        said, n = reader.config.get(self.whole, [7, 15, 23, 31]), values["n_layers"]
        ok = isinstance(said, list) and all(is_whole(i) and 0 <= i < 2**10 for i in said)
        reader.known.add(self.whole)
        reader.require(self.whole, ok, "a list of blocks")
        reader.irrelevant(self.whole, "carried, since it may name blocks that there are not")
        values["whole"] = tuple(sorted({i for i in said if i < n}))

    def write(self, parts: Parts) -> dict[str, Any]:
        bodies = [block.branches[0].body for block in parts.model.blocks]
        whole = [i for i, body in enumerate(bodies) if not isinstance(body, Windowed)]
        said = parts.carried.get(self.whole)
        same = isinstance(said, list) and sorted({i for i in said if i < len(bodies)}) == whole
        side = next((body.side for body in bodies if isinstance(body, Windowed)), None)
        pixels = {} if side is None else {self.pixels: side * parts.at("model.embedding.patch_size")}
        kept, square = parts.carried.get(self.pixels), parts.at("model.embedding.patch_size")
        if side is None or (is_whole(kept) and kept // square == side):
            pixels = {self.pixels: kept} if is_whole(kept) else {}
        return pixels | {self.whole: said if same else whole}


TOWER = (
    *image_grid.tower_keys(d_model=3584, d_ff=3420, act="silu", patch_size=14, n_layers=32),
    OutWidth("out_hidden_size", "d_out", default=3584),
    _Windows(),
    Irrelevant("of videos alone", "tokens_per_second"),
)


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with a nested text and a tower of its own kind."""
    return image_grid.fix_kind(image_grid.nested_text(config, name), "qwen2_5_vl_vision", "qwen2_5_vl")


def build(text: LanguageModel, images: dict[str, Any], placeholder: int) -> Model:
    """Returns the text with images in it, of a tower of these sizes."""
    window, whole = images["window"], images["whole"]
    made = {"norm": RMSNorm, "gated": True, "window": window, "whole": whole}
    return image_grid.build(text, images, placeholder=placeholder, **made)


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text, newer = TEXT.table(whole.text), (qwen2_vl.NEWER,)
    return image_grid.table(whole, text, family, merger=qwen2_vl.MERGER, prefix="visual.", spellings=newer)


FAMILY = replace(
    qwen2_vl.FAMILY,
    name="qwen2_5_vl",
    heads=(HEAD,),
    prepare=prepared,
    keys=but(  # defaults as in transformers' Qwen2_5_VLConfig and Qwen2_5_VLVisionConfig
        qwen2_vl.FAMILY.keys,
        images=Nested(key="vision_config", into="images", kind="qwen2_5_vl_vision", at="vision.tower", keys=TOWER),
        text=Text(TEXT),
    ),
    build=build,
    names=_names,
)
