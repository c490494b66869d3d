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
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import (
    DROPPED,
    Choice,
    Flag,
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
from asbuilt.families.shared.parts import Parts, expect
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import ATTENTION_BIAS, FULL, MLP_BIAS, SLIDING, DerivedHeadWidth
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Block, Branch, Head, HeadTransform, Labelled, LayerNorm, Model, Rotary, TextEncoder, TiedHead

POOLING: dict[str, Labelled] = {"cls": "first", "mean": "mean"}
CHOOSE = Choice("classifier_pooling", "labels", choices=POOLING, default="cls", at="model.head.labels")
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


class _Transform:
    """The transform before the head, which the masked language model shares with the classifiers."""

    keys: tuple[Key, ...] = (
        Choice(
            "classifier_activation",
            "activation",
            default="gelu",
            choices=ACTIVATION_NAMES,
            written=WRITTEN,
            at="transform.activation",
        ),
        Flag("classifier_bias", "bias", default=False, at="transform.bias"),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        own: Values = {"d_model": values["d_model"], "eps": values["eps"], "norm_bias": values["norm_bias"]}
        for key in self.keys:
            key.read(reader, own)
        values["head"] = HeadTransform(**own)

    def write(self, parts: Parts) -> dict[str, Any]:
        return written(self.keys, parts)


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
    own = Names(
        stems=STEMS,
        outside={path: f"model.{stem}" for path, stem in OUTSIDE.items()} | HEAD,
        layers="model.layers",
        fused={"attn.Wqkv": Fused.qkv(), "mlp.Wi": Fused(stems=("ffn.body.gate", "ffn.body.up"))},
        ignored={},
    )
    return own(spec, family)


def _transform(spec: Model) -> HeadTransform:
    """Returns that of the masked language model, which all ends but the trunk's have."""
    return expect(getattr(spec.head, "transform", None), HeadTransform, "head.transform", "modernbert")


def _ends(name: str) -> dict[str, End]:
    transform = {"head.transform.dense": "head.dense", "head.transform.norm": "head.norm"}
    labels = End(labels="all", transform=_transform, stems=transform | {"head": "classifier"})
    return {
        f"{name}Model": End(),
        f"{name}ForSequenceClassification": replace(labels, labels="first", choose=CHOOSE),
        f"{name}ForTokenClassification": labels,
        f"{name}ForQuestionAnswering": replace(labels, labels="span"),
    }


FAMILY = Family(
    name="modernbert",
    heads=("ModernBertForMaskedLM",),
    ends=_ends,
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
        _Transform(),
        Flag("decoder_bias", "decoder_bias", default=True, at="head.bias"),
        tied(True),
        Irrelevant(
            "training only", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "sparse_pred_ignore_index"
        ),
        Irrelevant("only with labels: logits that the loss ignores are not computed", "sparse_prediction"),
        Irrelevant("of a classifier, which reads it", "classifier_pooling"),
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
