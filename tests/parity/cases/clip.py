"""clip: both towers, and how near images and texts are; texts that end where their end is, or at the highest number."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import BATCH, TOKENS, Draw, Inputs, Kind, ParityCase, Trace, random_tokens
from images import Traced, pixels, stream
from transformers import CLIPConfig, CLIPModel, PreTrainedConfig, PreTrainedModel, SiglipModel

from asbuilt.nn.dual_encoder import DualEncoder as Built
from asbuilt.nn.model import Model
from asbuilt.spec import DualEncoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel
from cases.vit import tower

PLACE = "vision.tower."


class Pairs(Kind):
    """Texts and images that are compared."""

    decodes = False

    def __init__(self, kind: type[CLIPModel] | type[SiglipModel]) -> None:
        self.kind = kind

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return self.kind(config)  # type: ignore[arg-type]

    def load(self, folder: Any, **settings: Any) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives."""
        return self.kind.from_pretrained(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns two texts and three images."""
        assert isinstance(spec, DualEncoder)
        images = pixels(rng, spec.vision.tower, BATCH + 1)
        return {"input_ids": random_tokens(rng, spec.n_vocab), "pixel_values": images}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The streams of both towers, and how near each image is to each text."""
        out: Any = model(**inputs, output_hidden_states=True)
        images = stream(out.vision_model_output.hidden_states, PLACE)
        return stream(out.text_model_output.hidden_states) | images | {"head": out.logits_per_image[:, None]}

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        assert isinstance(model, Built)
        with Traced(model) as text, Traced(model.vision.tower, PLACE) as images:
            near = model(inputs["input_ids"], images=inputs["pixel_values"], kernel=kernel)
        return text.trace | images.trace | {"head": near[:, None]}


def draw(rng: Random, end: int) -> CLIPConfig:
    """A config of two towers of unlike sizes; `end` is the token at which a text is read."""
    text = {k: v for k, v in tower(rng).items() if k not in ("num_channels", "image_size", "patch_size")}
    text |= {"vocab_size": rng.randrange(10, 20), "max_position_embeddings": TOKENS, "eos_token_id": end}
    return CLIPConfig(text_config=text, vision_config=tower(rng), projection_dim=rng.randrange(5, 15))


CONFIGS: dict[str, Draw] = {"end": partial(draw, end=5), "highest": partial(draw, end=2)}

CASE = ParityCase(
    family="clip",
    configs=CONFIGS,
    kind=Pairs(CLIPModel),
    inert_weights={"k.bias": "adds the same number to every score of a query, which softmax does not see"},
)
