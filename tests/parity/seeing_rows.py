"""Texts with images of any size whose patches transformers takes row by row, or as pixels."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from harness import Inputs, Trace
from seeing_grids import SeeingGrids, Streams
from torch import Tensor
from transformers import PreTrainedModel

from asbuilt.kernels.image_grid import row_by_row
from asbuilt.nn.model import Model
from asbuilt.spec import GridVision, VisionLanguageModel
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel


class SeeingRows(SeeingGrids):
    """The inputs of grids, whose patches theirs takes row by row (P, C, H, W) as `pixel_values`."""

    projector = "mm_projector"
    norm = "norm"

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts, their images' patches in both orders, and their grids."""
        assert isinstance(spec, VisionLanguageModel)
        found = super().inputs(rng, spec)
        squares, vision = found.pop("pixel_values"), spec.vision
        del found["mm_token_type_ids"]
        grids = found["image_grid_thw"].tolist()
        each = squares.split([t * h * w for t, h, w in grids])
        assert isinstance(vision, GridVision)
        merge = vision.projector.merge
        rows = [row_by_row(x[None], (h, w), merge)[0] for x, (_, h, w) in zip(each, grids, strict=True)]
        p = vision.tower.embedding.patch_size
        tiles = [x.unflatten(1, (-1, p, p)) for x in rows]
        return found | {"squares": squares} | self.given(tiles, grids, p)

    def given(self, tiles: list[Tensor], grids: list[list[int]], patch: int) -> Inputs:
        """Returns what theirs takes of images, of the tiles of each (P, C, p, p), row by row."""
        return {"pixel_values": torch.cat(tiles)}

    def images(self, inputs: Inputs) -> Inputs:
        """Returns what theirs takes beside a text."""
        return {name: x for name, x in inputs.items() if name != "squares"}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The images' vectors, the stream before each block and after the last, and the logits; without images too."""
        inner: Any = model
        text, traces = inner.model.language_model, {}
        projector = inner.model.get_submodule(self.projector)
        hook = projector.register_forward_hook(
            lambda module, args, out: traces.update(vision=out.reshape(1, -1, out.shape[-1]))
        )
        for place, given in (("", self.images(inputs)), ("text.", {"input_ids": inputs["input_ids"]})):
            with Streams([*text.layers, text.get_submodule(self.norm)], place, traces):
                traces[f"{place}head"] = inner(**given, use_cache=False).logits
        hook.remove()
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        return super().ours(model, inputs | {"pixel_values": inputs["squares"]}, kernel)
