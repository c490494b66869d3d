"""Parity of models that hear: spectrograms for the encoder, a text for the decoder, both stacks traced."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from harness import BATCH, Inputs, Kind, Trace, random_tokens
from transformers import PreTrainedConfig, PreTrainedModel, WhisperForConditionalGeneration
from translating import hooks, named

from asbuilt.nn.encoder_decoder import EncoderDecoder as Built
from asbuilt.nn.model import Model
from asbuilt.spec import AudioEncoder, EncoderDecoder
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel


class Hearing(Kind):
    """Models that hear and write, which predict their text's next token."""

    decodes = False  # with the harness's decoder-only calls; test_whisper.py has its own

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return WhisperForConditionalGeneration(config)  # type: ignore[arg-type]

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # a model, or a model and what was amiss
        """Returns what transformers' `from_pretrained` gives with these settings."""
        return WhisperForConditionalGeneration.from_pretrained(folder, **settings)  # type: ignore[arg-type]

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns spectrograms and a text."""
        assert isinstance(spec, EncoderDecoder)
        assert isinstance(spec.encoder, AudioEncoder)
        frames, generator = spec.encoder.embedding, torch.Generator().manual_seed(rng.randrange(2**32))
        mels = torch.randn(BATCH, frames.n_mels, frames.n_frames, generator=generator)
        return {"input_features": mels, "decoder_input_ids": random_tokens(rng, spec.n_vocab)}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """Returns both stacks' streams before the blocks, after each, the last one normed, and logits."""
        out: Any = model(**inputs, output_hidden_states=True, use_cache=False)
        heard = named("encoder.", out.encoder_hidden_states)
        return heard | named("", out.decoder_hidden_states) | {"head": out.logits}

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """Returns the same of our model, seen by hooks on its modules."""
        trace: Trace = {}
        assert isinstance(model, Built)
        seen = [*hooks(model.encoder, "encoder.", trace), *hooks(model, "", trace)]
        try:
            text, mels = inputs["decoder_input_ids"], inputs["input_features"]
            trace["head"] = model(text, audio=mels, kernel=kernel)
        finally:
            for hook in seen:
                hook.remove()
        return trace


HEARING = Hearing()
