"""Models of images: how they are made, fed with pixels, and traced on either side."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import BATCH, Inputs, Kind, Trace
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from asbuilt.nn.image_encoder import ImageEncoder as Built
from asbuilt.nn.model import Model
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import PatchEmbedding
from asbuilt.spec.part import Kernel


class Images(Kind):
    """Models of the class `usual`, or of the one that the config names, which read images alone."""

    decodes = False

    def __init__(self, usual: str) -> None:
        self.usual = usual

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return self.kind(config.architectures)(config)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` of the folder's class gives."""
        return self.kind(json.loads((folder / "config.json").read_text()).get("architectures")).from_pretrained(
            folder, **settings
        )

    def kind(self, named: list[str] | None) -> Any:  # noqa: ANN401  # a class that is looked up by name
        """Returns the class of that name."""
        return getattr(transformers, (named or [self.usual])[0])

    def inputs(self, rng: random.Random, spec: ModelSpec) -> Inputs:
        """Returns pixels (B, C, H, W)."""
        return {"pixel_values": pixels(rng, spec, BATCH)}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream before the blocks, after each, and the labels' numbers; or the normed stream, and it pooled."""
        out: Any = model(**inputs, output_hidden_states=True)
        if "logits" in out:
            return stream(out.hidden_states) | {"head": out.logits[:, None]}
        pooled = {} if out.pooler_output is None else {"pooler": out.pooler_output[:, None]}
        return stream(out.hidden_states) | {"head": out.last_hidden_state} | pooled

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        with Traced(model) as traced:
            head = model(inputs["pixel_values"], kernel=kernel)
        if model.head is not None:
            return traced.trace | {"head": head[:, None]}
        assert isinstance(model, Built)
        if model.pooler is None:
            return traced.trace | {"head": head}
        pooled = model.pooled(inputs["pixel_values"], kernel=kernel)
        return traced.trace | {"head": head, "pooler": pooled[:, None]}


def pixels(rng: random.Random, spec: ModelSpec, images: int) -> Tensor:
    """Images of normal numbers, of the size that the model of patches reads."""
    embedding = spec.embedding
    assert isinstance(embedding, PatchEmbedding)
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randn(images, embedding.channels, embedding.image_size, embedding.image_size, generator=generator)


def stream(hidden: tuple[Tensor, ...], place: str = "") -> Trace:
    """What transformers calls hidden states, by our paths."""
    first, *blocks = hidden
    return {f"{place}embedding": first} | {f"{place}blocks.{i}": x for i, x in enumerate(blocks)}


class Traced:
    """Keeps the stream before the blocks and after each of those that run, by path, `place` first."""

    def __init__(self, model: Model, place: str = "") -> None:
        self.model, self.place = model, place
        self.trace: Trace = {}

    def __enter__(self) -> Traced:
        self.hooks = [self.model.blocks[0].register_forward_pre_hook(self._first)]
        self.hooks += [
            block.register_forward_hook(partial(self._after, i)) for i, block in enumerate(self.model.blocks)
        ]
        return self

    def _first(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.trace[f"{self.place}embedding"] = args[0]

    def _after(self, i: int, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        self.trace[f"{self.place}blocks.{i}"] = result

    def __exit__(self, *said: object) -> None:
        for hook in self.hooks:
            hook.remove()
