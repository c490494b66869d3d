"""The phi family: attention and feed-forward side by side on one LayerNorm, parts of heads turned, biases throughout.

Phi-1, 1.5 and 2: Gunasekar et al. 2023 (arXiv 2306.11644), Li et al. 2023 (arXiv 2309.05463). The head has a bias too.
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
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.rotary import partial_factor, read_rotary, write_rotary
from asbuilt.families.shared.table import Table, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    Head,
    LayerNorm,
    Model,
    Parallel,
    Part,
    Rotary,
    TiedHead,
    TokenEmbedding,
    weights,
)

FAMILY = "phi"
HEADS = ("PhiForCausalLM",)

OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"}
STEMS = {
    "parallel.norm": "input_layernorm",
    "parallel.body.attention.q": "self_attn.q_proj",
    "parallel.body.attention.k": "self_attn.k_proj",
    "parallel.body.attention.v": "self_attn.v_proj",
    "parallel.body.attention.o": "self_attn.dense",
    "parallel.body.attention.q_norm": "self_attn.q_layernorm",
    "parallel.body.attention.k_norm": "self_attn.k_layernorm",
    "parallel.body.ffn.up": "mlp.fc1",
    "parallel.body.ffn.down": "mlp.fc2",
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
    activation: Activation = "gelu_tanh",
    head_norms: bool = False,
    tied: bool = False,
    name: str = FAMILY,
) -> Model:
    """Returns the model of these dimensions; d_head is d_model / n_heads, n_kv_heads None means n_heads.

    `head_norms` normalises each head's queries and keys.
    """
    d_head = d_model // n_heads
    norm, per_head = LayerNorm(d=d_model, eps=eps), LayerNorm(d=d_head, eps=eps) if head_norms else None
    attention = Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        d_head=d_head,
        positions=rotary,
        bias=True,
        output_bias=True,
        q_norm=per_head,
        k_norm=per_head,
    )
    body = Parallel(attention=attention, ffn=MLP(d_model=d_model, d_ff=d_ff, activation=activation, bias=True))
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(Block(branches=(Branch(name="parallel", norm=norm, body=body),)),) * n_layers,
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab, bias=True),
        max_positions=max_positions,
        norm=norm,
        name=name,
    )


def read(config: dict[str, Any], name: str) -> Reading:
    """Returns what a config.json of this family says; class defaults are those of transformers' PhiConfig.

    `name` becomes the model's name and stands in messages. Raises InputError naming the key at fault.
    """
    reader = ConfigReader(config, name)
    dtype = read_common(reader, FAMILY, HEADS)
    d_model = reader.size("hidden_size", default=2048)
    n_heads = reader.size("num_attention_heads", default=32)
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    reader.only("head_dim", d_head, reason="heads of this family are hidden_size / num_attention_heads wide")
    context = reader.size("max_position_embeddings", default=2048)
    sizes: dict[str, Any] = {
        "n_vocab": reader.size("vocab_size", default=51200),
        "n_layers": reader.size("num_hidden_layers", default=24, most=MOST_LAYERS),
        "n_kv_heads": reader.size("num_key_value_heads", default=n_heads, null=n_heads, derived=True),
        "d_ff": reader.size("intermediate_size", default=8192),
        "eps": reader.number("layer_norm_eps", default=1e-5, most=1.0),
        "activation": reader.choice("hidden_act", choices=ACTIVATION_NAMES, default="gelu_new"),
        "head_norms": reader.flag("qk_layernorm", default=False),
        "tied": reader.flag("tie_word_embeddings", default=False),
        "rotary": read_rotary(reader, d_head, context, partial=0.5),
    }
    reader.only("attention_bias", True, False, reason="all maps of this family have biases, whatever it says")
    reader.only("rotary_dim", sizes["rotary"].d_rotary, reason="what partial_rotary_factor says, in an older spelling")
    reader.finish()
    divide(reader, n_heads, "num_attention_heads", sizes["n_kv_heads"], "num_key_value_heads")
    spec = build(d_model=d_model, n_heads=n_heads, max_positions=context, name=name, **sizes)
    return Reading(
        spec=spec, carried=reader.carried, dtype=dtype, family=FAMILY, defaults=reader.defaults, notes=reader.notes
    )


def _wrong(path: str, value: Part | None, kind: type[Part]) -> InputError:
    return InputError(f"{FAMILY} has {kind.__name__} here", field=path, value=repr(value))


def _parts(spec: Model) -> tuple[Attention, MLP, LayerNorm, Rotary]:
    """Returns the parts of the first block; raises InputError naming the place where the spec is no phi."""
    first, *more = spec.blocks[0].branches
    if more or first.name != "parallel":
        names = [branch.name for branch in (first, *more)]
        raise InputError(f"{FAMILY} has one branch", field="blocks.0", value=names, allowed="parallel")
    if not isinstance(first.body, Parallel):
        raise _wrong("blocks.0.parallel.body", first.body, Parallel)
    attention, ffn, norm = first.body.attention, first.body.ffn, first.norm
    if not isinstance(attention, Attention):
        raise _wrong("blocks.0.parallel.body.attention", attention, Attention)
    if not isinstance(ffn, MLP):
        raise _wrong("blocks.0.parallel.body.ffn", ffn, MLP)
    if not isinstance(norm, LayerNorm):
        raise _wrong("blocks.0.parallel.norm", norm, LayerNorm)
    if not isinstance(attention.positions, Rotary):
        raise _wrong("blocks.0.parallel.body.attention.positions", attention.positions, Rotary)
    return attention, ffn, norm, attention.positions


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
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "layer_norm_eps": float(norm.eps),
        "qk_layernorm": attention.q_norm is not None,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        "partial_rotary_factor": partial_factor(rotary.d_rotary, attention.d_head),
        **write_rotary(rotary, spec.max_positions),
    }
    config = config_of(written, carried, dtype)
    require_same(spec, read(config, spec.name).spec, FAMILY)
    return config


def table(spec: Model) -> Table:
    """Returns the names and layouts of a checkpoint folder's tensors."""
    tied = isinstance(spec.head, TiedHead)
    outside = [name.rpartition(".") for name, _, _ in weights(spec) if not name.startswith("blocks.")]
    for stem, dot, kind in outside:
        if stem not in OUTSIDE:
            raise InputError(f"{FAMILY} files have no name for this weight", field=stem + dot + kind)
    entries = [entry(f"{stem}.{kind}", f"{OUTSIDE[stem]}.{kind}") for stem, _, kind in outside]
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", STEMS, f"model.layers.{i}.", {}, FAMILY)
    return Table(
        entries=tuple(entries),
        ignored={r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"},
        duplicates={"lm_head.weight": "embedding.weight"} if tied else {},
    )
