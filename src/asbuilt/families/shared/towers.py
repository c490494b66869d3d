"""What the families with a vision tower share: the tower of patches, its config keys, its names on disk.

ViT, CLIP and SigLIP differ in what stands around the same blocks: LayerNorm before attention and before an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, divide, named_entries
from asbuilt.families.shared.fused import branches, expect
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Entry, Layout, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Classifier,
    LayerNorm,
    LearnedPositions,
    Model,
    PatchEmbedding,
    Projection,
    Rotary,
    TokenEmbedding,
)
from asbuilt.spec.vision import ClassToken

WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_pytorch_tanh"}

# CLIP's and SigLIP's names of what is inside a block
STEMS = {
    "attention.norm": "layer_norm1",
    "attention.body.q": "self_attn.q_proj",
    "attention.body.k": "self_attn.k_proj",
    "attention.body.v": "self_attn.v_proj",
    "attention.body.o": "self_attn.out_proj",
    "ffn.norm": "layer_norm2",
    "ffn.body.up": "mlp.fc1",
    "ffn.body.down": "mlp.fc2",
}
OUTSIDE = {
    "embedding.weight": "embeddings.patch_embedding.weight",
    "embedding.bias": "embeddings.patch_embedding.bias",
    "embedding.class_token": "embeddings.class_embedding",
    "positions.weight": "embeddings.position_embedding.weight",
    "embedding_norm.weight": "pre_layrnorm.weight",
    "embedding_norm.bias": "pre_layrnorm.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
POSITION_IDS = {r"(.*\.)?embeddings\.position_ids": "the numbers of the positions, 0, 1, 2 ..."}

# The class defaults of transformers' CLIPVisionConfig and SiglipVisionConfig.
CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
SIGLIP_DEFAULTS = CLIP_DEFAULTS | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


def layers(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    eps: float,
    activation: Activation,
    bias: bool = True,
    causal: bool = False,
    rotary: Rotary | None = None,
) -> tuple[Block, ...]:
    """Returns the blocks of a tower, of a text that comes all at once where they are `causal`.

    `bias` is that of queries, keys and values; all other maps have one.
    """
    norm = LayerNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        causal=causal,
        positions=rotary,
        bias=bias,
        output_bias=True,
        cached=not causal,
    )
    ffn = MLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=True)
    both = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    return (Block(branches=both),) * n_layers


def tower(
    *,
    image_size: int,
    patch_size: int,
    channels: int = 3,
    patch_bias: bool = False,
    class_token: ClassToken = "first",
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    eps: float,
    activation: Activation,
    bias: bool = True,
    pre_norm: bool = False,
    rotary: Rotary | None = None,
    head: Classifier | Projection | None = None,
    name: str = "tower",
) -> Model:
    """Returns a tower of patches with learned positions, normed before the first block if `pre_norm`."""
    embedding = PatchEmbedding(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        d_model=d_model,
        bias=patch_bias,
        class_token=class_token,
    )
    norm = LayerNorm(d=d_model, eps=eps)
    return Model(
        name=name,
        embedding=embedding,
        positions=LearnedPositions(n_positions=embedding.n_tokens, d_model=d_model),
        embedding_norm=norm if pre_norm else None,
        blocks=layers(
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            d_ff=d_ff,
            eps=eps,
            activation=activation,
            bias=bias,
            rotary=rotary,
        ),
        norm=norm,
        head=head,
        max_positions=embedding.n_tokens,
    )


def read_layers(reader: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dimensions of the blocks, as `layers` takes them; `defaults` by key."""
    sizes = {
        "d_model": reader.size("hidden_size", default=defaults["hidden_size"]),
        "n_layers": reader.size("num_hidden_layers", default=defaults["num_hidden_layers"], most=MOST_LAYERS),
        "n_heads": reader.size("num_attention_heads", default=defaults["num_attention_heads"]),
        "d_ff": reader.size("intermediate_size", default=defaults["intermediate_size"]),
        "eps": reader.number("layer_norm_eps", default=defaults["layer_norm_eps"], most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default=defaults["hidden_act"]),
    }
    divide(reader, sizes["d_model"], "hidden_size", sizes["n_heads"], "num_attention_heads")
    return sizes


