"""The t5 family: encoder and decoder with relative buckets, RMSNorm before each branch, unscaled scores.

Raffel et al. 2020 (arXiv 1910.10683); gated and untied as T5 1.1 (Shazeer 2020, arXiv 2002.05202) and Flan-T5. The
context that a config calls n_positions is that of training: buckets reach any distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS
from asbuilt.families.shared.dimensions import Dimensions, Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Key, Number, Size, Values, depth, tied
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.spec import (
    Activation,
    BiasTable,
    Block,
    Branch,
    CrossAttention,
    EncoderDecoder,
    FeedForward,
    GatedMLP,
    Model,
    RelativeBuckets,
    RMSNorm,
    SharedEmbedding,
    TextEncoder,
    TiedHead,
)

SELF = {f"attention.body.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"}
CROSS = {f"cross.body.{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"}
PLAIN = {"up": "wi", "down": "wo"}
GATED = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
UNUSED = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "cross-attention has no positions"
}


def stacks(
    made: Dimensions,
    read: Sequence[FeedForward],
    written: Sequence[FeedForward],
    *,
    n_buckets: int = 32,
    max_distance: int = 128,
    eps: float = 1e-6,
    scaled: bool = True,
) -> Model:
    """Returns the model with these feed-forwards of encoder and decoder, one for each layer.

    A `scaled` head multiplies its input by d_model^-0.5.
    """
    d_model, n_heads, d_head = made.d_model, made.n_heads, made.head_width
    norm, relative = RMSNorm(d=d_model, eps=eps), BiasTable(n_buckets=n_buckets, n_heads=n_heads)
    cross = CrossAttention(d_model=d_model, d_source=d_model, n_heads=n_heads, d_head=d_head, scale=1.0)

    def blocks(ffns: Sequence[FeedForward], causal: bool) -> tuple[Block, ...]:
        buckets = RelativeBuckets(n_buckets=n_buckets, max_distance=max_distance, both_ways=not causal)
        own = Branch(name="attention", body=made.attention(causal=causal, positions=buckets, scale=1.0), norm=norm)
        first = (own, Branch(name="cross", body=cross, norm=norm)) if causal else (own,)
        return tuple(Block(branches=(*first, Branch(name="ffn", body=ffn, norm=norm))) for ffn in ffns)

    shared = SharedEmbedding(n_vocab=made.n_vocab, d_model=d_model)
    encoder = replace(made, name="encoder").whole(
        TextEncoder, blocks(read, False), norm, embedding=shared, relative=relative, head=None
    )
    scale = d_model**-0.5 if scaled else 1.0
    return made.whole(
        EncoderDecoder, blocks(written, True), norm, logit_scale=scale, encoder=encoder, relative=relative
    )


def build(
    *,
    n_decoder_layers: int,
    n_buckets: int = 32,
    max_distance: int = 128,
    eps: float = 1e-6,
    gated: bool = False,
    scaled: bool = True,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model whose layers have one feed-forward, plain or gated."""
    made = sized(sizes, activation="relu", tied=True)
    ffns = [made.gated() if gated else made.plain()]
    return stacks(
        made,
        ffns * made.n_layers,
        ffns * n_decoder_layers,
        n_buckets=n_buckets,
        max_distance=max_distance,
        eps=eps,
        scaled=scaled,
    )


DISTANCE = (
    lambda values: values["max_distance"] > values["n_buckets"] // 2,
    lambda values: f"more than {values['n_buckets'] // 2}",
)
# The keys that T5, mT5 and Switch share, with T5Config's defaults; the decoder has as many layers, unless it is said.
KEYS: tuple[Key, ...] = (
    Irrelevant("training only", "dropout_rate", "initializer_factor"),
    Irrelevant("how another program divides it", "scalable_attention"),
    Size(
        "relative_attention_num_buckets",
        "n_buckets",
        default=32,
        must=(lambda values: values["n_buckets"] % 4 == 0, "a multiple of 4"),
        at="attention.positions.n_buckets",
    ),
    Size(
        "relative_attention_max_distance",
        "max_distance",
        default=128,
        must=DISTANCE,
        at="attention.positions.max_distance",
    ),
    Size("vocab_size", "n_vocab", default=32128),
    Size("d_model", "d_model", default=512, also=("hidden_size",)),
    Size("num_heads", "n_heads", default=8, also=("num_attention_heads",)),
    Size("d_kv", "d_head", default=64, also=("head_dim",)),
    Size("n_positions", "max_positions", default=512),
    Number("layer_norm_epsilon", "eps", default=1e-6),
    replace(depth("num_layers", 6, "num_hidden_layers"), at="encoder.n_layers"),
    Size(
        "num_decoder_layers",
        "n_decoder_layers",
        default=lambda values: values["n_layers"],
        null=lambda values: values["n_layers"],
        most=MOST_LAYERS,
        at="n_layers",
    ),
    Size("d_ff", "d_ff", default=2048),
)


