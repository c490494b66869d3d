"""step3p7: texts of both kinds of layers, some clamped, after pictures in views of two sizes, each of few tokens."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from drawn import D_HEAD, WINDOW
from harness import TOKENS, Draw, Inputs, ParityCase, Trace, random_tokens
from images import Traced
from seeing import Seeing
from transformers import Step3p7Config

from asbuilt.nn.image_grid import Patches
from asbuilt.nn.model import Model
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec.part import Kernel

LOCAL = (2, 0, 1)  # smaller views before each picture as a whole: one picture in the first text, two in the second


class Views(Seeing):
    """Pictures as a whole, the tower's own size, and smaller views of some, whose positions are interpolated."""

    def inputs(self, rng: Random, spec: ModelSpec) -> Inputs:
        """Returns texts with a placeholder for each token of their views, and the views' pixels."""
        assert isinstance(spec, VisionLanguageModel)
        vision, embedding = spec.vision, spec.vision.tower.embedding
        token, sides = vision.placeholder, (embedding.n_side - 2, embedding.n_side)
        small, whole = (vision.projector.left(side) ** 2 for side in sides)  # type: ignore[union-attr]  # pyright: ignore
        tokens = random_tokens(rng, spec.n_vocab)
        tokens[tokens == token] = (token + 1) % spec.n_vocab
        for row, runs in enumerate(((small, small, whole), (whole, small, whole))):
            at = 0
            for n in runs:
                at += rng.randrange(1, 4)
                tokens[row, at : at + n] = token
                at += n
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        pixels = [
            torch.randn(3, embedding.channels, *[side * embedding.patch_size] * 2, generator=generator)
            for side in sides
        ]
        given = {"pixel_values": pixels[1], "pixel_values_local": pixels[0], "num_local_patches": torch.tensor(LOCAL)}
        return {"input_ids": tokens, **given}

    @torch.inference_mode()
    def ours(self, model: Model, inputs: Inputs, kernel: Kernel = "fused") -> Trace:
        """The stream and the logits of our model, with images and without."""
        traces: Trace = {}
        for place, images in (("", views(model, inputs)), ("text.", None)):
            with Traced(model, place) as traced:
                logits = model(inputs["input_ids"], images=images, kernel=kernel)
            del traced.trace[f"{place}blocks.{len(model.blocks) - 1}"]
            traces |= traced.trace | {f"{place}head": logits}
        return traces


def views(model: Model, inputs: Inputs) -> Patches:
    """The views as our model takes them: patches of each picture's smaller ones, then of it as a whole."""
    assert isinstance(model.spec, VisionLanguageModel)
    p = model.spec.vision.tower.embedding.patch_size
    small, whole = (iter(inputs[name]) for name in ("pixel_values_local", "pixel_values"))
    found = [next(one) for n in LOCAL for one in (*[small] * n, whole)]
    grids = tuple((1, x.shape[1] // p, x.shape[2] // p) for x in found)
    return Patches(torch.cat([F.unfold(x[None], p, stride=p)[0].T for x in found]), grids)


FULL, SLIDING = "full_attention", "sliding_attention"


def text(rng: Random, **more: object) -> dict[str, Any]:
    """Sizes of a small text, with a base and a part of a head for each kind of layer."""
    ropes = {
        FULL: {"rope_type": "default", "rope_theta": rng.uniform(50, 200), "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": rng.uniform(5, 20), "partial_rotary_factor": 1.0},
    }
    return {
        "vocab_size": rng.randrange(60, 100),
        "hidden_size": rng.choice([40, 72]),
        "intermediate_size": rng.randrange(30, 60),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_sliding_attention_heads": 6,
        "head_dim": D_HEAD,
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": rng.uniform(0.05, 0.2),
        "rope_parameters": ropes,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": rng.randrange(20, 30),
        "share_expert_dim": rng.randrange(20, 30),
        "moe_router_scaling_factor": 1.7,
        "swiglu_limits": [None, 0.0, 0.5],
        "swiglu_limits_shared": [0.6, None, 0.7],
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


def config(rng: Random, side: int, bias: bool, **more: object) -> Step3p7Config:
    """A config of a tower of `side` patches on a side; `more` overrides the text's."""
    inner, heads, patch = text(rng, **more), rng.choice([2, 3]), rng.randrange(2, 4)
    tower = {
        "hidden_size": heads * rng.choice([8, 12]),
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_channels": rng.randrange(1, 4),
        "image_size": side * patch + rng.randrange(patch),
        "patch_size": patch,
        "mlp_ratio": rng.uniform(1.0, 2.0),
        "hidden_act": rng.choice(["quick_gelu", "gelu"]),
        "layer_norm_eps": rng.uniform(0.05, 0.2),
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.uniform(2.0, 20.0)},
    }
    token = rng.randrange(inner["vocab_size"])
    return Step3p7Config(text_config=inner, vision_config=tower, image_token_id=token, projector_bias=bias)


CONFIGS: dict[str, Draw] = {
    "usual": partial(config, side=6, bias=False),
    "biased": partial(
        config,
        side=9,
        bias=True,
        mlp_bias=True,
        layer_types=[FULL, SLIDING, FULL],
        query_pre_attn_scalar=30,
    ),
}

COSTS = {"vision.tower.embedding.image_size": "says of which images the costs are declared"}
CASE = ParityCase(family="step3p7", configs=CONFIGS, kind=Views(), inert_fields=COSTS)
