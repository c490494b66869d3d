"""gemma3n: images through a small MobileNet-V5, sounds through a conformer, tokens of both with rows of their own."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from harness import Draw, Inputs, ParityCase, Trace, random_tokens
from images import Traced, pixels
from mobilenet import SMALL
from seeing import Seeing
from torch import Tensor, nn
from transformers import Gemma3nAudioConfig, Gemma3nConfig, Gemma3nVisionConfig, PreTrainedModel

from asbuilt.nn.model import Model
from asbuilt.nn.vision_language_model import VisionLanguageModel as Built
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec.part import Kernel
from cases.gemma3n_text import draw as text

# Frames of each of three sounds: of one length, since transformers pads shorter ones with what convolutions then read.
FRAMES = 29


class Senses(Seeing):
    """One image and two sounds in the first text, and one of each in the second; and texts alone, with own tokens."""

    def load(self, folder: Any, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives; towers have one way of computing attention."""
        asked = settings.get("attn_implementation")
        if asked is not None:
            settings["attn_implementation"] = {"text_config": asked, "vision_config": "eager", "audio_config": "eager"}
        return super().load(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with placeholders, images and sounds."""
        assert isinstance(spec, VisionLanguageModel)
        assert spec.hearing is not None
        image, sound = spec.vision.placeholder, spec.hearing.placeholder
        tokens = random_tokens(rng, spec.n_vocab)
        for own in spec.own_tokens:  # some in every text
            for row in tokens:
                row[rng.randrange(40, 48)] = rng.randrange(own.first, own.past)
        tokens[(tokens == image) | (tokens == sound)] = rng.randrange(20)
        seen, heard = spec.vision.n_tokens, spec.hearing.n_tokens
        at = rng.randrange(1, 5)
        tokens[0, at : at + seen], tokens[0, at + 9 : at + 9 + heard], tokens[0, 24 : 24 + heard] = image, sound, sound
        tokens[1, at : at + heard], tokens[1, 20 : 20 + seen] = sound, image
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        mels = torch.randn(3, FRAMES, spec.hearing.tower.embedding.n_mels, generator=generator)
        return {
            "input_ids": tokens,
            "pixel_values": pixels(rng, spec.vision.tower, 2),
            "input_features": mels,
            "input_features_mask": torch.ones(3, FRAMES, dtype=torch.bool),
        }

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """What both towers make, the streams and the logits, with images and sounds and without."""
        inner: Any = model.model
        traces: Trace = {}
        towers = Towers(inner.vision_tower, inner.audio_tower.conformer, traces)
        for place, given in (("", inputs), ("text.", {"input_ids": inputs["input_ids"]})):
            with towers:
                out: Any = model(**given, output_hidden_states=True, use_cache=False)
            first, *blocks = (x.permute(1, 2, 0, 3).flatten(2) for x in out.hidden_states[:-1])
            traces |= {f"{place}embedding": first} | {f"{place}blocks.{i}": x for i, x in enumerate(blocks)}
            traces[f"{place}head"] = out.logits
        return towers_first(traces)

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        assert isinstance(model, Built)
        assert model.hearing is not None
        traces: Trace = {}
        senses = {"images": inputs["pixel_values"], "audio": inputs["input_features"].transpose(1, 2)}
        towers = Towers(model.vision.tower.embedding, model.hearing.tower.blocks, traces)
        for place, given in (("", senses), ("text.", {})):
            with towers, Traced(model, place) as traced:
                logits = model(inputs["input_ids"], **given, kernel=kernel)
            del traced.trace[f"{place}blocks.{len(model.blocks) - 1}"]
            traces |= traced.trace | {f"{place}head": logits}
        return towers_first(traces)


class Towers:
    """Keeps what the tower of images gives, and each block of that of sounds."""

    def __init__(self, vision: nn.Module, blocks: Any, traces: Trace) -> None:  # noqa: ANN401  # of modules
        self.vision, self.blocks, self.traces = vision, blocks, traces

    def __enter__(self) -> None:
        self.hooks = [self.vision.register_forward_hook(self._see)]
        self.hooks += [block.register_forward_hook(partial(self._hear, i)) for i, block in enumerate(self.blocks)]

    def _see(self, module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:  # noqa: ANN401
        grid = out if isinstance(out, Tensor) else out.last_hidden_state.flatten(2).transpose(1, 2)
        self.traces["vision"] = grid.clone()  # transformers multiplies it in place

    def _hear(self, i: int, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        self.traces[f"hearing.{i}"] = out

    def __exit__(self, *said: object) -> None:
        for hook in self.hooks:
            hook.remove()


def towers_first(traces: Trace) -> Trace:
    """Returns the traces with those of images first, then of sounds: sides differ in which they compute first."""
    towers = [*(path for path in traces if path == "vision"), *(path for path in traces if path[:7] == "hearing")]
    return {path: traces[path] for path in (*towers, *traces)}


def draw(rng: Random, *, reduction: int = 4, **more: object) -> Gemma3nConfig:
    """A config of small towers, whose tokens follow those of the text, and have no vectors by layer."""
    images, sounds = rng.randrange(3, 6), rng.randrange(3, 6)
    inner = text(rng, vocab_size=50 + images + sounds, **more)
    heads = rng.choice([2, 3])
    audio = Gemma3nAudioConfig(
        vocab_size=sounds,
        vocab_offset=50 + images,
        input_feat_size=rng.randrange(7, 12),
        hidden_size=heads * rng.choice([4, 6]),
        rms_norm_eps=rng.uniform(0.1, 0.3),
        conf_attention_chunk_size=rng.randrange(2, 6),
        conf_attention_context_left=rng.randrange(2, 5),
        conf_attention_logit_cap=rng.uniform(1, 4),
        conf_num_attention_heads=heads,
        conf_num_hidden_layers=2,
        conf_conv_kernel_size=rng.randrange(2, 5),
        conf_reduction_factor=reduction,
        conf_residual_weight=rng.uniform(0.3, 0.7),
        sscp_conv_channel_size=[rng.randrange(3, 6), rng.randrange(3, 6)],
        sscp_conv_group_norm_eps=rng.uniform(0.1, 0.3),
    )
    vision = Gemma3nVisionConfig(
        architecture=SMALL,
        hidden_size=8,
        vocab_size=images,
        vocab_offset=50,
        rms_norm_eps=rng.uniform(0.1, 0.3),
    )
    return Gemma3nConfig(
        text_config=inner,
        vision_config=vision,
        audio_config=audio,
        image_token_id=50 + rng.randrange(images),
        audio_token_id=50 + images + rng.randrange(sounds),
        audio_soft_tokens_per_image=-(-8 // reduction) + rng.randrange(1, 3),
        vision_soft_tokens_per_image=4,
        tie_word_embeddings=inner.tie_word_embeddings,
    )


CONFIGS: dict[str, Draw] = {
    "readers": partial(draw, attention_bias=False, tie_word_embeddings=True),
    "untied": partial(draw, attention_bias=True, tie_word_embeddings=False, reduction=3),
}

BETWEEN = "no activation stands after a single map"
NORMED = "the norm after attention takes any factor away"
INERT = {f"{through}.projector.activation": BETWEEN for through in ("vision", "hearing")}
INERT |= {f"hearing.tower.blocks.{i}.attention.body.value_scale": NORMED for i in range(2)}
CASE = ParityCase(family="gemma3n", configs=CONFIGS, kind=Senses(), inert_fields=INERT)
