"""The bart family: encoder and decoder with learned positions, LayerNorm on each sum and on the embedding.

Lewis et al. 2020 (arXiv 1910.13461). Its kin differ in where they norm and in their positions: marian is the model of
2017, mbart norms before each branch. All add a buffer to the logits, which no published model has filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import (
    Carried,
    Fixed,
    Flag,
    Group,
    Irrelevant,
    Key,
    Only,
    Size,
    Values,
    activation,
    depth,
)
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import Leading, TensorTable, entry
from asbuilt.spec import (
    Activation,
    Block,
    Branch,
    CrossAttention,
    EncoderDecoder,
    LayerNorm,
    LearnedPositions,
    Model,
    SharedEmbedding,
    Sinusoids,
    TextEncoder,
    TiedHead,
    TokenEmbedding,
)

OFFSET = 2  # rows of the table before that of position 0
EPS = 1e-5  # PyTorch's own; no config says another

STEMS = {
    **{f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"cross.body.{part}": f"encoder_attn.{part}_proj" for part in "qkv"},
    "attention.body.o": "self_attn.out_proj",
    "cross.body.o": "encoder_attn.out_proj",
    "ffn.body.up": "fc1",
    "ffn.body.down": "fc2",
}
NORMS = {"attention": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
COMPUTED = {r"model\.(en|de)coder\.embed_positions\.weight": "computed: sines and cosines"}
TRAINING = ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "classif_dropout")
TAUGHT = ("student_encoder_layers", "student_decoder_layers", "replacing_rate")
OLDER = ("force_bos_token_to_be_generated", "extra_pos_embeddings", "save_step")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What encoder and decoder may differ in."""

    n_layers: int
    n_heads: int
    d_ff: int


@dataclass(frozen=True, kw_only=True)
class Kin:
    """What families of this kind differ in: how they norm, where tokens stand.

    With `two_vocabularies` the encoder may have an embedding of its own; without `key_bias` k has none.
    """

    sinusoids: bool = False
    norm_first: bool = False
    embedding_norm: bool = False
    two_vocabularies: bool = False
    key_bias: bool = True


def build(
    kin: Kin,
    *,
    n_vocab: int,
    d_model: int,
    encoder: Stack,
    decoder: Stack,
    max_positions: int,
    activation: Activation,
    scaled: bool,
    n_source: int | None = None,
    name: str = "bart",
) -> Model:
    """Returns the model of these dimensions; `scaled` multiplies embeddings by sqrt(d_model).

    `n_source` is the vocabulary of an encoder that does not share the embedding.
    """
    norm = LayerNorm(d=d_model, eps=EPS)
    positions = LearnedPositions(n_positions=max_positions, d_model=d_model, offset=OFFSET)
    scale = math.sqrt(d_model) if scaled else 1.0
    shared = SharedEmbedding(n_vocab=n_vocab, d_model=d_model, scale=scale)
    own = TokenEmbedding(n_vocab=n_source or n_vocab, d_model=d_model, scale=scale)
    common: dict[str, Any] = {
        "positions": Sinusoids(n_positions=max_positions, d_model=d_model) if kin.sinusoids else positions,
        "embedding_norm": norm if kin.embedding_norm else None,
        "norm": norm if kin.norm_first else None,
        "max_positions": max_positions,
    }
    return EncoderDecoder(
        encoder=TextEncoder(
            embedding=shared if n_source is None else own,
            blocks=blocks(kin, d_model, encoder, activation, causal=False),
            name="encoder",
            **common,
        ),
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model, scale=scale),
        blocks=blocks(kin, d_model, decoder, activation, causal=True),
        head=TiedHead(d_model=d_model, n_vocab=n_vocab, shift=True),
        name=name,
        **common,
    )


def blocks(
    kin: Kin, d_model: int, stack: Stack, activation: Activation, *, causal: bool, n_source: int | None = None
) -> tuple[Block, ...]:
    """Returns the blocks of a stack; those that are `causal` attend to the encoder's output, of `n_source` tokens."""
    norm = LayerNorm(d=d_model, eps=EPS)
    biases: dict[str, Any] = {"bias": True, "output_bias": True, "key_bias": kin.key_bias}
    sizes = {"n_layers": stack.n_layers, "n_heads": stack.n_heads, "d_ff": stack.d_ff, "activation": activation}
    made = sized(sizes, d_model=d_model, n_vocab=0, max_positions=0)
    cross = CrossAttention(
        d_model=d_model, d_source=d_model, n_source=n_source, n_heads=made.n_heads, d_head=made.head_width, **biases
    )
    bodies = {"attention": made.attention(causal=causal, **biases), "cross": cross, "ffn": made.plain(True)}
    before, after = (norm, None) if kin.norm_first else (None, norm)
    branches = (Branch(name=name, body=body, norm=before, sum_norm=after) for name, body in bodies.items())
    return (Block(branches=tuple(one for one in branches if causal or one.name != "cross")),) * stack.n_layers


