"""The dinov2 family: vit's tower with a learned factor for every number that a branch adds, and SwiGLU in the largest.

Oquab et al. 2023 (arXiv 2304.07193); names on disk as on the hub. The token that stands for masked patches in training
is stored, and read by nothing else. Its classifier, of the class token beside the mean of the patches, is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Values, but, defaults
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Leading, TensorTable
from asbuilt.families.shared.towers import CLIP, tower
from asbuilt.spec import Block, GatedMLP, Model

PLAIN = Names(
    stems={
        "attention.norm": "norm1",
        "attention.body.q": "attention.attention.query",
        "attention.body.k": "attention.attention.key",
        "attention.body.v": "attention.attention.value",
        "attention.body.o": "attention.output.dense",
        "attention.layer_scale": "layer_scale1.lambda1",
        "ffn.norm": "norm2",
        "ffn.body.up": "mlp.fc1",
        "ffn.body.down": "mlp.fc2",
        "ffn.layer_scale": "layer_scale2.lambda1",
    },
    outside={
        "embedding": "embeddings.patch_embeddings.projection",
        "embedding.class_token": "embeddings.cls_token",
        "embedding.mask_token": "embeddings.mask_token",
        "positions.weight": "embeddings.position_embeddings",
        "norm": "layernorm",
    },
    layers="encoder.layer",
    layouts={"embedding.class_token": Leading(2), "embedding.mask_token": Leading(1), "positions": Leading(1)},
)
GATED = replace(
    PLAIN,
    stems={**PLAIN.stems, "ffn.body.down": "mlp.weights_out"},
    fused={"mlp.weights_in": Fused(stems=("ffn.body.gate", "ffn.body.up"))},
)


def build(*, gated: bool, masked: bool, name: str = "dinov2", **sizes: Any) -> Model:  # noqa: ANN401
    """Returns the tower of these `sizes`, with SwiGLU if `gated` and a token of masked patches if `masked`."""
    spec = tower(**sizes, patch_bias=True)
    block = _scaled(spec.blocks[0], gated)
    embedding = replace(spec.embedding, mask_token=masked)
    return replace(spec, name=name, embedding=embedding, blocks=(block,) * spec.n_layers)


def _scaled(block: Block, gated: bool) -> Block:
    """Returns the block with learned factors on both branches."""
    attention, ffn = (replace(branch, layer_scale=True) for branch in block.branches)
    if gated:
        swiglu = GatedMLP(d_model=ffn.body.d_model, d_ff=ffn.body.d_ff, activation="silu", bias=True)  # type: ignore[union-attr]  # pyright: ignore
        ffn = replace(ffn, body=swiglu)
    return Block(branches=(attention, ffn))


def _hidden(d_model: int, ratio: int, gated: bool) -> int:
    """Returns d_ff: `ratio` times the width, of SwiGLU two thirds of that, rounded up to a multiple of 8."""
    wide = ratio * d_model
    return (int(wide * 2 / 3) + 7) // 8 * 8 if gated else wide


class _Ratio:
    """How much wider than the stream feed-forwards are, and whether they are SwiGLU."""

    ratio, swiglu = "mlp_ratio", "use_swiglu_ffn"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["gated"] = reader.flag(self.swiglu, default=False)
        ratio = reader.size(self.ratio, default=4, most=2**10)
        values["d_ff"] = _hidden(values["d_model"], ratio, values["gated"])

    def write(self, parts: Parts) -> dict[str, Any]:
        body = parts.model.blocks[0].branches[-1].body
        gated, d_model = isinstance(body, GatedMLP), body.d_model
        d_ff: int = body.d_ff  # type: ignore[union-attr]  # pyright: ignore
        most = 3 * d_ff // (2 * d_model) + 1
        fits = (n for n in range(1, most + 1) if _hidden(d_model, n, gated) == d_ff)
        return {self.ratio: next(fits, most), self.swiglu: gated}


def _names(spec: Model, family: str) -> TensorTable:
    names = GATED if isinstance(spec.blocks[0].branches[-1].body, GatedMLP) else PLAIN
    return TensorTable(entries=tuple(names.entries(spec, family)))


FAMILY = Family(
    name="dinov2",
    prefix="dinov2.",
    heads=("Dinov2Model",),
    causal=False,
    keys=(  # defaults as in transformers' Dinov2Config
        *defaults(but(CLIP, d_ff=None), patch_size=14, activation="gelu", eps=1e-6),
        _Ratio(),
        Flag("qkv_bias", "bias", default=True),
        Flag("use_mask_token", "masked", default=True, at="model.embedding.mask_token"),
        Irrelevant("training only", "attention_probs_dropout_prob", "drop_path_rate"),
        Irrelevant("where training begins: the factors are stored with the weights", "layerscale_value"),
        Irrelevant(
            "of a backbone, whose blocks others read",
            "apply_layernorm",
            "reshape_hidden_states",
            "out_features",
            "out_indices",
            "stage_names",
        ),
    ),
    build=build,
    names=_names,
)
