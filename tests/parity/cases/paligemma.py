"""paligemma: prompts that see both ways with their images, answers that do not; a placeholder beyond all tokens.

With gemma2's text (PaliGemma 2) prompts are longer than its windows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from harness import TOKENS, Draw, Inputs, ParityCase, Trace
from images import Traced, stream
from seeing import Seeing
from transformers import PaliGemmaConfig, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig

from asbuilt.nn.model import Model
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel
from cases import gemma, gemma2
from cases.vit import tower


class Prefixed(Seeing):
    """Each text is a prompt with its images and an answer; without images it is an answer alone."""

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with images, whose tokens have the type 0 in the prompt and 1 in the answer."""
        found = super().inputs(rng, spec)
        last = [int(row.nonzero().max()) for row in found["token_type_ids"]]
        prefix = torch.tensor([rng.randrange(n + 1, TOKENS) for n in last])
        return found | {"token_type_ids": (torch.arange(TOKENS) >= prefix[:, None]).long()}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The stream and the logits, with images and without."""
        answer = torch.ones_like(inputs["token_type_ids"])
        traces: Trace = {}
        for place, given in (("", inputs), ("text.", {"input_ids": inputs["input_ids"], "token_type_ids": answer})):
            out: Any = model(**given, output_hidden_states=True, use_cache=False)
            traces |= stream(out.hidden_states[:-1], place) | {f"{place}head": out.logits}
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        prefix = tuple((inputs["token_type_ids"] == 0).sum(1).tolist())
        traces: Trace = {}
        for place, beside in (("", {"images": inputs["pixel_values"], "prefix": prefix}), ("text.", {})):
            with Traced(model, place) as traced:
                logits = model(inputs["input_ids"], **beside, kernel=kernel)
            del traced.trace[f"{place}blocks.{len(model.blocks) - 1}"]
            traces |= traced.trace | {f"{place}head": logits}
        return traces


def draw(
    rng: Random, *, text: Callable[..., PreTrainedConfig] = gemma.draw, beyond: bool = False, **more: object
) -> PaliGemmaConfig:
    """A config whose images are nine tokens each; the placeholder is one of the text's, or one `beyond` them all."""
    tied = rng.random() < 0.5
    inner = text(rng, tie_word_embeddings=tied, **more)
    inner.pad_token_id = 0
    sizes: dict[str, Any] = tower(rng)
    return PaliGemmaConfig(
        text_config=inner,
        vision_config=SiglipVisionConfig(**sizes, vision_use_head=False),
        image_token_index=inner.vocab_size if beyond else rng.randrange(1, inner.vocab_size),
        projection_dim=inner.hidden_size,
        tie_word_embeddings=tied,
    )


CONFIGS: dict[str, Draw] = {
    "inside": draw,
    "beyond": partial(draw, beyond=True),
    "biased": partial(draw, attention_bias=True),
    "gemma2": partial(draw, text=gemma2.draw, sliding_window=7),
}

UNSEEN = "adds the same number to every score of a query, which softmax does not see"

CASE = ParityCase(
    family="paligemma",
    configs=CONFIGS,
    kind=Prefixed(),
    attentions=("eager",),  # gemma2's capped scores
    inert_weights={f"tower.blocks.{i}.attention.body.k.bias": UNSEEN for i in range(2)},
    inert_fields={"vision.projector.activation": "stands between maps, and there is one"},
)