def read_tower(reader: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dimensions of a tower, as `tower` takes them; `defaults` by key."""
    image, patch = (read_square(reader, key, defaults[key]) for key in ("image_size", "patch_size"))
    reader.require("patch_size", patch <= image, f"at most image_size = {image}")
    channels = reader.size("num_channels", default=defaults["num_channels"])
    return read_layers(reader, defaults) | {"image_size": image, "patch_size": patch, "channels": channels}


def read_square(reader: ConfigReader, key: str, default: int) -> int:
    """Returns the side of a square, written as one number or as two that are equal; images have at most 2^14."""
    sides = reader.config.get(key)
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides):
        reader.require(key, sides[0] == sides[1], "a square: both numbers equal")
        reader = ConfigReader({key: sides[0]}, reader.where, reader.prefix)
    return reader.size(key, default=default, most=2**14)


def read_tower_common(reader: ConfigReader) -> None:
    """Reads what a nested tower's config may carry beside its dimensions."""
    reader.irrelevant("initializer_factor", "training only")
    reader.irrelevant("projection_dim", "of a projection that stands outside the tower")
    reader.irrelevant("vocab_size", "a tower of patches has none; left over in older configs")


def first_parts(spec: Model, family: str) -> tuple[Attention, MLP, LayerNorm]:
    """Returns the parts of a tower's first block; raises InputError naming the place where they are others."""
    attention, ffn = branches(spec, family)
    body = expect(attention.body, Attention, "blocks.0.attention.body", family)
    mlp = expect(ffn.body, MLP, "blocks.0.ffn.body", family)
    return body, mlp, expect(attention.norm, LayerNorm, "blocks.0.attention.norm", family)


def write_layers(spec: Model, family: str) -> dict[str, Any]:
    """Returns the keys that `read_layers` reads."""
    attention, ffn, norm = first_parts(spec, family)
    return {
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "hidden_act": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "layer_norm_eps": float(norm.eps),
    }


def write_tower(spec: Model, family: str) -> dict[str, Any]:
    """Returns the keys that `read_tower` reads."""
    embedding = expect(spec.embedding, PatchEmbedding, "embedding", family)
    return write_layers(spec, family) | {
        "image_size": embedding.image_size,
        "patch_size": embedding.patch_size,
        "num_channels": embedding.channels,
    }


def tower_entries(spec: Model, path: str, prefix: str, family: str) -> list[Entry]:
    """Returns the entries of a tower at `path`, head left out, as CLIP and SigLIP name them after `prefix`."""
    entries = outside_entries(spec, path, prefix, OUTSIDE, family)
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"{path}blocks.{i}.", STEMS, f"{prefix}encoder.layers.{i}.", {}, family)
    return entries


def outside_entries(
    spec: Model, path: str, prefix: str, names: dict[str, str], family: str, layouts: Mapping[str, Layout] | None = None
) -> list[Entry]:
    """Returns the entries of what stands outside a model's blocks, its head and vision; names and layouts by path."""
    entries = []
    for field in ("embedding", "positions", "embedding_norm", "norm"):
        part = getattr(spec, field)
        for weight in () if part is None else part.holds():
            where = f"{field}.{weight}"
            if where not in names:
                raise InputError(f"{family} files have no name for this weight", field=f"{path}{where}")
            entries.append(entry(f"{path}{where}", prefix + names[where], (layouts or {}).get(where)))
    return entries


def vocabulary(spec: Model, family: str) -> TokenEmbedding:
    """Returns the table of a text's tokens; raises InputError where the model reads something else."""
    return expect(spec.embedding, TokenEmbedding, "embedding", family)
