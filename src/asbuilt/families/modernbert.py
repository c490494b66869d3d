"""The modernbert family: RoPE, LayerNorm before each branch, gated feed-forward, mostly local attention.

Warner et al. 2024 (arXiv 2412.13663). Every third layer attends to all tokens, the others to local_attention / 2
tokens on either side, each kind with its own RoPE base. The embedding is normed, so layer 0 has no norm before its
attention. Gate and up are stored as one tensor, the activated half first, and so are q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared.common import ACTIVATION_NAMES, read_layer_types
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import (
    DROPPED,
    Choice,
    Flag,
    Headed,
    Irrelevant,
    Key,
    Only,
    Size,
    Values,
    activation,
    depth,
    eps,
    tied,
    written,
)
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import ATTENTION_BIAS, FULL, MLP_BIAS, SLIDING, DerivedHeadWidth
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Block, Branch, Head, HeadTransform, LayerNorm, Model, Rotary, TextEncoder, TiedHead

HEADS = ("ModernBertForMaskedLM", "ModernBertModel")
WRITTEN = {"gelu_tanh": "gelu_new"}

OUTSIDE = {"embedding": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "norm": "final_norm"}
HEAD = {"head.transform.dense": "head.dense", "head.transform.norm": "head.norm", "head": "decoder"}
STEMS = {
    "attention.norm": "attn_norm",
    "attention.body.o": "attn.Wo",
    "ffn.norm": "mlp_norm",
    "ffn.body.down": "mlp.Wo",
}


def build(
    *,
    windows: Sequence[int | None],
    local: Rotary,
    eps: float,
    head: HeadTransform | None = None,
    decoder_bias: bool = True,
    norm_bias: bool = False,
    bias: bool = False,
    mlp_bias: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes, with a window for each layer (None for all tokens); those with one are `local`.

    `head` None is a model that ends in the normed stream.
    """
    made = sized(sizes, activation="gelu", tied=True)
    norm = LayerNorm(d=made.d_model, eps=eps, bias=norm_bias)
    ffn = Branch(name="ffn", norm=norm, body=made.gated(mlp_bias))

    def block(i: int, window: int | None) -> Block:
        dims = made if window is None else replace(made, rotary=local)
        body = dims.attention(causal=False, window=window, bias=bias, output_bias=bias)
        return Block(branches=(Branch(name="attention", norm=norm if i else None, body=body), ffn))

    kind = TiedHead if made.tied else Head
    return made.whole(
        TextEncoder,
        tuple(block(i, window) for i, window in enumerate(windows)),
        norm,
        embedding_norm=norm,
        head=None
        if head is None
        else kind(d_model=made.d_model, n_vocab=made.n_vocab, bias=decoder_bias, transform=head),
    )


class _Transform(Headed):
    """The head, which the class without one leaves aside; its keys are then without effect."""

    keys: tuple[Key, ...] = (
        Choice(
            "classifier_activation",
            "activation",
            default="gelu",
            choices=ACTIVATION_NAMES,
            written=WRITTEN,
            at="head.transform.activation",
        ),
        Flag("classifier_bias", "bias", default=False, at="head.transform.bias"),
    )
    outside: tuple[Key, ...] = (
        Flag("decoder_bias", "decoder_bias", default=True, at="head.bias"),
        tied(True),
    )
    names = ("classifier_activation", "classifier_bias", "tie_word_embeddings", "decoder_bias")

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        if not values.pop(self.into):
            Irrelevant("without effect: there is no head", *self.names).read(reader, values)
            return
        own: Values = {"d_model": values["d_model"], "eps": values["eps"], "norm_bias": values["norm_bias"]}
        for key in self.keys:
            key.read(reader, own)
        values["head"] = HeadTransform(**own)
        for key in self.outside:
            key.read(reader, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        inner = {} if parts.model.head is None else written((*self.keys, *self.outside), parts)
        return super().write(parts) | inner


class Windows:
    """Each layer's window: half of `local_attention` on either side, and the token itself.

    The older key says which layers attend to all tokens: every so many.
    """

    every, window = "global_attn_every_n_layers", "local_attention"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows."""
        every = reader.size(self.every, default=3)
        reader.overruled(self.every, "layer_types")
        usual = tuple(SLIDING if i % every else FULL for i in range(values["n_layers"]))
        reader.irrelevant(self.every, "layer_types, as it is written, says it")
        near = reader.size(self.window, default=128, least=0) // 2 + 1
        values["windows"] = tuple(None if kind == FULL else near for kind in read_layer_types(reader, usual))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types and the window."""
        windows = [body.window for body in parts.attentions]
        near = next((2 * (one - 1) for one in windows if one is not None), 128)
        types = [FULL if one is None else SLIDING for one in windows]
        return {"layer_types": types, self.window: near, self.every: DROPPED}


def _names(spec: Model, family: str) -> TensorTable:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    bare = spec.head is None
    prefix = "" if bare else "model."
    own = Names(
        stems=STEMS,
        outside={path: prefix + stem for path, stem in OUTSIDE.items()} | HEAD,
        layers=f"{prefix}layers",
        fused={"attn.Wqkv": Fused.qkv(), "mlp.Wi": Fused(stems=("ffn.body.gate", "ffn.body.up"))},
        ignored={r"(head|decoder)\..*": "the head, which ModernBertModel leaves aside"} if bare else {},
    )
    return own(spec, family)


FAMILY = Family(
    name="modernbert",
    heads=HEADS,
    causal=False,
    keys=(  # defaults as in transformers' ModernBertConfig
        Size("hidden_size", "d_model", default=768),
        Size("num_attention_heads", "n_heads", default=12),
        DerivedHeadWidth(even=True),
        Size("max_position_embeddings", "max_positions", default=8192),
        TwoRopes(("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0)),
        Size("vocab_size", "n_vocab", default=50368),
        Size("intermediate_size", "d_ff", default=1152),
        eps("norm_eps", 1e-5),
        activation("hidden_activation", "gelu", tanh="gelu_new"),
        Flag("norm_bias", "norm_bias", default=False, at="norm.bias"),
        ATTENTION_BIAS,
        MLP_BIAS,
        depth("num_hidden_layers", 22),
        Windows(),
        _Transform(HEADS, "masked"),
        Irrelevant(
            "training only", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "sparse_pred_ignore_index"
        ),
        Irrelevant("only with labels: logits that the loss ignores are not computed", "sparse_prediction"),
        Irrelevant("describes a classifier", "classifier_pooling"),
        Irrelevant(
            "how it is computed, not what", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"
        ),
        Irrelevant("norm_eps is what is read", "layer_norm_eps"),
        Only("position_embedding_type", "absolute", None, reason="positions are rotary, whatever early files say"),
        Only("is_decoder", False, reason="as a decoder its attention would be causal"),
    ),
    build=build,
    names=_names,
)
