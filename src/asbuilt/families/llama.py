"""The llama family: RMSNorm before each branch, rotary grouped-query attention, gated feed-forward, no positions table.

Llama 1 to 3.3, SmolLM2, TinyLlama and others publish under `model_type: llama`. Touvron et al. 2023
(arXiv 2302.13971, 2307.09288); names on disk as on the hub.
"""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    divide,
    named_entries,
    read_common,
    require_same,
)
from asbuilt.families.shared.dimensions import head_width
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table, entry
from asbuilt.spec import (
    Activation,
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    Model,
    RMSNorm,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

FAMILY = "llama"
HEADS = ("LlamaForCausalLM", "LLaMAForCausalLM")  # the second in the earliest conversions
WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_pytorch_tanh"}

STEMS = {
    "attention.norm": "input_layernorm",
    "attention.body.q": "self_attn.q_proj",
    "attention.body.k": "self_attn.k_proj",
    "attention.body.v": "self_attn.v_proj",
    "attention.body.o": "self_attn.o_proj",
    "ffn.norm": "post_attention_layernorm",
    "ffn.body.gate": "mlp.gate_proj",
    "ffn.body.up": "mlp.up_proj",
    "ffn.body.down": "mlp.down_proj",
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
    n_kv_heads: int | None = None,
    eps: float = 1e-5,
    activation: Activation = "silu",
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_head is rotary.d_rotary, n_kv_heads None means n_heads."""
    norm = RMSNorm(d=d_model, eps=eps)
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        d_head=rotary.d_rotary,
        positions=rotary,
        bias=attention_bias,
        output_bias=output_bias,
    )
    ffn = GatedMLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=mlp_bias)
    branches = (Branch(name="attention", body=attention, norm=norm), Branch(name="ffn", body=ffn, norm=norm))
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=branches),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str, prefix: str = "") -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' LlamaConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name, prefix)
    dtype = read_common(reader, FAMILY, HEADS)
    reader.irrelevant("pretraining_tp", "only slices the same products")
    reader.irrelevant("is_llama_config", "a note of the converter's")
    reader.only("activation", "swiglu", reason="hidden_act says it, and the feed-forward part is gated")
    for key in ("qk_layernorm", "use_qk_norm"):
        reader.only(key, False, reason="queries and keys are not normed in this family")
    reader.only("rope_interleaved", False, None, reason="llama turns halves, not adjacent pairs")
    d_model = reader.size("hidden_size", default=4096)
    n_heads = reader.size("num_attention_heads", default=32)
    d_head = head_width(reader, d_model, n_heads)
    context = reader.size("max_position_embeddings", "max_sequence_length", default=2048)
    bias = reader.flag("attention_bias", default=False)
    rotary = read_rotary(reader, d_head, context)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=32000),
        "n_layers": reader.size("num_hidden_layers", default=32, most=MOST_LAYERS),
        "n_kv_heads": reader.size("num_key_value_heads", default=n_heads, null=n_heads, derived=True),
        "d_ff": reader.size("intermediate_size", default=11008),
        "eps": reader.number("rms_norm_eps", default=1e-6, most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="silu"),
        "mlp_bias": reader.flag("mlp_bias", default=False),
        "tied": reader.flag("tie_word_embeddings", default=False),
    }
    reader.finish()
    divide(reader, n_heads, "num_attention_heads", sizes["n_kv_heads"], "num_key_value_heads")
    spec = build(
        d_model=d_model,
        n_heads=n_heads,
        max_positions=context,
        rotary=rotary,
        name=name,
        attention_bias=bias,
        output_bias=bias,
        **sizes,
    )
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _parts(spec: Model) -> tuple[Attention, GatedMLP, RMSNorm, Rotary]:
    """Returns the parts of the first block; raises InputError naming the place where the spec is no llama."""
    named = {branch.name: branch for branch in spec.blocks[0].branches}
    attention, ffn = named.get("attention"), named.get("ffn")
    if len(named) != 2 or attention is None or ffn is None:
        raise InputError(f"{FAMILY} has two branches", field="blocks.0", value=list(named), allowed="attention, ffn")
    norm = attention.norm
    for path, value, kind in (
        ("attention.body", attention.body, Attention),
        ("ffn.body", ffn.body, GatedMLP),
        ("attention.norm", norm, RMSNorm),
        ("attention.body.positions", getattr(attention.body, "positions", None), Rotary),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{FAMILY} has {kind.__name__} here", field=f"blocks.0.{path}", value=repr(value))
    assert isinstance(attention.body, Attention)
    assert isinstance(ffn.body, GatedMLP)
    assert isinstance(norm, RMSNorm)
    assert isinstance(attention.body.positions, Rotary)
    return attention.body, ffn.body, norm, attention.body.positions


def write(spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
    attention, ffn, norm, rotary = _parts(spec)
    written = {
        "architectures": [HEADS[0]],
        "model_type": FAMILY,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "hidden_act": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": float(norm.eps),
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        **write_rotary(rotary, spec.max_positions),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    tied = isinstance(spec.head, TiedHead)
    entries = [entry("embedding.weight", "model.embed_tokens.weight"), entry("norm.weight", "model.norm.weight")]
    if not tied:
        entries.append(entry("head.weight", "lm_head.weight"))
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"model.layers.{i}.", {}, FAMILY)
    return Table(
        entries=tuple(entries),
        ignored={r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"},
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )
