"""voxtral: an encoder whose vectors are joined by two and by three, beside a llama text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from drawn import draw
from harness import BATCH, TOKENS, Draw, Inputs, Kind, ParityCase, Trace, random_tokens
from seeing_grids import Streams
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, VoxtralConfig, VoxtralForConditionalGeneration
from transformers.models.voxtral import VoxtralEncoderConfig

from asbuilt.nn.audio_language_model import AudioLanguageModel as Built
from asbuilt.nn.model import Model
from asbuilt.spec import AudioLanguageModel
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec.part import Kernel


class HearingInText(Kind):
    """One text with one sound, another with two; traced once with them, once as texts alone."""

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return VoxtralForConditionalGeneration(config)  # type: ignore[arg-type]  # pyright: ignore

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives."""
        return VoxtralForConditionalGeneration.from_pretrained(folder, **settings)  # type: ignore[arg-type]

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with a placeholder for each token of their sounds, and spectrograms."""
        assert isinstance(spec, AudioLanguageModel)
        hearing, n = spec.hearing, spec.hearing.n_tokens
        tokens = random_tokens(rng, spec.n_vocab)
        tokens[tokens == hearing.placeholder] = (hearing.placeholder + 1) % spec.n_vocab
        first, second = rng.randrange(1, TOKENS // 2 - n), rng.randrange(TOKENS // 2, TOKENS - n)
        for row, at in ((0, first), (1, first), (1, second)):
            tokens[row, at : at + n] = hearing.placeholder
        assert BATCH == 2
        frames, generator = hearing.tower.embedding, torch.Generator().manual_seed(rng.randrange(2**32))
        mels = torch.randn(3, frames.n_mels, frames.n_frames, generator=generator)
        return {"input_ids": tokens, "input_features": mels}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The encoder's stream, the sounds' vectors, the text's stream and the logits; without sounds too."""
        inner: Any = model.model
        traces: Trace = {}
        made = inner.multi_modal_projector.register_forward_hook(
            lambda module, args, out: traces.update(hearing=out[None])
        )
        text, tower = inner.language_model, inner.audio_tower
        for place, given in (("", inputs), ("text.", {"input_ids": inputs["input_ids"]})):
            heard = Streams([*tower.layers, tower.layer_norm], f"{place}tower.", traces)
            with heard, Streams([*text.layers, text.norm], place, traces):
                traces[f"{place}head"] = model(**given, use_cache=False).logits
        made.remove()
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        assert isinstance(model, Built)
        traces: Trace = {}
        made = model.hearing.projector.register_forward_hook(
            lambda module, args, out: traces.update(hearing=out.flatten(0, 1)[None])
        )
        tower = model.hearing.tower
        assert tower.norm is not None
        assert model.norm is not None
        for place, audio in (("", inputs["input_features"]), ("text.", None)):
            heard = Streams([*tower.blocks, tower.norm], f"{place}tower.", traces)
            with heard, Streams([*model.blocks, model.norm], place, traces):
                traces[f"{place}head"] = model(inputs["input_ids"], audio=audio, kernel=kernel)
        made.remove()
        return traces


def config(rng: Random, joined: int, activation: str) -> VoxtralConfig:
    """A config of a small encoder beside a small text."""
    text = draw(rng, LlamaConfig, tie_word_embeddings=False)
    heads = rng.choice([2, 3])
    width = heads * rng.choice([6, 10])
    sounds = VoxtralEncoderConfig(
        hidden_size=width,
        intermediate_size=joined * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        activation_function=activation,
        num_mel_bins=rng.randrange(5, 12),
        max_source_positions=joined * rng.randrange(4, 8),
    )
    return VoxtralConfig(
        text_config=text,
        audio_config=sounds,
        audio_token_id=rng.randrange(text.vocab_size),
        projector_hidden_act=rng.choice(["gelu", "silu"]),
    )


CONFIGS: dict[str, Draw] = {
    "by_two": partial(config, joined=2, activation="gelu"),
    "by_three": partial(config, joined=3, activation="relu"),
}
CASE = ParityCase(family="voxtral", configs=CONFIGS, kind=HearingInText())
