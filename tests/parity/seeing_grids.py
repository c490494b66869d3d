"""Texts with images of any size in them: how they are made, fed and traced on either side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any

import torch
from harness import TOKENS, Inputs, Trace, random_tokens
from seeing import Seeing
from torch import Tensor, nn
from transformers import PreTrainedModel

from asbuilt.nn.image_grid import GridVision, Patches
from asbuilt.nn.model import Model
from asbuilt.spec import GridVision as Spec
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec.part import Kernel

# Squares of each image, in rows and columns: one in the first text, two in the second; windows leave a rest of some.
SQUARES = ((3, 5), (2, 3), (5, 1))


class SeeingGrids(Seeing):
    """One text with one image, another with two of other shapes; traced once with them, once as texts alone."""

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts, their images' patches and grids, and which tokens the images replace."""
        assert isinstance(spec, VisionLanguageModel)
        vision = spec.vision
        assert isinstance(vision, Spec)
        token, merge = vision.placeholder, vision.projector.merge
        tokens = random_tokens(rng, spec.n_vocab)
        tokens[tokens == token] = (token + 1) % spec.n_vocab
        places = ((0, rng.randrange(1, 20)), (1, rng.randrange(1, 15)), (1, rng.randrange(25, TOKENS - 6)))
        for (row, first), (rows, columns) in zip(places, SQUARES, strict=True):
            tokens[row, first : first + rows * columns] = token
        grids = torch.tensor([(1, merge * rows, merge * columns) for rows, columns in SQUARES])
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        values = torch.randn(int(grids.prod(1).sum()), vision.tower.embedding.d_patch, generator=generator)
        kinds = (tokens == token).int()
        return {"input_ids": tokens, "pixel_values": values, "image_grid_thw": grids, "mm_token_type_ids": kinds}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The images' vectors, the stream before each block and after the last, and the logits; without images too."""
        inner: Any = model
        text = inner.model.language_model
        traces: Trace = {}
        hooks = [inner.model.visual.register_forward_hook(lambda _, args, out: traces.update(_seen_by_them(out)))]
        for place, given in (("", inputs), ("text.", {"input_ids": inputs["input_ids"]})):
            inner.model.rope_deltas = None
            with Streams([*text.layers, text.norm], place, traces):
                traces[f"{place}head"] = inner(**given, use_cache=False).logits
        hooks[0].remove()
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        images = patches(inputs)
        vision = model.get_submodule("vision")
        assert isinstance(vision, GridVision)
        assert model.norm is not None
        seen = vision.seen(images, kernel)
        traces: Trace = {"vision": seen.made[None]} | {f"vision.{i}": one[None] for i, one in enumerate(seen.added)}
        for place, given in (("", images), ("text.", None)):
            with Streams([*model.blocks, model.norm], place, traces):
                traces[f"{place}head"] = model(inputs["input_ids"], images=given, kernel=kernel)
        return traces


def patches(inputs: Inputs) -> Patches:
    """The images as our model takes them."""
    return Patches(inputs["pixel_values"], tuple(tuple(grid) for grid in inputs["image_grid_thw"].tolist()))


def _seen_by_them(out: Any) -> Trace:  # noqa: ANN401  # an output class per model
    added = getattr(out, "deepstack_features", None) or []
    return {"vision": out.pooler_output[None]} | {f"vision.{i}": one[None] for i, one in enumerate(added)}


class Streams:
    """Keeps what goes into each of these modules, as the stream before the blocks and after each."""

    def __init__(self, modules: Iterable[nn.Module], place: str, traces: Trace) -> None:
        self.modules, self.place, self.traces = modules, place, traces

    def __enter__(self) -> None:
        self.hooks = [module.register_forward_pre_hook(partial(self._keep, i)) for i, module in enumerate(self.modules)]

    def _keep(self, i: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.traces[f"{self.place}{f'blocks.{i - 1}' if i else 'embedding'}"] = args[0]

    def __exit__(self, *said: object) -> None:
        for hook in self.hooks:
            hook.remove()


Sizes = Callable[[Random], dict[str, Any]]


def tower(rng: Random, **more: object) -> dict[str, Any]:
    """Sizes of a small tower; `more` overrides."""
    heads = rng.choice([2, 3])
    return {
        "depth": 3,
        "num_heads": heads,
        "hidden_size": heads * rng.choice([8, 12]),
        "intermediate_size": rng.randrange(20, 40),
        "in_channels": rng.randrange(1, 4),
        "patch_size": rng.randrange(2, 4),
        "temporal_patch_size": rng.randrange(1, 3),
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(5.0, 50.0)},
        **more,
    }