@dataclass(frozen=True)
class GatedOrPlain:
    """Whether the feed-forward is gated, and its activation; the newer keys overrule `feed_forward_proj`."""

    default: str

    key, activation, gated = "feed_forward_proj", "dense_act_fn", "is_gated_act"
    names = {name: (False, name) for name in ACTIVATION_NAMES} | {
        f"gated-{name}": (True, "gelu_new" if name == "gelu" else name) for name in ACTIVATION_NAMES
    }

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both."""
        gated, name = reader.choice(self.key, choices=self.names, default=self.default)
        values["activation"] = reader.choice(self.activation, choices=ACTIVATION_NAMES, default=name)
        values["gated"] = reader.flag(self.gated, default=gated)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the older key and the newer ones."""
        gated = isinstance(parts.ffn, GatedMLP)
        name = written_activation(parts.activation)
        projection = f"gated-{name}" if gated else name
        if (gated, name) == (True, "gelu_new"):
            projection = "gated-gelu"
        return {self.key: projection, self.activation: name, self.gated: gated}


def written_activation(activation: Activation) -> str:
    """Returns the activation's name in a config."""
    return "gelu_new" if activation == "gelu_tanh" else activation


def names(spec: Model, family: str, ffn: str = "DenseReluDense") -> TensorTable:
    """Returns the table, in which a layer's feed-forward is called `ffn`, and experts are below it."""
    encoder = expect_whole(spec, EncoderDecoder, family).encoder
    entries = [
        entry("embedding.weight", "shared.weight"),
        *_stack(encoder, ffn).entries(encoder, family, "encoder.", "encoder."),
        *_stack(spec, ffn).entries(spec, family, prefix="decoder."),
    ]
    tied = isinstance(spec.head, TiedHead)
    entries += [] if tied else [entry("head.weight", "lm_head.weight")]
    again = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) if tied else ()))
    return TensorTable(entries=tuple(entries), ignored=UNUSED, duplicates=dict.fromkeys(again, "embedding.weight"))


def _stack(spec: Model, ffn: str) -> Names:
    """Returns the names of an encoder or decoder, without what they share."""
    branches = spec.blocks[0].branches
    last = f"layer.{len(branches) - 1}"
    inward = {part: f"{last}.{ffn}.{name}" for part, name in PLAIN.items()}
    if isinstance(branches[-1].body, GatedMLP):
        inward = {part: f"{last}.{ffn}.{name}" for part, name in GATED.items()}
    return Names(
        stems=SELF
        | CROSS
        | {"attention.norm": "layer.0.layer_norm", "cross.norm": "layer.1.layer_norm", "ffn.norm": f"{last}.layer_norm"}
        | {f"ffn.body.{part}": name for part, name in inward.items()}
        | {"ffn.body.router": f"{last}.{ffn}.router.classifier"},
        outside={"relative": "block.0.layer.0.SelfAttention.relative_attention_bias", "norm": "final_layer_norm"},
        layers="block",
        experts={part: f"{last}.{ffn}.experts.expert_{{}}.{name}.weight" for part, name in PLAIN.items()},
        elsewhere=("embedding", "head"),
    )


FAMILY = Family(
    name="t5",
    prefix="transformer.",
    heads=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    encoder_decoder=True,
    keys=(  # defaults as in transformers' T5Config
        *KEYS,
        GatedOrPlain("relu"),
        tied(True),
        # a head is scaled where it is tied, unless the config says
        Flag(
            "scale_decoder_outputs",
            "scaled",
            default=lambda values: values["tied"],
            at=lambda parts: parts.logit_scale != 1.0,
        ),
    ),
    build=build,
    names=names,
)
