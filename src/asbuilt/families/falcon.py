"""The falcon family: attention and feed-forward in parallel, few key heads, q, k and v stored by key head.

Almazrouei et al. 2023 (arXiv 2311.16867). Two generations share the name. The older (7B) has one norm for both branches
and, under `multi_query`, one key head whatever `num_kv_heads` says; the newer (40B, 180B, 11B) has `num_kv_heads` key
heads, and a norm for each branch unless `num_ln_in_parallel_attn` is 1. Files that ask for ALiBi are refused:
transformers adds it twice in one of its two ways of computing, and rounds it to bfloat16 in both.
"""

from __future__ import annotations

from typing import Any, Unpack

from asbuilt.errors import InputError
from asbuilt.families.shared.common import divide
from asbuilt.families.shared.dimensions import Sizes, parallel_block, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Fixed, Flag, Only, Size, Values, activation, depth, eps, tied
from asbuilt.families.shared.names import FUSED_STEMS, Fused, Names, by_key_head, in_parallel
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import DerivedHeadWidth, four_times
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import LayerNorm, Model
from asbuilt.spec.part import LARGEST_SIZE

ONE_NORM, TWO_NORMS, SEQUENTIAL = "one norm", "two norms", "sequential"

STEMS = {path: name for path, name in FUSED_STEMS.items() if "norm" not in path}
NORMS = {
    ONE_NORM: {"parallel.norm": "input_layernorm"},
    TWO_NORMS: {"attention.norm": "ln_attn", "ffn.norm": "ln_mlp"},
    SEQUENTIAL: {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"},
}


def build(*, kind: str = ONE_NORM, eps: float = 1e-5, bias: bool = False, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; `kind` is ONE_NORM, TWO_NORMS (both parallel) or SEQUENTIAL.

    d_ff is 4 * d_model unless said.
    """
    made = sized(sizes, activation="gelu", tied=True)
    norm, attention = LayerNorm(d=made.d_model, eps=eps), made.attention(bias=bias, output_bias=bias)
    block = pre_norm(attention, made.plain(bias), norm, parallel=kind == TWO_NORMS)
    if kind == ONE_NORM:
        block = parallel_block(attention, made.plain(bias), norm)
    return made.model((block,) * made.n_layers, norm)


class _Generation:
    """The kind of block and how many key heads there are, which the two generations say differently."""

    newer, multi, parallel, norms = (
        "new_decoder_architecture",
        "multi_query",
        "parallel_attn",
        "num_ln_in_parallel_attn",
    )
    heads = ("num_kv_heads", "n_head_kv")

    def read(self, reader: ConfigReader, values: Values) -> None:
        n_heads = values["n_heads"]
        newer = reader.flag(self.newer, default=False)
        multi_query = reader.flag(self.multi, default=True)
        parallel = reader.flag(self.parallel, default=True)
        kv_heads = reader.size(*self.heads, default=n_heads, null=n_heads)
        usual = 2 if newer else 1
        norms = reader.size(self.norms, default=usual, null=usual, most=2)
        if newer:
            reader.require(self.parallel, parallel, f"true with {self.newer}")
            divide(reader, n_heads, reader.names["n_heads"], kv_heads, self.heads[0])
            values |= {"kind": TWO_NORMS if norms == 2 else ONE_NORM, "n_kv_heads": kv_heads}
            return
        reader.require(self.norms, norms == 1 or not parallel, f"1 without {self.newer}")
        if multi_query:
            for key in self.heads:
                reader.irrelevant(key, f"ignored: {self.multi} means one key head")
        else:
            allowed = f"equal to num_attention_heads = {n_heads} without {self.multi}"
            reader.require(self.heads[0], kv_heads == n_heads, allowed)
        values |= {"kind": ONE_NORM if parallel else SEQUENTIAL, "n_kv_heads": 1 if multi_query else n_heads}

    def write(self, parts: Parts) -> dict[str, Any]:
        kind, n_heads, kv_heads = _kind(parts), parts.n_heads, parts.n_kv_heads
        if kind == TWO_NORMS or (kind == ONE_NORM and kv_heads not in (1, n_heads)):
            return {self.newer: True, self.heads[0]: kv_heads, self.norms: 2 if kind == TWO_NORMS else 1}
        if kv_heads not in (1, n_heads):
            raise InputError(
                "a falcon config cannot express this",
                field="blocks.0.attention.body.n_kv_heads",
                value=kv_heads,
                allowed=f"1 or {n_heads}",
            )
        older = {self.newer: False, self.multi: kv_heads == 1, self.parallel: kind == ONE_NORM}
        return older if kv_heads == 1 else older | {self.heads[0]: n_heads}


def _kind(parts: Parts) -> str:
    if len(parts.model.blocks[0].branches) == 1:
        return ONE_NORM
    return TWO_NORMS if parts.last.parallel else SEQUENTIAL


def _names(spec: Model, family: str) -> TensorTable:
    kind = _kind(Parts(spec, family, {}))
    at = "parallel.body.attention" if kind == ONE_NORM else "attention.body"
    own = Names(
        stems=STEMS | in_parallel(STEMS) | NORMS[kind],
        outside={"embedding": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
        layers="transformer.h",
        fused={"self_attention.query_key_value": Fused.qkv(by_key_head, at)},
        ignored={},
    )
    return own(spec, family)


FAMILY = Family(
    name="falcon",
    prefix="transformer.",
    heads=("FalconForCausalLM", "RWForCausalLM"),  # the second in the files that bring their own code
    keys=(  # defaults as in transformers' FalconConfig
        Fixed("alibi", False, reason="ALiBi is not supported in this family: transformers computes it in two ways"),
        Only("apply_residual_connection_post_layernorm", False, reason="residuals after the norm are not supported"),
        # d_ff is 4 times that
        Size("hidden_size", "d_model", default=4544, also=("n_embed",), most=LARGEST_SIZE // 4),
        Size("num_attention_heads", "n_heads", default=71, also=("n_head",)),
        DerivedHeadWidth(even=True),
        Size("max_position_embeddings", "max_positions", default=2048),
        _Generation(),
        Rope(),
        Size("vocab_size", "n_vocab", default=65024),
        depth("num_hidden_layers", 32, "n_layer"),
        Size("ffn_hidden_size", "d_ff", default=four_times, null=four_times, derived=True),
        Only(
            "ff_factor",
            lambda values: values["d_ff"] // values["d_model"],
            reason="an older spelling of ffn_hidden_size",
        ),
        eps("layer_norm_epsilon", 1e-5),
        activation("activation", "gelu", tanh="gelu_new"),
        Flag("bias", "bias", default=False, at="mlp_bias"),
        tied(True),
    ),
    build=build,
    names=_names,
)
