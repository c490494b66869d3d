"""gemma4: images of any size whose patches are averaged, bidirectional in windows, in texts of every kind; sounds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from harness import Draw, Inputs, ParityCase, Trace, random_tokens
from seeing_grids import SQUARES, Streams
from seeing_rows import SeeingRows
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4VisionConfig, PreTrainedModel

from asbuilt.nn.audio import Sounds
from asbuilt.nn.model import Model
from asbuilt.nn.vision_language_model import VisionLanguageModel as Built
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec.part import Kernel
from cases.gemma2 import SMOOTH
from cases.gemma4_text import EXPERTS, NONE, SAME
from cases.gemma4_text import draw as text

FRAMES = (29, 37, 22)  # of three sounds, which make 8, 10 and 6 tokens


class Seeing(SeeingRows):
    """Images as their patches and the column and row of each, padded to the most, as transformers' model takes them.

    A model that hears has one sound in the first text, and two in the second.
    """

    projector = "embed_vision"

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives; what hears has one way of computing attention."""
        asked = settings.get("attn_implementation")
        hears = json.loads((folder / "config.json").read_text()).get("audio_config") is not None
        if asked is not None and hears:
            settings["attn_implementation"] = {"text_config": asked, "vision_config": asked, "audio_config": "eager"}
        return super().load(folder, **settings)

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with placeholders, images, and sounds padded to one length, with masks."""
        assert isinstance(spec, VisionLanguageModel)
        found, place = super().inputs(rng, spec), spec.vision.placeholder
        if spec.hearing is not None:
            found["input_ids"] = self.with_sounds(rng, spec)
            bands, generator = spec.hearing.tower.embedding.n_mels, torch.Generator().manual_seed(rng.randrange(2**32))
            mask = torch.arange(max(FRAMES)) < torch.tensor(FRAMES)[:, None]
            mels = torch.randn(len(FRAMES), max(FRAMES), bands, generator=generator) * mask[..., None]
            found |= {"input_features": mels, "input_features_mask": mask}
        return found | {"mm_token_type_ids": (found["input_ids"] == place).long()}

    def with_sounds(self, rng: Random, spec: VisionLanguageModel) -> Tensor:
        """Returns texts with the placeholders of all images and sounds."""
        assert spec.hearing is not None
        image, sound = spec.vision.placeholder, spec.hearing.placeholder
        tokens = random_tokens(rng, spec.n_vocab)
        other = next(i for i in range(spec.n_vocab) if i not in (image, sound))
        tokens[(tokens == image) | (tokens == sound)] = other
        counts = [spec.hearing.tokens_of(frames) for frames in FRAMES]
        large, wide, narrow = (rows * columns for rows, columns in SQUARES)
        at = rng.randrange(1, 5)
        tokens[0, at : at + large], tokens[0, at + large + 1 : at + large + 1 + counts[0]] = image, sound
        tokens[1, at : at + counts[1]], tokens[1, 16 : 16 + wide], tokens[1, 24 : 24 + narrow] = sound, image, image
        tokens[1, 40 : 40 + counts[2]] = sound
        return tokens

    def given(self, tiles: list[Tensor], grids: list[list[int]], patch: int) -> Inputs:
        """Returns the patches, each of pixels with their channels, and their columns and rows, -1 of padding."""
        flat = [own.permute(0, 2, 3, 1).flatten(1) for own in tiles]
        places = [
            torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1) for _, rows, columns in grids
        ]
        return {
            "pixel_values": pad_sequence(flat, batch_first=True),
            "image_position_ids": pad_sequence(places, batch_first=True, padding_value=-1),
        }

    def images(self, inputs: Inputs) -> Inputs:
        """Returns texts, images and sounds."""
        return {name: x for name, x in inputs.items() if name not in ("squares", "image_grid_thw")}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The images' vectors, the stream and the logits, and without images; of what hears, that and what it gives."""
        traces: Trace = {}
        inner: Any = model.model
        if "input_features" not in inputs:
            return super().theirs(model, inputs)
        tower, valid = inner.audio_tower, inputs["input_features_mask"][:, ::2][:, ::2]
        made = inner.embed_audio.register_forward_hook(lambda module, args, out: traces.update(hearing=out))
        with Streams([*tower.layers, tower.output_proj], "hearing.", traces):
            text = super().theirs(model, inputs)
        made.remove()
        return {path: x[valid][None] for path, x in traces.items()} | text

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        if "input_features" not in inputs:
            return super().ours(model, inputs, kernel)
        assert isinstance(model, Built)
        assert model.hearing is not None
        heard, traces = Joined([*model.hearing.tower.blocks, model.hearing.projector], "hearing."), super().ours
        lengths = inputs["input_features_mask"].sum(1).tolist()
        each = zip(inputs["input_features"], lengths, strict=True)
        audio = Sounds(tuple(mel[:n].T.contiguous() for mel, n in each))
        with heard:
            text = traces(_Hearing(model, audio), inputs, kernel)  # type: ignore[arg-type]  # pyright: ignore
        return {path: torch.cat(found, 1) for path, found in heard.found.items()} | text


