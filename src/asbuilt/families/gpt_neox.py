"""The gpt_neox family: rotary positions on part of each head, attention and feed-forward side by side, each normed.

GPT-NeoX-20B (Black et al. 2022, arXiv 2204.06745) and Pythia (Biderman et al. 2023, arXiv 2304.01373). Both branches
read the block's input, each through a LayerNorm of its own; q, k and v are stored as one tensor, head by head.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, config_of, divide, read_common, require_same
from asbuilt.families.shared.fused import branches, expect, fused_table, grouped
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    Model,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "gpt_neox"
PREFIX = "gpt_neox."
HEADS = ("GPTNeoXForCausalLM",)
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
ROTARY_KEYS = ("rotary_emb_base", "rotary_pct")

OUTSIDE = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.o": "attention.dense",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.up": "mlp.dense_h_to_4h",
    "ffn.body.down": "mlp.dense_4h_to_h",
}
IGNORED = {
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)": "the causal mask, stored as a buffer",
    r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq": "rotary frequencies, computed from the config",
}


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    max_positions: int,
    rotary: Rotary,
    eps: float = 1e-5,
    activation: Activation = "gelu",
    attention_bias: bool = True,
    parallel: bool = True,
    tied: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; `parallel` lets both branches read the block's input."""
    norm = LayerNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        positions=rotary,
        bias=attention_bias,
        output_bias=attention_bias,
    )
    ffn = MLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=True)
    both = (
        Branch(name="attention", body=attention, norm=norm),
        Branch(name="ffn", body=ffn, norm=norm, parallel=parallel),
    )
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=both),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' GPTNeoXConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    d_model = reader.size("hidden_size", default=6144)
    n_heads = reader.size("num_attention_heads", default=64)
    context = reader.size("max_position_embeddings", default=2048)
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    rotary = read_rotary(reader, d_head, context, partial=0.25, outside=ROTARY_KEYS)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=50432),
        "n_layers": reader.size("num_hidden_layers", default=44, most=MOST_LAYERS),
        "d_ff": reader.size("intermediate_size", default=24576),
        "eps": reader.number("layer_norm_eps", default=1e-5, most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="gelu"),
        "attention_bias": reader.flag("attention_bias", default=True),
        "parallel": reader.flag("use_parallel_residual", default=True),
        "tied": reader.flag("tie_word_embeddings", default=False),
    }
    reader.finish()
    spec = build(d_model=d_model, n_heads=n_heads, max_positions=context, rotary=rotary, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    first, second = branches(spec, FAMILY)
    attention = expect(first.body, Attention, "blocks.0.attention.body", FAMILY)
    ffn = expect(second.body, MLP, "blocks.0.ffn.body", FAMILY)
    norm = expect(first.norm, LayerNorm, "blocks.0.attention.norm", FAMILY)
    rotary = expect(attention.positions, Rotary, "blocks.0.attention.body.positions", FAMILY)
    scaling = write_rotary(rotary, spec.max_positions)["rope_scaling"]
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": ffn.d_ff,
        "hidden_act": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "layer_norm_eps": float(norm.eps),
        "attention_bias": attention.bias,
        "use_parallel_residual": second.parallel,
        "rotary_emb_base": float(rotary.theta),
        "rotary_pct": rotary.d_rotary / attention.d_head,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        **({"rope_scaling": scaling} if scaling else {}),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    attention = expect(branches(spec, FAMILY)[0].body, Attention, "blocks.0.attention.body", FAMILY)
    fused = ("attention.body", "attention.query_key_value", grouped(attention))
    return fused_table(
        spec, FAMILY, outside=OUTSIDE, layers="gpt_neox.layers", stems=STEMS, fused=fused, ignored=IGNORED
    )
