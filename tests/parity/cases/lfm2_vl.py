"""lfm2_vl: SigLIP 2's tower with tables larger and smaller than images, squares of four and of nine, a hybrid text."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
from harness import Draw, Inputs, ParityCase, Trace
from seeing_rows import SeeingRows
from torch import Tensor
from transformers import Lfm2Config, Lfm2VlConfig, PreTrainedModel, Siglip2VisionConfig

from cases.lfm2 import CONV, FULL, hybrid


class Seeing(SeeingRows):
    """Images are patches row by row, each of pixels with their channels, padded to the most."""

    projector = "multi_modal_projector"
    norm = "embedding_norm"

    def given(self, tiles: list[Tensor], grids: list[list[int]], patch: int) -> Inputs:
        """Returns the padded patches (N, P, D), which of them there are, and the images' rows and columns."""
        flat = [own.permute(0, 2, 3, 1).flatten(1) for own in tiles]
        padded = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(own)).long() for own in flat], batch_first=True)
        shapes = torch.tensor([(rows, columns) for _, rows, columns in grids])
        return {"pixel_values": padded, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    def images(self, inputs: Inputs) -> Inputs:
        """Returns texts and images."""
        names = ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes")
        return {name: inputs[name] for name in names}

    @torch.inference_mode()
    def theirs(self, model: PreTrainedModel, inputs: Inputs) -> Trace:
        """The images' vectors without those of padding, the stream and the logits."""
        images = {name: x for name, x in self.images(inputs).items() if name != "input_ids"}
        made = torch.cat([*model.model.get_image_features(**images).pooler_output])  # type: ignore[union-attr]  # pyright: ignore
        return super().theirs(model, inputs) | {"vision": made[None]}


def config(rng: Random, merge: int, *, normed: bool, bias: bool, **more: object) -> Lfm2VlConfig:
    """A config of a small tower beside a text of convolutions and attention."""
    text = hybrid(rng, Lfm2Config, layer_types=[CONV, FULL, CONV], block_multiple_of=3, **more)
    # some image has fewer columns than the table of positions: in others antialiasing changes nothing
    heads, side = rng.choice([2, 3]), rng.choice([4, 5, 7, 12])
    images = Siglip2VisionConfig(
        hidden_size=heads * rng.choice([7, 10]),
        intermediate_size=rng.randrange(20, 40),
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_channels=rng.randrange(1, 4),
        patch_size=rng.randrange(2, 4),
        num_patches=side**2,
        hidden_act=rng.choice(["gelu_pytorch_tanh", "relu"]),
        layer_norm_eps=rng.uniform(1e-3, 1e-2),
        vision_use_head=False,
    )
    return Lfm2VlConfig(
        text_config=text,
        vision_config=images,
        image_token_id=rng.randrange(text.vocab_size),
        projector_hidden_act=rng.choice(["gelu", "silu"]),
        projector_hidden_size=rng.randrange(10, 30),
        projector_bias=bias,
        projector_use_layernorm=normed,
        downsample_factor=merge,
        tie_word_embeddings=text.tie_word_embeddings,
    )


CONFIGS: dict[str, Draw] = {
    "fours_tied": partial(config, merge=2, normed=False, bias=True, tie_word_embeddings=True),
    "nines_normed": partial(config, merge=3, normed=True, bias=False, tie_word_embeddings=False),
}

COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
INERT = {f"vision.tower.blocks.{i}.attention.body.k.bias": "adds the same to every score of a query" for i in range(3)}
CASE = ParityCase(family="lfm2_vl", configs=CONFIGS, kind=Seeing(), inert_fields=COSTS, inert_weights=INERT)