def stack_keys(stack: str, *, n_layers: int = 12, n_heads: int = 16, d_ff: int = 4096) -> Group:
    """Returns the keys of one stack with these class defaults; the encoder's may be spelled as a decoder's are."""
    inner = "encoder." if stack == "encoder" else ""
    also = ("num_hidden_layers", "num_attention_heads") if stack == "encoder" else ()
    keys: tuple[Key, ...] = (
        replace(depth(f"{stack}_layers", n_layers, *also[:1]), at=f"{inner}n_layers"),
        Size(
            f"{stack}_attention_heads",
            "n_heads",
            default=n_heads,
            also=also[1:],
            divides="d_model",
            at=f"{inner}n_heads",
        ),
        Size(f"{stack}_ffn_dim", "d_ff", default=d_ff, at=f"{inner}d_ff"),
    )

    def make(d_model: int, **sizes: int) -> Stack:
        return Stack(**sizes)

    return Group(stack, make, keys, given=lambda values: {"d_model": values["d_model"]})


class _Vocabularies:
    """The decoder's vocabulary and the encoder's, where a config may have both."""

    decoder, shared = "decoder_vocab_size", "share_encoder_decoder_embeddings"

    def read(self, reader: ConfigReader, values: Values) -> None:
        n_vocab = values["n_vocab"]
        decoder = reader.size(self.decoder, default=n_vocab, null=n_vocab)
        if not reader.flag(self.shared, default=True):
            values |= {"n_vocab": decoder, "n_source": n_vocab}
        else:
            allowed = f"vocab_size = {n_vocab}, since they are shared"
            reader.require(self.decoder, decoder == n_vocab, allowed)

    def write(self, parts: Parts) -> dict[str, Any]:
        shared = isinstance(parts.encoder.model.embedding, SharedEmbedding)
        return {self.decoder: parts.n_vocab, self.shared: shared}


def family(name: str, head: str, kin: Kin, *, n_vocab: int, start: int | None = None) -> Family:
    """Returns the family of that name; `n_vocab` and the token that begins a text, `start`, are class defaults."""
    fixed = {
        "add_bias_logits": False,
        "add_final_layer_norm": kin.norm_first,
        "normalize_before": kin.norm_first,
        "normalize_embedding": kin.embedding_norm,
        "static_position_embeddings": kin.sinusoids,
    }
    return Family(
        name=name,
        heads=(head,),
        encoder_decoder=True,
        keys=(
            Size("d_model", "d_model", default=1024, also=("hidden_size",)),
            Size("vocab_size", "n_vocab", default=n_vocab, at="encoder.n_vocab"),
            stack_keys("encoder"),
            stack_keys("decoder"),
            Size("max_position_embeddings", "max_positions", default=1024),
            activation("activation_function", "gelu", tanh="gelu_new"),
            Flag("scale_embedding", "scaled", default=False, at=lambda parts: parts.embedding_scale != 1.0),
            *((_Vocabularies(),) if kin.two_vocabularies else ()),
            Fixed("tie_word_embeddings", True, reason="untied heads are not supported in this family"),
            *(() if start is None else (Carried("decoder_start_token_id", start),)),
            *(Only(key, value, reason=f"{name} has only this") for key, value in fixed.items()),
            Irrelevant("training only", *TRAINING),
            Irrelevant("how a smaller model was taught by this one", *TAUGHT),
            Irrelevant("a setting of older code that no present one reads", *OLDER),
        ),
        build=partial(build, kin),
        names=partial(_names, kin=kin),
    )


def _names(spec: Model, family: str, *, kin: Kin) -> TensorTable:
    encoder = expect_whole(spec, EncoderDecoder, family).encoder
    shared = isinstance(encoder.embedding, SharedEmbedding)
    where = "norm" if kin.norm_first else "sum_norm"
    stack = Names(
        stems=STEMS | {f"{branch}.{where}": name for branch, name in NORMS.items()},
        outside={"positions": "embed_positions", "embedding_norm": "layernorm_embedding", "norm": "layer_norm"},
        layers="layers",
        elsewhere=("embedding", "head"),
    )
    own = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
    entries = [entry("embedding.weight", own)]
    entries += [] if shared else [entry("encoder.embedding.weight", "model.encoder.embed_tokens.weight")]
    entries += stack.entries(encoder, family, "encoder.", "model.encoder.")
    entries += stack.entries(spec, family, prefix="model.decoder.")
    if isinstance(spec.head, TiedHead) and spec.head.shift:
        entries.append(entry("head.shift", "final_logits_bias", Leading(1)))
    again: list[str] = ["lm_head.weight"]
    again += [f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder") if shared]
    duplicates = dict.fromkeys(again, "embedding.weight")
    return TensorTable(entries=tuple(entries), ignored=COMPUTED if kin.sinusoids else {}, duplicates=duplicates)


FAMILY = family("bart", "BartForConditionalGeneration", Kin(embedding_norm=True), n_vocab=50265, start=2)
