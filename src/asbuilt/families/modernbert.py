"""The modernbert family: rotary positions, LayerNorm before each branch, gated feed-forward, mostly local attention.

Warner et al. 2024 (arXiv 2412.13663). Every third layer sees everything, the others local_attention / 2 tokens on
either side, each kind with a rotary base of its own. The embedding is normed, so layer 0 does not norm what its
attention reads. Gate and up lie on disk as one tensor, the activated half first, and so do q, k and v.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import ACTIVATION_NAMES, read_layer_types
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
from asbuilt.families.shared.rotary import read_scaling, shared_out, write_rotary_object
from asbuilt.families.shared.sizes import FULL, SLIDING, SharedOut
from asbuilt.families.shared.table import Table
from asbuilt.spec import (
    Activation,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    HeadTransform,
    LayerNorm,
    Model,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

HEADS = ("ModernBertForMaskedLM", "ModernBertModel")
WRITTEN = {"gelu_tanh": "gelu_new"}
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}

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
    n_vocab: int,
    d_model: int,
    n_heads: int,
    d_ff: int,
    layers: tuple[tuple[Rotary, int | None], ...],
    max_positions: int,
    eps: float,
    activation: Activation = "gelu",
    head: HeadTransform | None = None,
    tied: bool = True,
    decoder_bias: bool = True,
    norm_bias: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    name: str = "modernbert",
) -> Model:
    """Returns the model of these dimensions; `layers` are each layer's rotation and window, None sees everything.

    `head` None is a model that ends in the normed stream.
    """
    norm = LayerNorm(d=d_model, eps=eps, bias=norm_bias)
    ffn = Branch(name="ffn", norm=norm, body=GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=mlp_bias))
    blocks = []
    for i, (rotary, window) in enumerate(layers):
        body = Attention(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_model // n_heads,
            causal=False,
            positions=rotary,
            window=window,
            bias=attention_bias,
            output_bias=attention_bias,
        )
        blocks.append(Block(branches=(Branch(name="attention", norm=norm if i else None, body=body), ffn)))
    kind = TiedHead if tied else Head
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        embedding_norm=norm,
        blocks=tuple(blocks),
        norm=norm,
        head=None if head is None else kind(d_model=d_model, n_vocab=n_vocab, bias=decoder_bias, transform=head),
        max_positions=max_positions,
        name=name,
    )


def _transform(parts: Parts) -> HeadTransform:
    return parts.expect(parts.head.transform, HeadTransform, "head.transform")


class _Transform(Headed):
    """The head, which the class without one leaves aside; its keys are then without effect."""

    keys: tuple[Key, ...] = (
        Choice(
            "classifier_activation",
            "activation",
            default="gelu",
            choices=ACTIVATION_NAMES,
            written=WRITTEN,
            at=lambda parts: _transform(parts).activation,
        ),
        Flag("classifier_bias", "bias", default=False, at=lambda parts: _transform(parts).bias),
    )
    outside: tuple[Key, ...] = (
        Flag("decoder_bias", "decoder_bias", default=True, at=lambda parts: parts.head.bias),
        tied(True),
    )
    names = ("classifier_activation", "classifier_bias", "tie_word_embeddings", "decoder_bias")

    def read(self, reader: ConfigReader, values: Values) -> None:
        super().read(reader, values)
        if not values.pop(self.into):
            Irrelevant("there is no head", *self.names).read(reader, values)
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


class Layers:
    """Each layer's rotation and window; the older key says every how many layers one sees everything."""

    every, window = "global_attn_every_n_layers", "local_attention"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both."""
        every = reader.size(self.every, default=3)
        reader.overruled(self.every, "layer_types")
        n_layers = values.pop("n_layers")
        types = read_layer_types(reader, tuple(SLIDING if i % every else FULL for i in range(n_layers)))
        reader.irrelevant(self.every, "layer_types, as it is written, says it")
        # half of it on either side, and the token itself
        near = reader.size(self.window, default=128, least=0) // 2 + 1
        rotaries = self._rotaries(reader, shared_out(values), values["max_positions"])
        values["layers"] = tuple((rotaries[kind], None if kind == FULL else near) for kind in types)

    @staticmethod
    def _rotaries(reader: ConfigReader, d_head: int, context: int) -> dict[str, Rotary]:
        """Returns the rotation of either kind of layer: `rope_parameters` has an object for each, older keys bases."""
        outer = reader.nested("rope_parameters")
        found = {}
        for kind, (key, usual) in THETAS.items():
            theta = reader.number(key, default=usual, above=1.0)
            inner = None if outer is None else outer.nested(kind)
            if inner is not None and inner.spelled("rope_theta"):
                said = inner.number("rope_theta", above=1.0)
                if key in reader.config and said != theta:
                    raise inner.error("rope_theta", f"disagrees with {key} outside", value=said)
                theta = said
            scaling = read_scaling(inner, context, context, d_head)
            found[kind] = Rotary(d_rotary=d_head, theta=theta, scaling=scaling)
        if outer is not None:
            outer.finish()
        return found

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the types, an object with the rotation of either kind, and the window."""
        kinds = [FULL if body.window is None else SLIDING for body in parts.attentions]
        rotaries = {kind: body.positions for kind, body in zip(kinds, parts.attentions, strict=True)}
        rope = {}
        for kind, (_, usual) in THETAS.items():
            rotary = rotaries.get(kind)
            rotary = rotary if isinstance(rotary, Rotary) else Rotary(d_rotary=2, theta=usual)
            rope[kind] = write_rotary_object(rotary, parts.max_positions)
        windows = [body.window for body in parts.attentions if body.window is not None]
        near = 2 * (windows[0] - 1) if windows else 128
        return {"layer_types": kinds, "rope_parameters": rope, self.window: near, self.every: DROPPED}


def _names(spec: Model, family: str) -> Table:
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


def _norm_bias(parts: Parts) -> bool:
    return parts.expect(parts.norm, LayerNorm, "norm").bias


FAMILY = Family(
    name="modernbert",
    heads=HEADS,
    causal=False,
    keys=(  # defaults as in transformers' ModernBertConfig
        Size("hidden_size", "d_model", default=768),
        Size("num_attention_heads", "n_heads", default=12),
        SharedOut(even=True),
        Size("max_position_embeddings", "max_positions", default=8192),
        Size("vocab_size", "n_vocab", default=50368),
        Size("intermediate_size", "d_ff", default=1152),
        eps("norm_eps", 1e-5),
        activation("hidden_activation", "gelu", tanh="gelu_new"),
        Flag("norm_bias", "norm_bias", default=False, at=_norm_bias),
        Flag("attention_bias", "attention_bias", default=False, at=lambda parts: parts.bias),
        Flag("mlp_bias", "mlp_bias", default=False),
        depth("num_hidden_layers", 22),
        Layers(),
        _Transform(HEADS, "masked"),
        Irrelevant(
            "training only", "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "sparse_pred_ignore_index"
        ),
        Irrelevant("with labels only: logits that no loss looks at are then not computed", "sparse_prediction"),
        Irrelevant("describes a classifier", "classifier_pooling"),
        Irrelevant(
            "how it is computed, not what", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"
        ),
        Irrelevant("norm_eps is what is read", "layer_norm_eps"),
        Only("position_embedding_type", "absolute", None, reason="positions are rotary, whatever an early file says"),
        Only("is_decoder", False, reason="as a decoder its tokens would not see those after them"),
    ),
    build=build,
    names=_names,
)
