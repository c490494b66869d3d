"""The t5 family: encoder and decoder with relative buckets, RMSNorm before each branch, scores that are not scaled.

Raffel et al. 2020 (arXiv 1910.10683); gated and untied as T5 1.1 (Shazeer 2020, arXiv 2002.05202) and Flan-T5. The
context that a config calls n_positions is that of training: buckets reach any distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    named_entries,
    read_common,
    require_same,
)
from asbuilt.families.shared.fused import branches, expect
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Entry, Table, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    BiasTable,
    Block,
    Body,
    Branch,
    CrossAttention,
    FeedForward,
    GatedMLP,
    Head,
    MixtureOfExperts,
    Model,
    RelativeBuckets,
    RMSNorm,
    SharedEmbedding,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "t5"
PREFIX = "transformer."
HEADS = ("T5ForConditionalGeneration", "T5WithLMHeadModel")
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
PROJECTIONS = {name: (False, name) for name in ACTIVATION_NAMES} | {
    f"gated-{name}": (True, "gelu_new" if name == "gelu" else name) for name in ACTIVATION_NAMES
}
# Those of transformers' classes, which T5, mT5 and Switch share but for the ones they state themselves.
DEFAULTS: dict[str, Any] = {"vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
CONTEXT = 512

ATTENTION = {f"attention.body.{part}": f"SelfAttention.{part}" for part in "qkvo"} | {"attention.norm": "layer_norm"}
CROSS = {f"cross.body.{part}": f"EncDecAttention.{part}" for part in "qkvo"} | {"cross.norm": "layer_norm"}
PLAIN = {"ffn.body.up": "wi", "ffn.body.down": "wo"}
GATED = {"ffn.body.gate": "wi_0", "ffn.body.up": "wi_1", "ffn.body.down": "wo"}
UNUSED = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "cross-attention has no positions"
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What all of these families are told by; `name` is the model's."""

    n_vocab: int
    d_model: int
    n_heads: int
    d_head: int = 64
    n_buckets: int = 32
    max_distance: int = 128
    max_positions: int = CONTEXT
    eps: float = 1e-6
    name: str = FAMILY

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


def read_sizes(reader: ConfigReader, defaults: Mapping[str, Any]) -> Sizes:
    """Returns the dimensions of a config; raises InputError naming the key at fault."""
    for key in ("dropout_rate", "initializer_factor"):
        reader.irrelevant(key, "training only")
    reader.irrelevant("scalable_attention", "how another program divides it")
    n_buckets = reader.size("relative_attention_num_buckets", default=32)
    reader.require("relative_attention_num_buckets", n_buckets % 4 == 0, "a multiple of 4")
    max_distance = reader.size("relative_attention_max_distance", default=128)
    reader.require("relative_attention_max_distance", max_distance > n_buckets // 2, f"more than {n_buckets // 2}")
    return Sizes(
        n_vocab=reader.size("vocab_size", default=defaults["vocab_size"]),
        d_model=reader.size("d_model", "hidden_size", default=defaults["d_model"]),
        n_heads=reader.size("num_heads", "num_attention_heads", default=defaults["num_heads"]),
        d_head=reader.size("d_kv", "head_dim", default=64),
        n_buckets=n_buckets,
        max_distance=max_distance,
        max_positions=reader.size("n_positions", default=CONTEXT),
        eps=reader.number("layer_norm_epsilon", default=1e-6),
        name=reader.where,
    )


def read_layers(reader: ConfigReader, default: int, decoder: int | None = None) -> tuple[int, int]:
    """Returns the layers of encoder and decoder; of the latter as many, unless `decoder` or the config says another."""
    encoder = reader.size("num_layers", "num_hidden_layers", default=default, most=MOST_LAYERS)
    usual = encoder if decoder is None else decoder
    return encoder, reader.size("num_decoder_layers", default=usual, null=encoder, most=MOST_LAYERS)


def read_ffn(reader: ConfigReader, default: str) -> tuple[bool, Activation]:
    """Returns whether the feed-forward is gated, and its activation; the newer keys overrule `feed_forward_proj`."""
    gated, name = reader.choice("feed_forward_proj", choices=PROJECTIONS, default=default)
    activation = reader.choice("dense_act_fn", choices=ACTIVATION_NAMES, default=name)
    return reader.flag("is_gated_act", default=gated), activation


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' T5Config.

    `name` becomes the model's name and stands in messages. A head is tied unless the config says that it is not, and
    then it is not scaled either. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS, encoder_decoder=True)
    sizes = read_sizes(reader, DEFAULTS)
    n_layers, n_decoder_layers = read_layers(reader, DEFAULTS["num_layers"])
    gated, activation = read_ffn(reader, "relu")
    tied = reader.flag("tie_word_embeddings", default=True)
    scaled = reader.flag("scale_decoder_outputs", default=tied)
    d_ff = reader.size("d_ff", default=DEFAULTS["d_ff"])
    reader.finish()
    spec = build(
        sizes,
        d_ff=d_ff,
        n_layers=n_layers,
        n_decoder_layers=n_decoder_layers,
        activation=activation,
        gated=gated,
        tied=tied,
        scaled=scaled,
    )
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def stacks(spec: Model, family: str) -> tuple[Model, Branch, Branch]:
    """Returns the encoder, and the decoder's first branches of attention and feed-forward; InputError for others."""
    encoder = expect(spec.encoder, Model, "encoder", family)
    attention, _, ffn = branches(spec, family, ("attention", "cross", "ffn"))
    return encoder, attention, ffn


