"""The opt family: learned positions that start at row 2, LayerNorm before each branch or after each sum, ReLU.

Zhang et al. 2022 (arXiv 2205.01068). OPT-350M has tables narrower than its stream, a matrix to and one from it, and
norms after the sums.
"""

from __future__ import annotations

from typing import Any, Unpack

from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, Values, activation, depth, tied
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import DerivedHeadWidth
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Block, Branch, Head, LayerNorm, LearnedPositions, Model, TiedHead, TokenEmbedding

OFFSET = 2  # rows of the table before that of position 0
EPS = 1e-5  # PyTorch's own; no config says another

OUTSIDE = {
    "embedding": "model.decoder.embed_tokens",
    "embedding.project": "model.decoder.project_in",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "head.project": "model.decoder.project_out",
}
STEMS = {
    **{f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.body.o": "self_attn.out_proj",
    "ffn.body.up": "fc1",
    "ffn.body.down": "fc2",
}


def build(
    *,
    bias: bool = True,
    affine: bool = True,
    norm_first: bool = True,
    final_norm: bool = True,
    d_table: int | None = None,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes; tables as wide as the stream, or `d_table`.

    `norm_first` norms what each branch reads, otherwise each sum is normed and there is no final norm; `affine` gives
    the norms their gains and biases.
    """
    made = sized(sizes, activation="relu", tied=True)
    d_model, norm = made.d_model, LayerNorm(d=made.d_model, eps=EPS, gain=affine, bias=affine)
    bodies = {"attention": made.attention(bias=bias, output_bias=bias), "ffn": made.plain(bias)}
    before, after = (norm, None) if norm_first else (None, norm)
    both = tuple(Branch(name=name, body=body, norm=before, sum_norm=after) for name, body in bodies.items())
    tables = {"n_vocab": made.n_vocab, "d_model": d_model, "d_table": None if d_table == d_model else d_table}
    return made.model(
        (Block(branches=both),) * made.n_layers,
        norm if norm_first and final_norm else None,
        embedding=TokenEmbedding(**tables),
        positions=LearnedPositions(n_positions=made.max_positions, d_model=d_model, offset=OFFSET),
        head=(TiedHead if made.tied else Head)(**tables),
    )


def _names(spec: Model, family: str) -> TensorTable:
    norm = "norm" if spec.blocks[0].branches[0].norm is not None else "sum_norm"
    norms = {f"attention.{norm}": "self_attn_layer_norm", f"ffn.{norm}": "final_layer_norm"}
    return Names(stems=STEMS | norms, outside=OUTSIDE, layers="model.decoder.layers", ignored={})(spec, family)


class _NoFinalNorm(Flag):
    """Whether the norm before the head is left out, where there are norms before the branches."""

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> bool:  # noqa: ANN401
        return not super().get(reader, default, null, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: parts.first.norm is not None and parts.model.norm is None}


FAMILY = Family(
    name="opt",
    heads=("OPTForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' OPTConfig
        Size("hidden_size", "d_model", default=768),
        Size("num_attention_heads", "n_heads", default=12),
        DerivedHeadWidth(),
        Size(
            "word_embed_proj_dim",
            "d_table",
            default=lambda values: values["d_model"],
            null=lambda values: values["d_model"],
            derived=True,
            at=lambda parts: parts.embedding.d_table or parts.d_model,
        ),
        Size("vocab_size", "n_vocab", default=50272),
        depth("num_hidden_layers", 12),
        Size("ffn_dim", "d_ff", default=3072),
        Size("max_position_embeddings", "max_positions", default=2048),
        activation("activation_function", "relu", tanh="gelu_new"),
        Flag("enable_bias", "bias", default=True),
        Flag(
            "layer_norm_elementwise_affine",
            "affine",
            default=True,
            at=lambda parts: bool(parts.at("first.norm.gain" if parts.first.norm else "first.sum_norm.gain")),
        ),
        Flag("do_layer_norm_before", "norm_first", default=True, at=lambda parts: parts.first.norm is not None),
        _NoFinalNorm("_remove_final_layer_norm", "final_norm", default=False),
        tied(True),
        Irrelevant("training only", "activation_dropout", "layerdrop", "init_std"),
        Only("learned_embeddings", True, reason="positions are learned in this family"),
        Only("scale_embeddings", False, reason="embeddings are not scaled in this family"),
    ),
    build=build,
    names=_names,
)
