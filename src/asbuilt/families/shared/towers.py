"""What the families with a vision tower share: the tower of patches, its config keys, its names on disk.

ViT, CLIP and SigLIP differ in what stands around the same blocks: LayerNorm before attention and before an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asbuilt.families.shared.common import read_common
from asbuilt.families.shared.dimensions import Dimensions, pre_norm, sized
from asbuilt.families.shared.key import (
    DROPPED,
    Irrelevant,
    Key,
    Size,
    Values,
    activation,
    defaults,
    depth,
    eps,
    written,
)
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import (
    AttentionPooling,
    Block,
    Classifier,
    ImageEncoder,
    LayerNorm,
    LearnedPositions,
    Norm,
    PatchEmbedding,
    Projection,
)
from asbuilt.spec.vision import ClassToken

POSITION_IDS = {r"(.*\.)?embeddings\.position_ids": "the numbers of the positions, 0, 1, 2 ..."}
# CLIP's and SigLIP's names of a tower; what its head is called differs
NAMES = Names(
    stems={
        "attention.norm": "layer_norm1",
        "attention.body.q": "self_attn.q_proj",
        "attention.body.k": "self_attn.k_proj",
        "attention.body.v": "self_attn.v_proj",
        "attention.body.o": "self_attn.out_proj",
        "ffn.norm": "layer_norm2",
        "ffn.body.up": "mlp.fc1",
        "ffn.body.down": "mlp.fc2",
    },
    outside={
        "embedding": "embeddings.patch_embedding",
        "embedding.class_token": "embeddings.class_embedding",
        "positions": "embeddings.position_embedding",
        "embedding_norm": "pre_layrnorm",
        "norm": "post_layernorm",
    },
    layers="encoder.layers",
    elsewhere=("head",),
)


def layers(made: Dimensions, norm: Norm, *, causal: bool = False, bias: bool = True) -> tuple[Block, ...]:
    """Returns the blocks of a tower, of a text that comes all at once where they are `causal`.

    `bias` is that of queries, keys and values; all other maps have one.
    """
    attention = made.attention(causal=causal, bias=bias, output_bias=True, cached=not causal)
    return (pre_norm(attention, made.plain(True), norm),) * made.n_layers


def tower(
    *,
    image_size: int,
    patch_size: int,
    channels: int = 3,
    patch_bias: bool = False,
    class_token: ClassToken = "first",
    eps: float,
    bias: bool = True,
    embedding_norm: bool = False,
    head: Classifier | Projection | AttentionPooling | None = None,
    **sizes: Any,  # noqa: ANN401
) -> ImageEncoder:
    """Returns a tower of patches with learned positions, normed before the first block with `embedding_norm`.

    `sizes` are those of `Dimensions` that a tower has.
    """
    embedding = PatchEmbedding(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        d_model=sizes["d_model"],
        bias=patch_bias,
        class_token=class_token,
    )
    made = sized(sizes, n_vocab=0, max_positions=embedding.n_tokens, name="tower")
    norm = LayerNorm(d=made.d_model, eps=eps)
    return made.whole(
        ImageEncoder,
        layers(made, norm, bias=bias),
        norm,
        embedding=embedding,
        positions=LearnedPositions(n_positions=embedding.n_tokens, d_model=made.d_model),
        embedding_norm=norm if embedding_norm else None,
        head=head,
    )


class Pixels(Size):
    """The side of a square, written as one number or as two that are equal; images have at most 2^14."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the side."""
        sides = reader.config.get(self.key)
        if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides):
            reader.known.add(self.key)
            reader.require(self.key, sides[0] == sides[1], "a square: both numbers equal")
            reader = ConfigReader({self.key: sides[0]}, reader.where, reader.prefix)
        super().read(reader, values)


SMALL = (
    lambda values: values["patch_size"] <= values["image_size"],
    lambda values: f"at most image_size = {values['image_size']}",
)
# The keys of a tower's blocks, and of a tower, defaults as in transformers' CLIPVisionConfig and SiglipVisionConfig.
LAYERS: tuple[Key, ...] = (
    Size("hidden_size", "d_model", default=768),
    depth("num_hidden_layers", 12),
    Size("num_attention_heads", "n_heads", default=12, divides="d_model"),
    Size("intermediate_size", "d_ff", default=3072),
    eps("layer_norm_eps", 1e-5),
    activation(default="quick_gelu"),
)
CLIP: tuple[Key, ...] = (
    Pixels("image_size", "image_size", default=224, most=2**14, at="model.embedding.image_size"),
    Pixels("patch_size", "patch_size", default=32, most=2**14, must=SMALL, at="model.embedding.patch_size"),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    *LAYERS,
)
SIGLIP = defaults(CLIP, patch_size=16, activation="gelu_pytorch_tanh", eps=1e-6)


# What a nested tower's config may carry beside its dimensions.
TOWER_IRRELEVANT = (
    Irrelevant("training only", "initializer_factor"),
    Irrelevant("of a projection that stands outside the tower", "projection_dim"),
    Irrelevant("a tower of patches has none; left over in older configs", "vocab_size"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Nested:
    """The object at `key`, of which the keys inside make a dict, `into` an argument of `build`; `at` finds its spec.

    Without the object the keys `otherwise` are read, of nothing. Its `model_type` is `kind`, or not said. Older files
    may say a tower twice, and the one with `_dict` counts.
    """

    key: str
    into: str
    kind: str
    keys: tuple[Key, ...]
    at: str
    otherwise: tuple[Key, ...] = ()
    older: bool = False

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object, and what every config may carry in it."""
        key, newer = self.key, f"{self.key}_dict"
        if self.older and reader.nested(newer) is not None:
            reader.irrelevant(key, f"overruled by {newer}")
            key = newer
        found = reader.nested(key)
        inner = found or ConfigReader({}, reader.where, f"{key}.", within=reader)
        inner.only("model_type", self.kind, reason=f"only a {self.kind} is read here")
        inner.irrelevant("tie_word_embeddings", "a tower has no head")
        read_common(inner, self.kind, None)
        own: Values = {}
        for one in self.otherwise if found is None and self.otherwise else self.keys:
            one.read(inner, own)
        inner.finish()
        values[self.into] = own
        reader.carried[self.key] = inner.carried

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object, with what it carried."""
        carried = parts.carried.get(self.key, {})
        inner = written(self.keys, Parts(parts.at(self.at), parts.family, carried, parts))
        found = {**carried, **inner, "model_type": self.kind}
        return {self.key: {key: value for key, value in found.items() if value is not DROPPED}}


class NestedOf:
    """An object that is one of several kinds, the first where it names none; each is `into` an argument of its own.

    A spec is written as the kind that `told` names from its parts.
    """

    def __init__(self, *kinds: Nested, told: Callable[[Parts], str]) -> None:
        self.key, self.kinds, self.told = kinds[0].key, {one.kind: one for one in kinds}, told

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object; raises InputError for one of another kind."""
        inner, usual = reader.nested(self.key), next(iter(self.kinds))
        kind = usual if inner is None else inner.config.get("model_type", usual)
        if not isinstance(kind, str) or kind not in self.kinds:
            assert inner is not None
            raise inner.error("model_type", "not a tower of this family", value=kind, allowed=" or ".join(self.kinds))
        self.kinds[kind].read(reader, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object of the spec's kind."""
        return self.kinds[self.told(parts)].write(parts)
