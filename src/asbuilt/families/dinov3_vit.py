"""The dinov3_vit family: dinov2's blocks with registers, and RoPE by the centres of patches in place of a table.

Simeoni et al. 2025 (arXiv 2508.10104); names on disk as on the hub. The token that stands for masked patches in
training is stored, and read by nothing else. Nothing stored depends on `image_size`: change it for images of
another size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Flag, Irrelevant, Number, Size, defaults
from asbuilt.families.shared.names import ATTENTION, GATED, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.table import BesideNone, Leading, TensorTable
from asbuilt.families.shared.towers import CLIP, tower
from asbuilt.spec import MLP, Block, Centres, GatedMLP, ImageEncoder, Model, PatchEmbedding, Rotary

NAMES = Names(
    stems={
        "attention.norm": "norm1",
        **{path: name.replace("self_attn", "attention") for path, name in ATTENTION.items()},
        "attention.layer_scale": "layer_scale1.lambda1",
        "ffn.norm": "norm2",
        **GATED,
        "ffn.layer_scale": "layer_scale2.lambda1",
    },
    outside={
        "embedding": "embeddings.patch_embeddings",
        "embedding.class_token": "embeddings.cls_token",
        "embedding.registers": "embeddings.register_tokens",
        "embedding.mask_token": "embeddings.mask_token",
        "norm": "norm",
    },
    layers="layer",
    layouts={
        "embedding.class_token": Leading(2),
        "embedding.registers": Leading(1),
        "embedding.mask_token": Leading(2),
    },
)
IN_MEMORY = (("layer.", "model.layer."),)
WIDE = (
    lambda values: values["d_model"] // values["n_heads"] % 4 == 0,
    "such that the width of a head is a multiple of 4, for RoPE by rows and columns",
)
ALIKE = (lambda values: values["value_bias"] == values["bias"], "the same as query_bias")
WITH_QUERIES = (lambda values: values["bias"] or not values["key_bias"], "false unless query_bias is true")


def build(
    *,
    gated: bool,
    n_registers: int,
    theta: float,
    bias: bool,
    value_bias: bool,
    key_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    name: str = "dinov3_vit",
    **sizes: Any,  # noqa: ANN401
) -> Model:
    """Returns the tower of these `sizes`, whose feed-forwards are `gated` or of two maps."""
    assert value_bias == bias, "biases of queries and values are one field"
    spec = tower(**sizes, patch_bias=True, bias=bias)
    embedding = replace(spec.embedding, mask_token=True, n_registers=n_registers)
    block, wide = spec.blocks[0], spec.d_model // sizes["n_heads"]
    rotary = Rotary(d_rotary=wide, theta=theta, axes=_centres(embedding))
    parts = {"positions": rotary, "key_bias": key_bias or not bias, "output_bias": output_bias}
    attention, ffn = (replace(branch, layer_scale=True) for branch in block.branches)
    made = {"d_model": spec.d_model, "d_ff": sizes["d_ff"], "activation": sizes["activation"], "bias": mlp_bias}
    ffn = replace(ffn, body=GatedMLP(**made) if gated else MLP(**made))
    block = Block(branches=(replace(attention, body=replace(attention.body, **parts)), ffn))  # type: ignore[type-var]  # pyright: ignore
    return replace(
        spec,
        name=name,
        embedding=embedding,
        positions=None,
        blocks=(block,) * spec.n_layers,
        max_positions=embedding.n_tokens,
    )


def _centres(embedding: PatchEmbedding) -> Centres:
    return Centres(n_side=embedding.n_side, n_before=embedding.n_added)


def _keys_biased(parts: Parts) -> bool:
    """Returns whether keys have a bias, which the spec says of maps whose queries have one."""
    return parts.attention.bias and parts.attention.key_bias


def _names(spec: Model, family: str) -> TensorTable:
    entries = NAMES.entries(spec, family)
    if isinstance(spec, ImageEncoder) and not spec.embedding.n_registers:  # stored all the same
        token, names = "embedding.class_token", ("embedding.class_token", "embedding.registers")
        stored = tuple(NAMES.outside[name] for name in names)
        entries = [replace(one, names=stored, layout=BesideNone()) if one.paths == (token,) else one for one in entries]
    return TensorTable(entries=tuple(entries), spellings=(IN_MEMORY,))


FAMILY = Family(
    name="dinov3_vit",
    prefix="dinov3_vit.",
    heads=("DINOv3ViTModel",),
    causal=False,
    keys=(  # defaults as in transformers' DINOv3ViTConfig
        *defaults(CLIP, patch_size=16, d_model=384, n_heads=6, d_ff=1536, activation="gelu", eps=1e-5),
        Check("num_attention_heads", WIDE),
        Number("rope_theta", "theta", default=100.0, at="attention.positions.theta"),
        Size("num_register_tokens", "n_registers", default=0, least=0, most=2**10, at="model.embedding.n_registers"),
        Flag("query_bias", "bias", default=True),
        Flag("value_bias", "value_bias", default=True, must=ALIKE, at="attention.bias"),
        Flag("key_bias", "key_bias", default=False, must=WITH_QUERIES, at=_keys_biased),
        Flag("proj_bias", "output_bias", default=True, at="attention.output_bias"),
        Flag("mlp_bias", "mlp_bias", default=True),
        Flag("use_gated_mlp", "gated", default=False, at=lambda parts: isinstance(parts.ffn, GatedMLP)),
        Irrelevant("training only", "drop_path_rate"),
        Irrelevant(
            "training only: they move coordinates at random", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"
        ),
        Irrelevant("where training begins: the factors are stored with the weights", "layerscale_value"),
        Irrelevant(
            "of a backbone, whose blocks others read",
            "apply_layernorm",
            "reshape_hidden_states",
            "return_class_token",
            "out_features",
            "out_indices",
            "stage_names",
        ),
    ),
    build=build,
    names=_names,
)
