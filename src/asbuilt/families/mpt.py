"""The mpt family: ALiBi instead of positions, LayerNorm without bias, no biases anywhere, q, k and v stored as one.

MosaicML 2023, MPT-7B and MPT-30B; ALiBi: Press et al. 2021 (arXiv 2108.12409). The published files say
`learned_pos_emb` although ALiBi is on: there is no table of positions.
"""

from __future__ import annotations

from typing import Any, Unpack

from asbuilt.families.shared.common import read_common
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only, Size, Values, depth, eps, tied
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import Alibi, LayerNorm, Model
from asbuilt.spec.part import LARGEST_SIZE

HEADS = ("MptForCausalLM", "MPTForCausalLM")  # the second in the files that bring their own code
STEMS = {
    "attention.norm": "norm_1",
    "attention.body.o": "attn.out_proj",
    "ffn.norm": "norm_2",
    "ffn.body.up": "ffn.up_proj",
    "ffn.body.down": "ffn.down_proj",
}


def build(*, eps: float = 1e-5, scale: float | None = None, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes; d_ff is 4 * d_model, `scale` None means d_head^-0.5."""
    made = sized(sizes, activation="gelu", tied=True)
    norm = LayerNorm(d=made.d_model, eps=eps, bias=False)
    attention = made.attention(scale=scale, positions=Alibi(n_heads=made.n_heads))
    return made.model((pre_norm(attention, made.plain(), norm),) * made.n_layers, norm)


class _AttentionConfig:
    """The object `attn_config`: what scores are multiplied by, and keys that allow one value."""

    key, scale = "attn_config", "softmax_scale"
    inner = (
        Irrelevant("training, and how it is computed", "attn_pdrop", "attn_impl"),
        Only("attn_type", "multihead_attention", reason="multi-query attention is not supported in this family"),
        Only("clip_qkv", None, reason="clipped queries, keys and values are not supported"),
        Only("prefix_lm", False, reason="bidirectional attention within a prefix is not supported"),
        Only("qk_ln", False, reason="norms of queries and keys are not supported in this family"),
        Only("attn_uses_sequence_id", False, reason="several texts in one sequence are not supported"),
        Only("alibi", True, reason="without ALiBi the published code has learned positions, and transformers none"),
        # the published code heeds it, transformers computes 8 whatever it says: nothing to check another value against
        Only("alibi_bias_max", 8, reason="other slopes of ALiBi are not supported"),
    )

    def read(self, reader: ConfigReader, values: Values) -> None:
        inner = reader.nested(self.key)
        if inner is None:
            return
        read_common(inner, "mpt", HEADS)  # transformers writes the object as a config of its own
        for key in self.inner:
            key.read(inner, values)
        values["scale"] = inner.number(self.scale) if inner.given(self.scale) else None
        inner.finish()
        reader.carried[self.key] = inner.carried

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: parts.carried.get(self.key, {}) | {self.scale: parts.attention.scale}}


FAMILY = Family(
    name="mpt",
    prefix="transformer.",
    heads=HEADS,
    keys=(  # defaults as in transformers' MptConfig
        # d_ff is 4 times that
        Size("d_model", "d_model", default=2048, also=("hidden_size",), most=LARGEST_SIZE // 4),
        Size("n_heads", "n_heads", default=16, also=("num_attention_heads",), divides="d_model"),
        Size("vocab_size", "n_vocab", default=50368),
        depth("n_layers", 24, "num_hidden_layers"),
        Size("max_seq_len", "max_positions", default=2048),
        eps("layer_norm_epsilon", 1e-5),
        _AttentionConfig(),
        tied(True),
        Irrelevant("training only", "emb_pdrop", "embedding_fraction", "init_config", "init_device", "verbose"),
        Irrelevant("names the tokenizer", "tokenizer_name"),
        Irrelevant("has no effect beside ALiBi", "learned_pos_emb"),
        Only("expansion_ratio", 4, reason="the feed-forward is 4 times as wide as the stream"),
        Only("logit_scale", None, reason="scaled logits are not supported in this family"),
        Only("no_bias", True, reason="biases are not supported in this family"),
        Only("norm_type", "low_precision_layernorm", "layernorm", reason="other norms are not supported"),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        outside={"embedding": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
        layers="transformer.blocks",
        fused={"attn.Wqkv": Fused.qkv()},
        ignored={},
    ),
)