def write_sizes(spec: Model, family: str, head: str) -> dict[str, Any]:
    """Returns the keys that `read_sizes` and `read_layers` read; raises InputError naming a part that is another's."""
    encoder, first, _ = stacks(spec, family)
    attention = expect(first.body, Attention, "blocks.0.attention.body", family)
    buckets = expect(attention.positions, RelativeBuckets, "blocks.0.attention.body.positions", family)
    return {
        "architectures": [head],
        "model_type": family,
        "vocab_size": spec.n_vocab,
        "d_model": spec.d_model,
        "num_layers": encoder.n_layers,
        "num_decoder_layers": spec.n_layers,
        "num_heads": attention.n_heads,
        "d_kv": attention.d_head,
        "relative_attention_num_buckets": buckets.n_buckets,
        "relative_attention_max_distance": buckets.max_distance,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": expect(spec.norm, RMSNorm, "norm", family).eps,
        "is_encoder_decoder": True,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
    }


def write_ffn(ffn: Body, family: str) -> dict[str, Any]:
    """Returns the keys that `read_ffn` reads; raises InputError for a part that is no feed-forward."""
    if not isinstance(ffn, MLP | GatedMLP | MixtureOfExperts):
        raise InputError(f"{family} has a feed-forward here", field="blocks.0.ffn.body", value=repr(ffn))
    activation, gated = WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation), isinstance(ffn, GatedMLP)
    projection = f"gated-{activation}" if gated else activation
    if (gated, activation) == (True, "gelu_new"):
        projection = "gated-gelu"
    return {"d_ff": ffn.d_ff, "feed_forward_proj": projection, "dense_act_fn": activation, "is_gated_act": gated}


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    _, _, ffn = stacks(spec, FAMILY)
    scaled = spec.language_head is not None and spec.language_head.scale != 1.0
    written = write_sizes(spec, FAMILY, HEADS[0]) | write_ffn(ffn.body, FAMILY) | {"scale_decoder_outputs": scaled}
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    return table_of(spec, FAMILY)


def table_of(spec: Model, family: str, ffn: str = "DenseReluDense") -> Table:
    """Returns the table, in which a layer's feed-forward is called `ffn`; mixtures have entries of their own."""
    tied = isinstance(spec.head, TiedHead)
    entries = [entry("embedding.weight", "shared.weight")]
    entries += [] if tied else [entry("head.weight", "lm_head.weight")]
    for stack, place, stored in ((stacks(spec, family)[0], "encoder.", "encoder."), (spec, "", "decoder.")):
        entries += _stack_entries(stack, place, stored, family, ffn)
    again = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) if tied else ()))
    return Table(entries=tuple(entries), ignored=UNUSED, duplicates=dict.fromkeys(again, "embedding.weight"))


def _stack_entries(stack: Model, place: str, stored: str, family: str, ffn: str) -> list[Entry]:
    first = f"{stored}block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [entry(f"{place}relative.weight", first)]
    if stack.norm is not None:
        entries += [entry(f"{place}norm.{name}", f"{stored}final_layer_norm.{name}") for name in stack.norm.holds()]
    for i, block in enumerate(stack.blocks):
        inside = f"{stored}block.{i}."
        body = next((branch.body for branch in block.branches if branch.name == "ffn"), None)
        elsewhere = ("ffn.body",) if isinstance(body, MixtureOfExperts) else ()
        last = len(block.branches) - 1
        stems = {path: f"layer.0.{name}" for path, name in ATTENTION.items()}
        stems |= {path: f"layer.1.{name}" for path, name in CROSS.items()}
        inward = GATED if isinstance(body, GatedMLP) else PLAIN
        stems |= {path: f"layer.{last}.{ffn}.{name}" for path, name in inward.items()}
        stems |= {"ffn.norm": f"layer.{last}.layer_norm", "ffn.body.router": f"layer.{last}.{ffn}.router.classifier"}
        entries += named_entries(block, f"{place}blocks.{i}.", stems, inside, {}, family, elsewhere=elsewhere)
    return entries
