"""Texts with images in them: how they are made, fed and traced on either side."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from harness import BATCH, TOKENS, Inputs, Kind, Trace, random_tokens
from images import Traced, pixels, stream
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from asbuilt.nn.model import Model
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec.part import Kernel


class Seeing(Kind):
    """One text with one image, another with none beside it but two; traced once with them, once as texts alone."""

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return AutoModelForImageTextToText.from_config(config)

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives."""
        return AutoModelForImageTextToText.from_pretrained(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with a placeholder for each token of their images, one in the first and two in the second."""
        assert isinstance(spec, VisionLanguageModel)
        vision = spec.vision
        n, token = vision.n_tokens, vision.placeholder
        tokens = random_tokens(rng, spec.n_vocab)
        tokens[tokens == token] = (token + 1) % spec.n_vocab
        first, second = rng.randrange(1, TOKENS // 2 - n), rng.randrange(TOKENS // 2, TOKENS - n)
        tokens[0, first : first + n] = token
        tokens[1, first : first + n] = token
        tokens[1, second : second + n] = token
        assert BATCH == 2
        kinds = (tokens == token).long()
        return {"input_ids": tokens, "pixel_values": pixels(rng, vision.tower, 3), "token_type_ids": kinds}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream and the logits, with images and without."""
        given = {key: x for key, x in inputs.items() if key != "token_type_ids" or model.config.model_type == "gemma3"}
        traces: Trace = {}
        for place, beside in (("", given), ("text.", {"input_ids": inputs["input_ids"]})):
            out: Any = model(**beside, output_hidden_states=True, use_cache=False)
            hidden = stream(out.hidden_states[:-1], place)  # the last is normed
            traces |= hidden | {f"{place}head": out.logits}
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        traces: Trace = {}
        for place, images in (("", inputs["pixel_values"]), ("text.", None)):
            with Traced(model, place) as traced:
                logits = model(inputs["input_ids"], images=images, kernel=kernel)
            del traced.trace[f"{place}blocks.{len(model.blocks) - 1}"]
            traces |= traced.trace | {f"{place}head": logits}
        return traces
