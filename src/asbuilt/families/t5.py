"""The t5 family: encoder and decoder with relative buckets, RMSNorm before each branch, scores that are not scaled.

Raffel et al. 2020 (arXiv 1910.10683); gated and untied as T5 1.1 (Shazeer 2020, arXiv 2002.05202) and Flan-T5. The
context that a config calls n_positions is that of training: buckets reach any distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families.shared.common import ACTIVATION_NAMES
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Group, Irrelevant, Key, Number, Size, Values, depth, tied
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Table, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    BiasTable,
    Block,
    Branch,
    CrossAttention,
    FeedForward,
    GatedMLP,
    Head,
    Model,
    RelativeBuckets,
    RMSNorm,
    SharedEmbedding,
    TiedHead,
    TokenEmbedding,
)

CONTEXT = 512

SELF = {f"attention.body.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"}
CROSS = {f"cross.body.{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"}
PLAIN = {"up": "wi", "down": "wo"}
GATED = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
UNUSED = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "cross-attention has no positions"
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of these families; `name` is the model's."""

    n_vocab: int
    d_model: int
    n_heads: int
    d_head: int = 64
    n_buckets: int = 32
    max_distance: int = 128
    max_positions: int = CONTEXT
    eps: float = 1e-6
    name: str = "t5"

    def stack(self, ffns: Sequence[FeedForward], *, causal: bool) -> tuple[Block, ...]:
        """Returns a block for each feed-forward; causal ones are the decoder's, with cross-attention."""
        norm = RMSNorm(d=self.d_model, eps=self.eps)
        buckets = RelativeBuckets(n_buckets=self.n_buckets, max_distance=self.max_distance, both_ways=not causal)
        own = Attention(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            d_head=self.d_head,
            causal=causal,
            positions=buckets,
            scale=1.0,
        )
        cross = CrossAttention(
            d_model=self.d_model, d_source=self.d_model, n_heads=self.n_heads, d_head=self.d_head, scale=1.0
        )
        first = [Branch(name="attention", body=own, norm=norm)]
        if causal:
            first.append(Branch(name="cross", body=cross, norm=norm))
        return tuple(Block(branches=(*first, Branch(name="ffn", body=ffn, norm=norm))) for ffn in ffns)

    def model(self, read: Sequence[FeedForward], written: Sequence[FeedForward], *, tied: bool, scaled: bool) -> Model:
        """Returns the model with these feed-forwards of encoder and decoder.

        A `scaled` head multiplies its input by d_model^-0.5.
        """
        numbers = BiasTable(n_buckets=self.n_buckets, n_heads=self.n_heads)
        norm = RMSNorm(d=self.d_model, eps=self.eps)
        encoder = Model(
            embedding=SharedEmbedding(n_vocab=self.n_vocab, d_model=self.d_model),
            relative=numbers,
            blocks=self.stack(read, causal=False),
            norm=norm,
            max_positions=self.max_positions,
            name="encoder",
        )
        scale = self.d_model**-0.5 if scaled else 1.0
        return Model(
            encoder=encoder,
            embedding=TokenEmbedding(n_vocab=self.n_vocab, d_model=self.d_model),
            relative=numbers,
            blocks=self.stack(written, causal=True),
            norm=norm,
            head=(TiedHead if tied else Head)(d_model=self.d_model, n_vocab=self.n_vocab, scale=scale),
            max_positions=self.max_positions,
            name=self.name,
        )


def build(
    sizes: Sizes,
    *,
    d_ff: int,
    n_layers: int,
    n_decoder_layers: int,
    activation: Activation = "relu",
    gated: bool = False,
    tied: bool = True,
    scaled: bool = True,
) -> Model:
    """Returns the model whose layers have one feed-forward, plain or gated."""
    ffn = (GatedMLP if gated else MLP)(d_model=sizes.d_model, d_ff=d_ff, activation=activation)
    return sizes.model((ffn,) * n_layers, (ffn,) * n_decoder_layers, tied=tied, scaled=scaled)


def size_keys(n_vocab: int, d_model: int, n_heads: int) -> Group:
    """Returns the keys that make `Sizes`, which T5, mT5 and Switch share but for these defaults."""
    keys: tuple[Key, ...] = (
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
            must=(
                lambda values: values["max_distance"] > values["n_buckets"] // 2,
                lambda values: f"more than {values['n_buckets'] // 2}",
            ),
            at="attention.positions.max_distance",
        ),
        Size("vocab_size", "n_vocab", default=n_vocab),
        Size("d_model", "d_model", default=d_model, also=("hidden_size",)),
        Size("num_heads", "n_heads", default=n_heads, also=("num_attention_heads",)),
        Size("d_kv", "d_head", default=64, also=("head_dim",)),
        Size("n_positions", "max_positions", default=CONTEXT),
        Number("layer_norm_epsilon", "eps", default=1e-6),
    )
    return Group("sizes", Sizes, keys, given=lambda values: {"name": values.pop("name")})


def layer_keys(default: int, decoder: int | None = None) -> tuple[Key, ...]:
    """Returns the keys of the layers of both stacks; the decoder has as many, unless `decoder` or the config says."""
    as_many = lambda values: values["n_layers"]  # noqa: E731
    first = depth("num_layers", default, "num_hidden_layers")
    second = replace(depth("num_decoder_layers", 0), into="n_decoder_layers", default=decoder or as_many, null=as_many)
    return replace(first, at="encoder.n_layers"), replace(second, at="n_layers")


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


def names(spec: Model, family: str, ffn: str = "DenseReluDense") -> Table:
    """Returns the table, in which a layer's feed-forward is called `ffn`, and experts are below it."""
    encoder = expect(spec.encoder, Model, "encoder", family)
    entries = [
        entry("embedding.weight", "shared.weight"),
        *_stack(encoder, ffn).entries(encoder, family, "encoder.", "encoder."),
        *_stack(spec, ffn).entries(spec, family, prefix="decoder."),
    ]
    tied = isinstance(spec.head, TiedHead)
    entries += [] if tied else [entry("head.weight", "lm_head.weight")]
    again = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) if tied else ()))
    return Table(entries=tuple(entries), ignored=UNUSED, duplicates=dict.fromkeys(again, "embedding.weight"))


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
        size_keys(n_vocab=32128, d_model=512, n_heads=8),
        *layer_keys(6),
        Size("d_ff", "d_ff", default=2048),
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
