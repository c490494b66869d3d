"""The gpt2 family: learned positions, LayerNorm before each branch, one fused q, k, v matrix stored (in, out).

Radford et al. 2019; GPT-3 (arXiv 2005.14165) is read through the same class where its sparse layers are left out.
"""

from __future__ import annotations

from typing import Any, Unpack

from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, Values, activation, depth, eps, tied
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import four_times
from asbuilt.families.shared.table import Chain, Concat, Layout, Transpose
from asbuilt.spec import Block, LayerNorm, LearnedPositions, Model
from asbuilt.spec.part import LARGEST_SIZE

STEMS = {
    "attention.norm": "ln_1",
    "attention.body.o": "attn.c_proj",
    "ffn.norm": "ln_2",
    "ffn.body.up": "mlp.c_fc",
    "ffn.body.down": "mlp.c_proj",
}
OUTSIDE = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
MASKS = {r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)": "the causal mask, stored as a buffer"}
SUMMARY = Irrelevant(
    "describes a classifier, and the head here is the language model's",
    *(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
)


def build(
    *,
    n_positions: int | None = None,
    eps: float = 1e-5,
    scale_by_width: bool = True,
    scale_by_layer: bool = False,
    **sizes: Unpack[Sizes],
) -> Model:
    """Returns the model of these sizes; d_ff is 4 * d_model unless said, n_positions None max_positions.

    Scores are multiplied by d_head^-0.5 if `scale_by_width`, and divided by the layer's number, counted from 1, if
    `scale_by_layer`.
    """
    made = sized(sizes, activation="gelu_tanh", tied=True)
    norm, ffn = LayerNorm(d=made.d_model, eps=eps), made.plain(True)
    base = made.head_width**-0.5 if scale_by_width else 1.0

    def block(scale: float) -> Block:
        return pre_norm(made.attention(bias=True, output_bias=True, scale=scale), ffn, norm)

    by_layer = tuple(block(base / (i + 1)) for i in range(made.n_layers)) if scale_by_layer else ()
    positions = LearnedPositions(n_positions=n_positions or made.max_positions, d_model=made.d_model)
    return made.model(by_layer or (block(base),) * made.n_layers, norm, positions=positions)


class _Scales:
    """What scores are multiplied by: the first and the last layer tell both."""

    by_width, by_layer = "scale_attn_weights", "scale_attn_by_inverse_layer_idx"

    def read(self, reader: ConfigReader, values: Values) -> None:
        Flag(self.by_width, "scale_by_width", default=True).read(reader, values)
        Flag(self.by_layer, "scale_by_layer", default=False).read(reader, values)

    def write(self, parts: Parts) -> dict[str, Any]:
        usual = parts.d_head**-0.5
        scales = [usual if layer.scale is None else layer.scale for layer in parts.attentions]
        return {self.by_width: scales[0] == usual, self.by_layer: scales[-1] != scales[0]}


def _positions(parts: Parts) -> int:
    table = parts.model.positions
    return table.n_positions if isinstance(table, LearnedPositions) else parts.max_positions


def _transposed(block: Block, rows: tuple[int, ...]) -> Layout:
    return Chain((Concat(rows), Transpose()))


FAMILY = Family(
    name="gpt2",
    prefix="transformer.",
    heads=("GPT2LMHeadModel",),
    keys=(  # defaults as in transformers' GPT2Config
        # d_ff is 4 times that
        Size("n_embd", "d_model", default=768, also=("hidden_size",), most=LARGEST_SIZE // 4),
        Size("n_head", "n_heads", default=12, also=("num_attention_heads",), divides="d_model"),
        Size("n_positions", "n_positions", default=1024, also=("max_position_embeddings",), at=_positions),
        Size(
            "n_ctx",
            "max_positions",
            default=lambda values: values["n_positions"],
            must=(
                lambda values: values["max_positions"] <= values["n_positions"],
                lambda values: f"at most n_positions = {values['n_positions']}",
            ),
        ),
        Size("vocab_size", "n_vocab", default=50257),
        depth("n_layer", 12, "num_hidden_layers"),
        Size(
            "n_inner",
            "d_ff",
            default=four_times,
            null=four_times,
            at=lambda parts: None if parts.d_ff == 4 * parts.d_model else parts.d_ff,
        ),
        eps("layer_norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new", tanh="gelu_new"),
        _Scales(),
        tied(True),
        SUMMARY,
        Only("n_special", 0, reason="rows for special tokens beside the vocabulary are not supported"),
        Irrelevant("the head covers the vocabulary, and there are no others", "predict_special_tokens"),
        Irrelevant("the same scores, computed in float32 and another order", "reorder_and_upcast_attn"),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        outside=OUTSIDE,
        layers="transformer.h",
        fused={"attn.c_attn": Fused.qkv(_transposed)},
        layouts=dict.fromkeys(("attention.body.o", "ffn.body.up", "ffn.body.down"), Transpose()),
        ignored=MASKS,
    ),
)