class _Hearing:
    """A model that is given the same sounds with all images."""

    def __init__(self, model: Built, audio: Sounds) -> None:
        self.model, self.audio = model, audio

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.model, name)

    def __call__(self, ids: Tensor, *, images: Tensor | None, kernel: Kernel) -> Tensor:
        audio = None if images is None else self.audio
        return self.model(ids, images=images, audio=audio, kernel=kernel)


class Joined:
    """Keeps what goes into each of these modules, and what the last gives, over all sounds one after the other."""

    def __init__(self, modules: list[nn.Module], place: str) -> None:
        self.modules, self.place, self.found = modules, place, dict[str, list[Tensor]]()

    def __enter__(self) -> Joined:
        self.hooks = [module.register_forward_pre_hook(partial(self._keep, i)) for i, module in enumerate(self.modules)]
        self.hooks.append(self.modules[-1].register_forward_hook(self._end))
        return self

    def _keep(self, i: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._add(f"blocks.{i - 1}" if i else "embedding", args[0])

    def _end(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        self._add("", out)

    def _add(self, path: str, x_NTM: Tensor) -> None:
        self.found.setdefault(f"{self.place}{path}".removesuffix("."), []).append(x_NTM.flatten(0, 1)[None])

    def __exit__(self, *said: object) -> None:
        for hook in self.hooks:
            hook.remove()


def draw(
    rng: Random,
    *,
    both: bool = True,
    standardize: bool = True,
    clipped: bool = False,
    sounds: Gemma4AudioConfig | None = None,
    **more: object,
) -> Gemma4Config:
    """A config of a tower with a few more positions than the images have, of which costs are those of nine tokens."""
    ways, pool = "vision" if both else None, rng.choice([2, 3])
    inner = text(rng, tie_word_embeddings=True, sliding_window=6, use_bidirectional_attention=ways, **more)
    inner.pad_token_id = 0
    sizes: dict[str, Any] = {
        "hidden_size": rng.choice([20, 28]),
        "intermediate_size": rng.randrange(20, 40),
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_activation": rng.choice(SMOOTH),
        "rms_norm_eps": rng.uniform(0.1, 0.3),
        "patch_size": 2,
        "pooling_kernel_size": pool,
        "position_embedding_size": pool * max(max(sides) for sides in SQUARES) + rng.randrange(3),
        "standardize": standardize,
        "use_clipped_linears": clipped,
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(5, 20)},
    }
    return Gemma4Config(
        text_config=inner,
        vision_config=Gemma4VisionConfig(**sizes),
        audio_config=sounds,
        # a text to a model without ears has no token for sounds; read without a sound every one is looked up as 0
        audio_token_id=rng.choice([inner.vocab_size + 1, *([] if sounds is None else [0])]),
        image_token_id=inner.vocab_size,
        vision_soft_tokens_per_image=9,  # pyright: ignore[reportCallIssue]  # of the processor's, which files hold
        tie_word_embeddings=True,
    )


def hears(rng: Random, *, bounded: bool = True, **more: Any) -> Gemma4Config:  # noqa: ANN401  # as `draw` takes it
    """A config of a text with images and sounds, through a conformer of two blocks, whose maps are `bounded`."""
    heads, window, first = rng.choice([2, 3]), rng.randrange(3, 6), rng.choice([8, 12])
    sounds = Gemma4AudioConfig(
        hidden_size=heads * rng.choice([4, 6]),
        num_hidden_layers=2,
        num_attention_heads=heads,
        hidden_act=rng.choice(["silu", "gelu"]),
        subsampling_conv_channels=[first, rng.randrange(3, 6)],
        conv_kernel_size=rng.randrange(2, 6),
        residual_weight=rng.uniform(0.3, 0.7),
        attention_chunk_size=window + rng.randrange(2),
        attention_context_left=window + 1,
        attention_logit_cap=rng.uniform(1, 4),
        use_clipped_linears=bounded,
        rms_norm_eps=rng.uniform(0.1, 0.3),
        output_proj_dims=rng.randrange(10, 20),
    )
    return draw(rng, sounds=sounds, **more)


CONFIGS: dict[str, Draw] = {
    "experts": partial(draw, num_attention_heads=4, num_key_value_heads=2, hidden_size=36, **SAME, **EXPERTS, **NONE),
    "vectors": partial(draw, both=False, standardize=False),
    "clipped": partial(draw, clipped=True),
    # without bounds the norm after attention hides nearly all that scales its values
    "hears": partial(hears, both=False),
    "hears_clipped": partial(hears, clipped=True),
}

BETWEEN = "no activation stands after a single map"
COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
CASE = ParityCase(
    family="gemma4",
    configs=CONFIGS,
    kind=Seeing(),
    inert_fields=COSTS | {f"hearing.projector.{one}activation": BETWEEN for one in ("", "first.")},
)
