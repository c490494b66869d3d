"""mllama: one image of each text, in tiles of several tilings, which tokens from its place on see; and texts alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from drawn import draw as text
from harness import BATCH, TOKENS, Draw, Inputs, Kind, ParityCase, Trace, random_tokens
from torch import Tensor, nn
from transformers import MllamaConfig, MllamaForConditionalGeneration, PreTrainedConfig, PreTrainedModel
from transformers.models.mllama import MllamaTextConfig, MllamaVisionConfig

from asbuilt.nn.model import Model
from asbuilt.nn.tiles import TiledVision, Tiles
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import TilePatches, VisionLanguageModel
from asbuilt.spec.part import Kernel
from cases.vit import ACTIVATIONS


class SeeingTiles(Kind):
    """One image in each text, of different tilings; traced once with them, once as texts alone."""

    def make(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Returns transformers' model of the config."""
        return MllamaForConditionalGeneration(config)  # type: ignore[arg-type]  # pyright: ignore

    def load(self, folder: Path, **settings: object) -> Any:  # noqa: ANN401  # as the kind it overrides
        """Returns what `from_pretrained` gives."""
        return MllamaForConditionalGeneration.from_pretrained(folder, **settings)  # type: ignore[arg-type]

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with one placeholder each, their images' tiles and tilings, and which tokens see which tile."""
        assert isinstance(spec, VisionLanguageModel)
        vision, embedding = spec.vision, spec.patches
        assert isinstance(embedding, TilePatches)
        tokens = random_tokens(rng, spec.n_vocab)
        tokens[tokens == vision.placeholder] = (vision.placeholder + 1) % spec.n_vocab
        several = [i for i, (rows, columns) in enumerate(embedding.tilings) if rows * columns > 1]
        chosen = rng.sample(several, BATCH)
        side, n = embedding.image_size, embedding.n_tiles
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        pixels = torch.randn(BATCH, 1, n, embedding.channels, side, side, generator=generator)
        tiles, seen = torch.zeros(BATCH, 1, n, dtype=torch.long), torch.zeros(BATCH, TOKENS, 1, n, dtype=torch.long)
        for row, i in enumerate(chosen):
            count, at = embedding.tilings[i][0] * embedding.tilings[i][1], rng.randrange(2, TOKENS // 2)
            tokens[row, at] = vision.placeholder
            tiles[row, 0, :count], pixels[row, 0, count:] = 1, 0.0
            seen[row, at:, 0, :count] = 1
        return {
            "input_ids": tokens,
            "pixel_values": pixels,
            "aspect_ratio_ids": torch.tensor(chosen)[:, None] + 1,
            "aspect_ratio_mask": tiles,
            "cross_attention_mask": seen,
        }

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The tower's stream, the images' vectors, the text's stream and the logits; without images too."""
        inner: Any = model.model
        traces: Trace = {}
        vision, decoder = inner.vision_model, inner.language_model
        tower = [*vision.transformer.layers, *vision.global_transformer.layers, inner.multi_modal_projector]
        alone = [layer for layer in decoder.layers if not hasattr(layer, "cross_attn")]
        for place, given, layers in (
            ("", inputs, decoder.layers),
            ("text.", {"input_ids": inputs["input_ids"]}, alone),
        ):
            with Outputs(tower, "vision", traces), Outputs(layers, f"{place}blocks", traces):
                traces[f"{place}head"] = model(**given, use_cache=False).logits
        return traces

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The same of our model."""
        vision = model.get_submodule("vision")
        assert isinstance(vision, TiledVision)
        traces: Trace = {}
        tower = [*vision.tower.blocks, vision.projector]
        alone = [block for block in model.blocks if not hasattr(block, "cross")]
        for place, images, layers in (("", tiles(inputs, vision), model.blocks), ("text.", None, alone)):
            with Outputs(tower, "vision", traces), Outputs(layers, f"{place}blocks", traces):
                traces[f"{place}head"] = model(inputs["input_ids"], images=images, kernel=kernel)
        return traces


class Outputs:
    """Keeps what each of these modules gives, token after token of all images, or of each text."""

    def __init__(self, modules: Iterable[nn.Module], place: str, traces: Trace) -> None:
        self.modules, self.place, self.traces = modules, place, traces

    def __enter__(self) -> None:
        self.hooks = [module.register_forward_hook(partial(self._keep, i)) for i, module in enumerate(self.modules)]

    def _keep(self, i: int, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.traces[f"{self.place}.{i}"] = out.flatten(0, -2)[None] if self.place == "vision" else out

    def __exit__(self, *said: object) -> None:
        for hook in self.hooks:
            hook.remove()


def tiles(inputs: Inputs, vision: TiledVision) -> Tiles:
    """The images as our model takes them."""
    known = vision.embedding.part.tilings
    chosen = inputs["aspect_ratio_ids"][:, 0].tolist()
    return Tiles(inputs["pixel_values"][:, 0], tuple(known[i - 1] if i <= len(known) else (0, 0) for i in chosen))


def draw(rng: Random, *, ratios: list[list[int]] | None = None, crossing: list[int] | None = None) -> MllamaConfig:
    """A config of a small tower and a small text; tiles have 17 tokens."""
    inner: Any = text(rng, MllamaTextConfig, tie_word_embeddings=False, num_hidden_layers=4, bos_token_id=1)
    inner.cross_attention_layers = crossing or [1, 3]
    heads, taps = rng.choice([2, 3]), [2, 0]
    width = heads * rng.choice([4, 6])
    patch = rng.choice([2, 3])
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "attention_heads": heads,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "intermediate_size": rng.randrange(20, 40),
        "num_channels": rng.randrange(1, 4),
        "vision_output_dim": width * (1 + len(taps)),
        "image_size": 4 * patch + rng.randrange(patch),
        "patch_size": patch,
        "norm_eps": rng.uniform(0.01, 0.1),
        "hidden_act": rng.choice(ACTIVATIONS),
        "max_num_tiles": 4,
        "intermediate_layers_indices": taps,
        "supported_aspect_ratios": ratios,
    }
    return MllamaConfig(
        text_config=inner,
        vision_config=MllamaVisionConfig(**sizes),
        image_token_index=inner.vocab_size + rng.randrange(8),
    )


CONFIGS: dict[str, Draw] = {
    "usual": draw,
    "tilings": partial(draw, ratios=[[2, 1], [1, 1], [1, 2], [3, 1]], crossing=[0, 2]),
}

CASE = ParityCase(
    family="mllama",
    configs=CONFIGS,
    kind=SeeingTiles(),
    inert_fields={"vision.projector.activation": "stands between maps, and there is one"},
    attentions=("eager",),
)
